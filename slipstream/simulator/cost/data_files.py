"""The sections of configs/sim/*.yaml, where every constant of the simulator stands beside its source."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from slipstream.config import require

# `configs` lies beside `slipstream` in a checkout, an image and a wheel alike.
CONFIGS = Path(__file__).resolve().parents[3] / "configs"


def section(kind: str, name: str) -> dict[str, Any]:
    """The section `name` of configs/sim/<kind>.yaml.

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
    return yaml.safe_load((CONFIGS / "sim" / f"{kind}.yaml").read_text())
