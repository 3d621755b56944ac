"""Where ranks meet."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from slipstream.config import ConfigError
from slipstream.learner.rendezvous import interface_of, listen

INTERFACES = {
    name: [SimpleNamespace(address=address) for address in addresses]
    for name, addresses in {"lo": ["127.0.0.1"], "eth0": ["10.77.0.11", "fe80::1%eth0"]}.items()
}


def test_the_interface_is_the_one_that_has_the_nodes_address_and_another_hosts_address_is_refused() -> None:
    assert interface_of("10.77.0.11", INTERFACES) == "eth0"
    assert interface_of("127.0.0.1", INTERFACES) == "lo"
    with pytest.raises(ConfigError, match=r"this host's interfaces lo, eth0, got '10\.77\.0\.12'; start its Ray"):
        interface_of("10.77.0.12", INTERFACES)


def test_two_that_listen_on_one_host_never_take_the_same_port() -> None:
    places = [listen("127.0.0.1", world_size=2) for _ in range(8)]

    assert len({place.port for place in places}) == 8
