"""The published measurements (arXiv 2604.26779) as cells of a calibration, and what it projected by other means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from slipstream.catalog import CONFIGS
from slipstream.config import from_mapping, read_mapping
from slipstream.simulator.calibration import Cell, Ensemble, Group, calibrate
from slipstream.simulator.iteration import Drafting
from slipstream.simulator.settings import load_setting
from slipstream.simulator.step_cost import Learner, stagewise
from slipstream.types import Arm, StageTimes

PAPER_SETTING = "paper-8b"
WORKLOADS = ("rl_zero", "rl_think")
_REFERENCE = CONFIGS / "reference" / "paper.yaml"
_MORE = CONFIGS / "reference" / "paper_simulator.yaml"
_MEAN_LOG_SD = 0.7  # no publication says how long the responses were
_CELL_LOG_SD = 0.04  # one run each, speedups printed with two decimals
_OFFLINE = "EAGLE-3, DAPO, offline"  # is the k = 3 cell itself


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectedReference:
    """A point of the authors' closed simulator; `k` None is the best point of their map."""

    num_gpus: int
    lag: int
    k: int | None
    acceptance_length: float | None
    rollout_speedup: float
    step_speedup: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatorReference:
    """Figures beside those of configs/reference/paper.yaml. `asynchronous` is measured and never fitted."""

    ngram_generation_s: dict[str, float]
    asynchronous: dict[str, float]
    projected: tuple[ProjectedReference, ...]


def read_simulator_reference() -> SimulatorReference:
    """The paper's n-gram and asynchronous times, and its projections."""
    return from_mapping(SimulatorReference, read_mapping(_MORE, "reference"), "paper_simulator")


def paper_cells() -> tuple[Cell, ...]:
    """The 16 measured generation times: 2 workloads x {AR, k = 3, 5, 7, n-gram, 3 other drafts}.

    AR, k = 3 and n-gram were published in seconds; the others are the AR seconds over the published speedup.
    """
    workloads, ngram_s = _workloads(), read_simulator_reference().ngram_generation_s
    return tuple(cell for name in WORKLOADS for cell in _of_workload(_group(name), workloads[name], ngram_s[name]))


def paper_steps() -> dict[tuple[str, Arm], StageTimes]:
    """The four measured steps."""
    workloads = _workloads()
    return {(name, arm): StageTimes(**workloads[name][arm.value]) for name in WORKLOADS for arm in Arm}


@cache
def calibrate_paper() -> Ensemble:
    """Fit to all of the paper's cells."""
    return calibrate_cells(paper_cells())


def calibrate_cells(cells: Sequence[Cell]) -> Ensemble:
    """Fit to some of the paper's cells, one calibration a structural variant, the most probable first."""
    return calibrate(load_setting(PAPER_SETTING), cells)


def mean_paper_step() -> StageTimes:
    """Mean of each stage over the four measured steps."""
    return stagewise(lambda seconds: sum(seconds) / len(seconds), list(paper_steps().values()))


def paper_learner() -> Learner:
    """The paper's learner."""
    setting = load_setting(PAPER_SETTING)
    mean = max(setting.mean_response_tokens.values())
    return Learner(measured=mean_paper_step(), setting=setting, mean_tokens=mean)


@cache
def _workloads() -> dict[str, Any]:
    return read_mapping(_REFERENCE, "reference")["workloads"]


def _group(workload: str) -> Group:
    """A workload, with an unknown mean response length."""
    setting = load_setting(PAPER_SETTING)
    mean, spread = setting.mean_response_tokens[workload], setting.length_log_sd
    return Group(name=workload, shape=setting.shape(), mean_tokens=mean, mean_log_sd=_MEAN_LOG_SD, length_log_sd=spread)


def _of_workload(group: Group, values: Mapping[str, Any], ngram_s: float) -> Iterator[Cell]:
    base_s = values["autoregressive"]["generation_s"]

    def cell(label: str, k: int, length: float, seconds: float, drafting: Drafting = Drafting.EAGLE3) -> Cell:
        return Cell(
            label=f"{group.name}, {label}",
            group=group,
            k=k,
            drafting=drafting,
            acceptance_length=length,
            generation_s=seconds,
            log_sd=_CELL_LOG_SD,
        )

    yield cell("autoregressive", 0, 1.0, base_s)
    for entry in values["draft_lengths"]:
        k = entry["k"]
        published = values["speculative"]["generation_s"] if k == values["num_speculative_tokens"] else None
        yield cell(f"k = {k}", k, entry["mean_acceptance_length"], published or base_s / entry["generation_speedup"])
    for entry in values["drafts"]:
        length, k = entry["mean_acceptance_length"], values["num_speculative_tokens"]
        if entry["draft"] == "n-gram":
            yield cell("n-gram", k, length, ngram_s, Drafting.NGRAM)
        elif entry["draft"] != _OFFLINE:
            yield cell(entry["draft"].removeprefix("EAGLE-3, "), k, length, base_s / entry["generation_speedup"])
