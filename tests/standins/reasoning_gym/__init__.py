"""A stand-in with reasoning-gym's interface, for tests that must not need the package: one task, sums."""

from __future__ import annotations

from typing import Any

from reasoning_gym.factory import DATASETS


def create_dataset(name: str, **settings: Any) -> Any:
    if name not in DATASETS:
        raise ValueError(f"Dataset '{name}' not registered")
    made, kind = DATASETS[name]
    return made(kind(**settings))
