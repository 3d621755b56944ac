"""What the simulator has to be told of a run: which model and which hardware it was, by the names of its data files."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.config import require
from slipstream.simulator.cost.data_files import section_names


@dataclass(frozen=True, kw_only=True)
class SimulatorConfig:
    """Sections of configs/sim/models.yaml and configs/sim/hardware.yaml. Nothing but the projection depends on them."""

    model: str
    hardware: str

    def __post_init__(self) -> None:
        for name, value, known in (
            ("model", self.model, section_names("models")),
            ("hardware", self.hardware, section_names("hardware")),
        ):
            require(value in known, f"simulator.{name}", "must be known", value, f"known: {', '.join(known)}")
