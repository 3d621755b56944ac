"""Published measurements, which reports quote in columns of their own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slipstream.config import from_mapping, read_mapping, require
from slipstream.types import Arm, StageTimes

# `configs` lies beside `slipstream` in a checkout, an image and a wheel alike.
_PAPER = Path(__file__).parents[2] / "configs" / "reference" / "paper.yaml"


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftLengthReference:
    """Published results of one draft length."""

    k: int
    mean_acceptance_length: float
    generation_speedup: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftReference:
    """Published results of one kind of draft."""

    draft: str
    mean_acceptance_length: float
    generation_speedup: float


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadReference:
    """Published results of one workload."""

    policy: str
    method: str
    num_speculative_tokens: int
    mean_acceptance_length: float
    generation_speedup: float
    step_speedup: float
    aime24_start: float
    aime24_end: float
    autoregressive: StageTimes
    speculative: StageTimes
    draft_lengths: tuple[DraftLengthReference, ...]
    drafts: tuple[DraftReference, ...]

    def times(self, arm: Arm) -> StageTimes:
        """Stage times of one arm's step."""
        return self.speculative if arm is Arm.SPECULATIVE else self.autoregressive


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """One publication."""

    arxiv_id: str
    title: str
    system: str
    hardware: str
    workloads: dict[str, WorkloadReference]

    @property
    def label(self) -> str:
        """Heading of the columns that quote the publication."""
        return f"paper, measured (arXiv {self.arxiv_id}), {self.hardware}"


def read_reference(path: Path | None = None) -> Reference:
    """Read reference figures; None reads those of the paper.

    Raises:
        ConfigError: the file is missing or holds other fields.
    """
    source = _PAPER if path is None else path
    require(source.is_file(), "report.reference", "must be a file", str(source))
    return from_mapping(Reference, read_mapping(source, "reference"), "reference")
