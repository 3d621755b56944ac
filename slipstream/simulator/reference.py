"""Published measurements and projections, which reports quote in columns of their own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from slipstream.catalog import CONFIGS
from slipstream.config import from_mapping, read_mapping
from slipstream.types import Arm, StageTimes


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftReference:
    """Published results of one draft length, or of one kind of draft."""

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
    draft_lengths: dict[int, DraftReference]  # by k
    drafts: dict[str, DraftReference]

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


@cache
def read_reference() -> Reference:
    """Read the paper's figures."""
    return from_mapping(Reference, read_mapping(CONFIGS / "reference" / "paper.yaml", "reference"), "reference")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectedReference:
    """Projection of the paper's closed simulator; `k` None is the best point of its map."""

    num_gpus: int
    lag: int
    k: int | None
    acceptance_length: float | None
    rollout_speedup: float
    step_speedup: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatorReference:
    """Figures of configs/reference/paper_simulator.yaml; `asynchronous` is measured and never fitted."""

    ngram_generation_s: dict[str, float]
    asynchronous: dict[str, float]
    projected: tuple[ProjectedReference, ...]


def read_simulator_reference() -> SimulatorReference:
    """Read the paper's n-gram and asynchronous times, and its projections."""
    values = read_mapping(CONFIGS / "reference" / "paper_simulator.yaml", "reference")
    return from_mapping(SimulatorReference, values, "paper_simulator")
