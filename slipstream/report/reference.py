"""Published measurements that a report quotes beside its own, in columns of their own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slipstream.config import from_mapping, read_mapping, require
from slipstream.types import Arm, StageTimes

# `configs` lies beside `slipstream` in a checkout, an image and a wheel alike.
_PAPER = Path(__file__).parents[2] / "configs" / "reference" / "paper.yaml"


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftLengthReference:
    """One draft length."""

    k: int
    mean_acceptance_length: float
    generation_speedup: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftReference:
    """One kind of draft."""

    draft: str
    mean_acceptance_length: float
    generation_speedup: float


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadReference:
    """Figures measured on one workload."""

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
        """Seconds of one arm's step."""
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
        """Heading of every column that quotes it."""
        return f"paper, measured (arXiv {self.arxiv_id}), {self.hardware}"


def read_reference(path: Path | None = None) -> Reference:
    """Read reference figures; None takes the ones that come with the package.

    Raises:
        ConfigError: the file is missing or holds other fields.
    """
    source = _PAPER if path is None else path
    require(source.is_file(), "report.reference", "must be a file", str(source))
    return from_mapping(Reference, read_mapping(source, "reference"), "reference")
