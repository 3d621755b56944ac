"""Rendezvous of the ranks of a learner: rank 0 opens a port on its own host, and the others connect to the port."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from slipstream.config import require


def listen(address: str, *, world_size: int) -> TCPStore:
    """Open a port of `address` that the system chooses; the socket stays open, so the port cannot be taken."""
    listening = socket.create_server((address, 0))
    port = int(listening.getsockname()[1])
    return TCPStore(
        address, port, world_size, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def join(store: TCPStore, rank: int, *, world_size: int, own_address: str) -> None:
    """Form the process group; returns when all ranks have joined.

    Args:
        own_address: address of this host, whose network interface gloo uses unless `GLOO_SOCKET_IFNAME` is set. By
            default gloo resolves the host's name, which is 127.0.0.1 in many containers.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(own_address))
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)


def interface_of(address: str, interfaces: Mapping[str, Iterable[Any]] | None = None) -> str:
    """Find the network interface that has `address`.

    Args:
        interfaces: this host's addresses by interface, as psutil has them; None asks psutil.
    Raises:
        ConfigError: no interface has the address.
    """
    known = psutil.net_if_addrs() if interfaces is None else interfaces
    found = [name for name, each in known.items() if address in (entry.address for entry in each)]
    rule = f"must be one of this host's interfaces {', '.join(known)}"
    fix = "start its Ray node with --node-ip-address of an interface that the other hosts reach"
    require(bool(found), "the node's address", rule, address, fix)
    return found[0]
