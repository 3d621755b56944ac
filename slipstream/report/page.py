"""Report page of a run: one HTML file without scripts, fonts or styles from elsewhere.

Projected figures have columns and figures of their own; the scatter plot alone shows both, on separate axes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from markupsafe import Markup

from slipstream.catalog import target_of
from slipstream.learner.config import SCRATCH
from slipstream.records.files import write_atomic
from slipstream.records.run import DriftRecord, RunRecord
from slipstream.report import figures, sentences, tables
from slipstream.report.formats import WORKLOAD_LABELS, render
from slipstream.report.results import Result, results
from slipstream.report.summary import compare_loops, decided_steps, estimate_json, summarise, summarise_arms
from slipstream.simulator.balance import AsynchronousPrediction, balance, predict_asynchronous
from slipstream.simulator.projection import ProjectionRecord
from slipstream.simulator.reference import WorkloadReference, read_reference
from slipstream.types import LoopMode


def draw(record: RunRecord, projection: ProjectionRecord | None = None) -> dict[str, str]:
    """Draw the figures that the run has data for; returns SVG by name."""
    run, compared = summarise_arms(record.arms), compare_loops(record)
    drawn: dict[str, str] = {}
    if record.certificate is not None:
        drawn["uniforms"] = figures.uniforms(record.certificate)
    if run.arms:
        drawn |= {
            "stages": figures.stage_bars(run, quoted(record)),
            "step_times": figures.step_times(record),
            "acceptance": figures.acceptance(record, run),
            "learning": figures.learning(record),
            "mismatch": figures.mismatch(record),
        }
    if record.tuning is not None and record.tuning.points:
        drawn["sweep"] = figures.sweep(record.tuning.points, record.tuning.chosen_k)
    if decided_steps(record):
        drawn["draft_training"] = figures.draft_training(record)
    if compared.arms:
        drawn |= {"loops": figures.step_lanes(compared), "loop_learning": figures.loop_learning(record)}
    if projection is not None and projection.run_calibration is not None and not run.alone:
        drawn["projection_fits"] = figures.measured_against_simulated(projection.run_calibration)
    return drawn


def quoted(record: RunRecord) -> WorkloadReference | None:
    """Published values of the run's workload, which stand beside both arms; None for one arm alone."""
    return None if summarise_arms(record.arms).alone is not None else read_reference().workloads.get(record.workload)


def render_page(
    record: RunRecord,
    projection: ProjectionRecord | None = None,
    *,
    drift: DriftRecord | None = None,
    drawn: Mapping[str, str] | None = None,
) -> str:
    """Render the page; sections whose data are missing (an arm, a draft) say so.

    Args:
        drawn: result of `draw`, where the caller already has it.
    """
    run, compared = summarise_arms(record.arms), compare_loops(record)
    drawn = draw(record, projection) if drawn is None else drawn
    return render(
        "page.html.jinja",
        record=record,
        run=run,
        reference=read_reference(),
        workload=quoted(record),
        headline=_headline(record),
        figures={name: Markup(svg) for name, svg in drawn.items()},
        tables=tables,
        sentences=sentences,
        compared=compared,
        prediction=predicted(record),
        splits=split_table(record) if compared.arms and not run.alone else None,
        drift=drift,
        projection=None if run.alone else projection,
        workload_label=WORKLOAD_LABELS.get(record.workload, record.workload),
    )


def predicted(record: RunRecord) -> AsynchronousPrediction | None:
    """Predict the asynchronous arms; None for a run without a lag, or on hardware other than CPU cores."""
    arms = compare_loops(record).asynchronous
    if not arms or arms[0].max_off_policy_steps < 1 or not _is_on_cores(record):
        return None
    return predict_asynchronous(
        [arm for arm in record.arms if any(arm.arm is each.arm for each in arms)],
        lag=arms[0].max_off_policy_steps,
        mode=LoopMode(arms[0].loop),
    )


def split_table(record: RunRecord) -> tables.Table | None:
    """Tabulate each arm's projected step on every split of the run's GPUs; None without a lag, or on CPU cores.

    Two cores have one split, which `split_text` describes instead.
    """
    first, layout = compare_loops(record).asynchronous[0], record.layout
    if first.max_off_policy_steps < 1 or layout is None or _is_on_cores(record):
        return None
    if layout.num_gpus <= layout.gpus_per_engine:  # no GPU is left for training
        return None
    return tables.split_table(balance(record, lag=first.max_off_policy_steps, mode=LoopMode(first.loop)))


def _is_on_cores(record: RunRecord) -> bool:
    return record.layout is not None and target_of(record.layout.hardware) == "cpu"


def _headline(record: RunRecord) -> list[Result]:
    """Results of the page's header: first what a given policy learned, or the speedups of one made to be timed."""
    shown = [
        each
        for each in results(record)
        if each.label.lstrip() == each.label != ""
        and (each.unit in ("x", "tokens", "reward") or each.name.startswith("reward_gain"))
    ]
    return shown if record.policy.model == SCRATCH else sorted(shown, key=lambda each: each.unit != "reward")


def write_report(
    record: RunRecord, directory: Path, *, projection: ProjectionRecord | None = None, drift: DriftRecord | None = None
) -> None:
    """Write `report.html`, `report.json` and `figures/*.svg` into `directory`, each atomically."""
    drawn = draw(record, projection)
    files = {directory / "figures" / f"{name}.svg": svg for name, svg in drawn.items() if svg}
    for stale in set((directory / "figures").glob("*.svg")) - files.keys():  # of an earlier attempt
        stale.unlink()
    for path, svg in files.items():
        write_atomic(path, svg.encode())
    page = render_page(record, projection, drift=drift, drawn=drawn)
    write_atomic(directory / "report.html", page.encode())
    write_atomic(directory / "report.json", json.dumps(report_json(record, drift), indent=1, allow_nan=False).encode())


def report_json(record: RunRecord, drift: DriftRecord | None = None) -> dict[str, Any]:
    """Return the content of `report.json`."""
    summary, compared = summarise(record), compare_loops(record)
    summary["num_warmup_steps"] = sentences.num_warmup_steps(record)
    summary["machine"] = sentences.machine_json(record)
    if compared.arms:
        prediction = predicted(record)  # projected figures stand apart from measured ones
        summary["asynchronous"] = {
            "predicted": None if prediction is None else asdict(prediction),
            "bound": sentences.bound_text(compared),
            "speculation_step_speedup": estimate_json(compared.speculation),
            "verdict": None if compared.claim is None else compared.claim.as_json(),
            "control": None,  # training overlaps generation
            "paired": compared.paired,
            "arms": {arm.name: arm.as_json() for arm in compared.arms},
        }
    return summary if drift is None else {**summary, "drift": asdict(drift)}
