"""Record of a whole run, with its machine, its numeric type, and its drift from earlier runs."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.records import stages
from slipstream.records.steps import ArmRecord, EvaluationRecord
from slipstream.types import Arms


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchRecord:
    """Choices of the launch that started or resumed an execution last, beside its recipe."""

    arms: Arms = Arms.BOTH
    flyte_execution: str = ""  # whose launch it was: with resume_execution another one; empty outside Flyte


@dataclass(frozen=True, kw_only=True, slots=True)
class NumericsRecord:
    """Type that `dtype: auto` of a recipe became on the machine that runs it, with the reason."""

    dtype: str
    reason: str
    float32_ms: float  # time of one matrix product
    bfloat16_ms: float
    capabilities: tuple[str, ...]  # features that torch, oneDNN and the processor report


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
    generation_gpus: int = 0  # GPUs of the engines' own nodes; 0: engines and learner share all GPUs


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftFinding:
    """One result beside the band of earlier executions."""

    name: str  # name of the result
    value: float
    num_executions: int  # earlier executions that have the result
    band: tuple[float, float] | None  # None: too few
    verdict: str  # within, above, below, too few to say, or not measured


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftRecord:
    """An execution's results against those of the executions before it."""

    summary: str  # one sentence; the reason if nothing was compared
    executions: tuple[str, ...] = ()  # executions of the comparison, the newest first
    false_alarm_rate: float = 0.0  # chance of any finding in an execution without drift
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
    draft: stages.DraftRecord | None  # None, as tuning and certificate: no speculative arm was asked for
    tuning: stages.TuningRecord | None
    arms: tuple[ArmRecord, ...]
    evaluations: tuple[EvaluationRecord, ...]
    certificate: stages.CertificateRecord | None
    numerics: NumericsRecord | None = None  # None: the recipe names its types
    logical_gpus: bool = False  # see `placement.logical_gpus`
    layout: LayoutRecord | None = None  # None: the recipe names none, and the run is not projected from itself
    asynchronous: tuple[ArmRecord, ...] = ()  # the same arms in the recipe's asynchronous loop; empty: it has none
    requested: Arms = Arms.BOTH
