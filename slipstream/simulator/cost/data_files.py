"""The sections of configs/sim/*.yaml, where every constant of the simulator stands beside its source."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from slipstream.config import from_mapping, read_mapping, require

T = TypeVar("T")

# `configs` lies beside `slipstream` in a checkout, an image and a wheel alike.
CONFIGS = Path(__file__).resolve().parents[3] / "configs"


def load(cls: type[T], kind: str, name: str) -> T:
    """The section `name` of configs/sim/<kind>.yaml as a `cls`.

    Raises:
        ConfigError: there is no such section, or it breaks a rule of `cls`.
    """
    return from_mapping(cls, section(kind, name), f"{kind.removesuffix('s')}.{name}")


def section(kind: str, name: str) -> dict[str, Any]:
    """The plain values of a section.

    Raises:
        ConfigError: there is no such section.
    """
    sections = _sections(kind)
    require(name in sections, kind, "must be a known section", name, f"known: {', '.join(sections)}")
    return sections[name]


def section_names(kind: str) -> tuple[str, ...]:
    """Names that `section` takes."""
    return tuple(_sections(kind))


@cache
def _sections(kind: str) -> dict[str, Any]:
    return read_mapping(CONFIGS / "sim" / f"{kind}.yaml", "simulator data")
