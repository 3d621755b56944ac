"""The published measurements (arXiv 2604.26779) as cells of a calibration, and what it projected by other means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from slipstream.config import from_mapping
from slipstream.sim.calibration import calibrate
from slipstream.sim.cells import Cell, Group
from slipstream.sim.ensemble import Ensemble
from slipstream.sim.hardware import CONFIGS
from slipstream.sim.iteration import Drafting
from slipstream.sim.parameters import Regime, load_priors
from slipstream.sim.settings import Setting, load_setting
from slipstream.sim.step import Step

WORKLOADS = ("rl_zero", "rl_think")
_REFERENCE = CONFIGS / "reference" / "paper.yaml"
_MORE = CONFIGS / "reference" / "paper_simulator.yaml"
_MEAN_LOG_SD = 0.7  # no publication says how long the responses were
_CELL_LOG_SD = 0.04  # one run each, speedups printed with two decimals
_OFFLINE = "EAGLE-3, DAPO, offline"  # is the k = 3 cell itself


@dataclass(frozen=True, kw_only=True, slots=True)
class AsynchronousReference:
    """Measured with generation and training on GPUs of their own: RL-Think, k = 3. Seconds."""

    lag: int
    generation_gpus: int
    training_gpus: int
    autoregressive_exposed_s: float
    autoregressive_step_s: float
    speculative_exposed_s: float
    speculative_step_s: float


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
    """Figures beside those of configs/reference/paper.yaml."""

    arxiv_id: str
    num_gpus: int
    ngram_generation_s: dict[str, float]
    asynchronous: AsynchronousReference
    projected: tuple[ProjectedReference, ...]


def read_simulator_reference() -> SimulatorReference:
    """The paper's n-gram and asynchronous times, and its projections."""
    return from_mapping(SimulatorReference, yaml.safe_load(_MORE.read_text()), "paper_simulator")


def paper_cells() -> tuple[Cell, ...]:
    """The 16 measured generation times: 2 workloads x {AR, k = 3, 5, 7, n-gram, 3 other drafts}.

    AR, k = 3 and n-gram were published in seconds; the others are the AR seconds over the published speedup.
    """
    workloads = yaml.safe_load(_REFERENCE.read_text())["workloads"]
    more = read_simulator_reference()
    return tuple(cell for name in WORKLOADS for cell in _of_workload(name, workloads[name], more))


def paper_steps() -> dict[tuple[str, bool], Step]:
    """The four measured steps by (workload, speculative)."""
    workloads = yaml.safe_load(_REFERENCE.read_text())["workloads"]
    arms = ((False, "autoregressive"), (True, "speculative"))
    return {
        (name, speculative): Step(**{key: value for key, value in workloads[name][arm].items() if key != "step_s"})
        for name in WORKLOADS
        for speculative, arm in arms
    }


def paper_step_totals() -> dict[tuple[str, bool], float]:
    """The four measured step totals in seconds, by (workload, speculative)."""
    workloads = yaml.safe_load(_REFERENCE.read_text())["workloads"]
    return {
        (name, speculative): workloads[name][arm]["step_s"]
        for name in WORKLOADS
        for speculative, arm in ((False, "autoregressive"), (True, "speculative"))
    }


def paper_lengths(workload: str) -> dict[int, float]:
    """Measured acceptance length by k."""
    lengths = yaml.safe_load(_REFERENCE.read_text())["workloads"][workload]["draft_lengths"]
    return {entry["k"]: entry["mean_acceptance_length"] for entry in lengths}


def paper_groups(setting: Setting | None = None) -> tuple[Group, ...]:
    """The two workloads, with unknown mean response lengths."""
    layout = load_setting("paper-8b") if setting is None else setting
    return tuple(
        Group(
            name=name,
            shape=layout.shape(),
            mean_tokens=layout.mean_response_tokens[name],
            mean_log_sd=_MEAN_LOG_SD,
            length_log_sd=layout.length_log_sd,
            max_tokens=float(layout.max_response_tokens),
        )
        for name in WORKLOADS
    )


def calibrate_paper(
    cells: Sequence[Cell] | None = None,
    *,
    setting: Setting | None = None,
    regimes: Sequence[Regime] = tuple(Regime),
) -> Ensemble:
    """Fit to the paper's cells (default: all 16), one calibration a structural variant, the most probable first."""
    layout = load_setting("paper-8b") if setting is None else setting
    members = calibrate(
        layout.engine(),
        paper_cells() if cells is None else cells,
        paper_groups(layout),
        load_priors("gpu"),
        regimes,
    )
    return Ensemble(members=members)


def mean_other_stages(steps: Sequence[Step]) -> Step:
    """Mean of each stage but generation over measured steps."""
    count = len(steps)
    return Step(
        data_s=sum(step.data_s for step in steps) / count,
        prepare_s=sum(step.prepare_s for step in steps) / count,
        generation_s=0.0,
        logprob_s=sum(step.logprob_s for step in steps) / count,
        train_s=sum(step.train_s for step in steps) / count,
    )


def _of_workload(name: str, values: Mapping[str, Any], more: SimulatorReference) -> Iterator[Cell]:
    base_s = values["autoregressive"]["generation_s"]

    def cell(label: str, k: int, length: float, seconds: float, drafting: Drafting = Drafting.EAGLE3) -> Cell:
        return Cell(
            label=f"{name}, {label}",
            group=name,
            k=k,
            drafting=drafting,
            acceptance_length=length,
            generation_s=seconds,
            log_sd=_CELL_LOG_SD,
        )

    yield cell("autoregressive", 0, 1.0, base_s, Drafting.NONE)
    for entry in values["draft_lengths"]:
        k = entry["k"]
        published = values["speculative"]["generation_s"] if k == values["num_speculative_tokens"] else None
        yield cell(f"k = {k}", k, entry["mean_acceptance_length"], published or base_s / entry["generation_speedup"])
    for entry in values["drafts"]:
        length, k = entry["mean_acceptance_length"], values["num_speculative_tokens"]
        if entry["draft"] == "n-gram":
            yield cell("n-gram", k, length, more.ngram_generation_s[name], Drafting.NGRAM)
        elif entry["draft"] != _OFFLINE:
            yield cell(entry["draft"].removeprefix("EAGLE-3, "), k, length, base_s / entry["generation_speedup"])
