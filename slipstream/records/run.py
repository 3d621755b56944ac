"""A whole run, with where and in which numeric type it was computed, and what drifted from earlier ones."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.records import stages
from slipstream.records.steps import ArmRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class NumericsRecord:
    """The type that `dtype: auto` of a recipe became on the machine that runs it, and why."""

    dtype: str
    reason: str
    float32_ms: float  # of one matrix product
    bfloat16_ms: float
    capabilities: tuple[str, ...]  # what torch, oneDNN and the processor say that they can do


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutRecord:
    """Model and machine of a run, in the words of the simulator's data files (`configs/sim/`)."""

    model: str
    hardware: str
    precision: str  # of the engine
    learner_precision: str
    num_gpus: int
    gpus_per_engine: int
    max_response_tokens: int
    generation_gpus: int = 0  # of nodes of their own; 0: engines and learner share all GPUs


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftFinding:
    """One result beside the band of earlier executions."""

    name: str  # of the result
    value: float
    num_executions: int  # earlier ones that have it
    band: tuple[float, float] | None  # None: too few
    verdict: str  # within, above, below, too few to say, or not measured


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftRecord:
    """An execution's results against those of the executions before it."""

    summary: str  # in a sentence; why nothing was compared, if nothing was
    executions: tuple[str, ...] = ()  # that it was compared with, the newest first
    false_alarm_rate: float = 0.0  # of a whole execution in which nothing drifted
    findings: tuple[DriftFinding, ...] = ()

    @property
    def outside(self) -> tuple[DriftFinding, ...]:
        """Results that lie outside their band."""
        return tuple(finding for finding in self.findings if finding.verdict in ("above", "below"))


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """Everything that the report of one workflow execution reads."""

    recipe: str
    workload: str
    execution: str
    tracking_uri: str
    versions: dict[str, str]
    machine: str
    policy: stages.PolicyRecord
    data: tuple[stages.DataSetRecord, ...]
    draft: stages.DraftRecord
    tuning: stages.TuningRecord
    arms: tuple[ArmRecord, ...]
    evaluations: tuple[stages.EvaluationRecord, ...]
    certificate: stages.CertificateRecord
    numerics: NumericsRecord | None = None  # None: the recipe names its types
    logical_gpus: bool = False  # see `placement.logical_gpus`
    layout: LayoutRecord | None = None  # None: the recipe names none, and the run is not projected from itself
    asynchronous: tuple[ArmRecord, ...] = ()  # the same arms in the recipe's asynchronous loop; empty: it has none
