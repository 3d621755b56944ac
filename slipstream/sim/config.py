"""What the simulator has to be told of a run: which model and which hardware it was, by the names of its data files."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.config import require
from slipstream.sim.hardware import known_hardware
from slipstream.sim.models import known_models


@dataclass(frozen=True, kw_only=True)
class SimulatorConfig:
    """Sections of configs/sim/models.yaml and configs/sim/hardware.yaml. Nothing but the projection depends on them."""

    model: str
    hardware: str

    def __post_init__(self) -> None:
        for name, value, known in (
            ("model", self.model, known_models()),
            ("hardware", self.hardware, known_hardware()),
        ):
            require(value in known, f"simulator.{name}", "must be known", value, f"known: {', '.join(known)}")
