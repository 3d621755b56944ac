"""What each cluster profile registers, serialised once a session."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from tests.unit.workflows.registration import Registration, registration

Registered = Callable[[str], Registration]


@pytest.fixture(scope="session")
def registered(tmp_path_factory: pytest.TempPathFactory) -> Registered:
    """The registration of a profile by its name."""
    directory = tmp_path_factory.mktemp("registration")
    return cache(lambda profile: registration(profile, directory / f"{profile}.json"))
