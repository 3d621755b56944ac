"""What an accelerator can do at most: memory, link and network bandwidth, floating-point rate by precision."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cache

from slipstream.config import require
from slipstream.simulator.cost.data_files import load


class Precision(StrEnum):
    """Type of weights and activations; `BYTES` has their width."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT8 = "float8"


BYTES = {Precision.FLOAT32: 4, Precision.BFLOAT16: 2, Precision.FLOAT8: 1}


def target_of(hardware: str) -> str:
    """The kind of machine that a section of configs/sim/hardware.yaml is: `cpu` or `gpu`."""
    return "cpu" if hardware.startswith("cpu") else "gpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """One accelerator. Peaks, in bytes, bytes/s and flop/s; `sources` says of each where it is from."""

    name: str
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float  # one direction, to accelerators of the same NVLink domain
    domain_gpus: int  # accelerators of one NVLink domain
    network_bytes_per_s: float  # of one accelerator, one direction, between domains
    flops_per_s: dict[str, float]  # dense, by `Precision`
    sources: dict[str, str]

    def __post_init__(self) -> None:
        constants = {field.name for field in fields(self)} - {"name", "sources"}
        missing = sorted(constants - set(self.sources))
        require(not missing, f"hardware {self.name}.sources", "must name a source of every constant", missing)
        for name in constants - {"flops_per_s"}:
            value: float = getattr(self, name)
            require(value > 0, f"hardware {self.name}.{name}", "must be > 0", value)
        found, known = sorted(self.flops_per_s), sorted(precision.value for precision in Precision)
        rule = f"must have a rate for each of {', '.join(known)}"
        require(found == known, f"hardware {self.name}.flops_per_s", rule, found)


@cache
def load_hardware(name: str) -> Hardware:
    """The section `name` of configs/sim/hardware.yaml; refuses what `load` refuses."""
    return load(Hardware, "hardware", name)
