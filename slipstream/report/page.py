"""One self-contained HTML page a run: no script, no font and no style from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from slipstream.records.files import write_atomic
from slipstream.records.run import DriftRecord, RunRecord
from slipstream.records.steps import NUM_WARMUP_STEPS
from slipstream.report import figures, formats, projection_tables, simulator_figures, tables
from slipstream.report.asynchronous_arms import compare_loops
from slipstream.report.asynchronous_figures import loop_learning, step_lanes
from slipstream.report.asynchronous_prediction import predicted, prediction_table, split_table, split_text
from slipstream.report.asynchronous_results import bound_text, loops_as_json
from slipstream.report.asynchronous_tables import lag_table, loop_learning_table, loop_table
from slipstream.report.draft_length import autopilot_text, running_table, schedule_text
from slipstream.report.draft_training import decisions, draft_training
from slipstream.report.drift_table import drift_table
from slipstream.report.headline import verdict
from slipstream.report.reference import Reference, read_reference
from slipstream.report.summary import RunSummary, summarise, summarise_run
from slipstream.simulator.projection_record import ProjectionRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportPaths:
    """What `write_report` wrote."""

    html: Path
    json: Path
    figures: tuple[Path, ...]


def draw(record: RunRecord, reference: Reference, projection: ProjectionRecord | None = None) -> dict[str, str]:
    """The page's figures, as SVG by name."""
    return _figures(record, summarise_run(record), reference) | _projection_figures(projection)


def render(
    record: RunRecord,
    reference: Reference,
    projection: ProjectionRecord | None = None,
    *,
    drift: DriftRecord | None = None,
    drawn: Mapping[str, str] | None = None,
) -> str:
    """The page. A run with one arm, one step or no draft in it gets a page that says so.

    Args:
        drift: None for a run that was not compared with others.
        drawn: what `draw` gave, if the caller has it.
    """
    run = summarise_run(record)
    workload = reference.workloads.get(record.workload)
    drawn = draw(record, reference, projection) if drawn is None else drawn
    compared = compare_loops(record)
    prediction = None if compared is None else predicted(record, compared)
    here = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(here), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(count=formats.count, seconds=formats.seconds, percent=formats.percent)
    return environment.get_template("page.html.jinja").render(
        record=record,
        run=run,
        training=draft_training(record),
        reference=reference,
        workload=workload,
        verdict=verdict(record, run),
        headline=_headline(record, run),
        figures={name: Markup(svg) for name, svg in drawn.items()},
        tables=_tables(record, run, reference) | _projection_tables(projection),
        compared=compared,
        bound_text="" if compared is None else bound_text(compared),
        split_text="" if prediction is None else split_text(prediction),
        drift=drift,
        drift_table=drift_table(drift) if drift is not None and drift.findings else None,
        projection=projection,
        workload_label=formats.WORKLOAD_LABELS.get(record.workload, record.workload),
        num_warmup_steps=NUM_WARMUP_STEPS,
        schedule_text=schedule_text(record),
        autopilot_text=autopilot_text(record),
        style=Markup((here / "style.css").read_text()),
    )


def write_report(
    record: RunRecord,
    directory: Path,
    *,
    reference: Reference | None = None,
    projection: ProjectionRecord | None = None,
    drift: DriftRecord | None = None,
) -> ReportPaths:
    """Write `report.html`, `report.json` and `figures/*.svg` into `directory`, each atomically."""
    reference = reference or read_reference()
    drawn = draw(record, reference, projection)
    files = {directory / "figures" / f"{name}.svg": svg for name, svg in drawn.items() if svg}
    paths = ReportPaths(
        html=directory / "report.html",
        json=directory / "report.json",
        figures=tuple(files),
    )
    for path, svg in files.items():
        write_atomic(path, svg.encode())
    write_atomic(paths.html, render(record, reference, projection, drift=drift, drawn=drawn).encode())
    compared = compare_loops(record)
    summary = summarise(record)
    if compared is not None:
        summary["asynchronous"] = loops_as_json(compared, predicted(record, compared))
    summary |= {} if drift is None else {"drift": asdict(drift)}
    write_atomic(paths.json, json.dumps(summary, indent=1, allow_nan=False).encode())
    return paths


def _headline(record: RunRecord, run: RunSummary) -> list[tuple[str, str, str]]:
    """(value, what it is, what qualifies it) of the figures at the top of the page."""
    items: list[tuple[str, str, str]] = []
    if run.comparison is not None:
        for name, estimate in (("generation", run.comparison.generation), ("GRPO step", run.comparison.step)):
            items.append((formats.speedup(estimate.value), f"{name} speedup", formats.interval(estimate, "95 %: ")))
    items += _asynchronous_headline(record)
    if run.acceptance is not None and run.speculative is not None:
        length = f"{run.acceptance.mean_acceptance_length:.2f}"
        items.append((length, "tokens a verification", f"mean acceptance length, at most {run.speculative.k + 1}"))
    for arm in run.arms:
        change = f"mean of the last quarter of steps; first {arm.reward_first_quarter:.2f}"
        items.append((f"{arm.reward_last_quarter:.2f}", f"reward, {arm.arm.value}", change))
    return items


def _asynchronous_headline(record: RunRecord) -> list[tuple[str, str, str]]:
    """What the asynchronous loop adds, without speculation and with it."""
    compared = compare_loops(record)
    return [
        (
            formats.speedup(arm.over_baseline.value),
            f"GRPO step speedup, asynchronous {arm.arm.value}",
            formats.interval(arm.over_baseline, "95 %: "),
        )
        for arm in (() if compared is None else compared.asynchronous)
        if arm.over_baseline is not None
    ]


def _figures(record: RunRecord, run: RunSummary, reference: Reference) -> dict[str, str]:
    drawn = {"losses": figures.losses(record), "uniforms": figures.uniforms(record.certificate)}
    if run.arms:
        drawn |= {
            "stages": figures.stage_bars(run, reference.workloads.get(record.workload), reference),
            "step_times": figures.step_times(record),
            "acceptance": figures.acceptance(record, run),
            "learning": figures.learning(record),
            "mismatch": figures.mismatch(record),
        }
    if run.comparison is not None and run.acceptance is not None:
        drawn["bound"] = figures.bound(run)
    if record.tuning.points:
        drawn["sweep"] = figures.sweep(record.tuning.points, record.tuning.chosen_k)
    if draft_training(record) is not None:
        drawn["draft_training"] = decisions(record)
    compared = compare_loops(record)
    if compared is not None:
        drawn |= {"loops": step_lanes(compared), "loop_learning": loop_learning(record, compared)}
    return drawn


def _tables(record: RunRecord, run: RunSummary, reference: Reference) -> dict[str, Any]:
    workload = reference.workloads.get(record.workload)
    built = {
        "step": tables.step_table(run, workload, reference),
        "sweep": tables.sweep_table(record),
        "accuracy": tables.accuracy_table(record),
        "counts": tables.count_table(run),
        "data": tables.data_table(record),
        "draft": tables.draft_table(record),
        "certificate": tables.certificate_table(record.certificate),
    }
    compared = compare_loops(record)
    if compared is not None:
        built |= {
            "loops": loop_table(compared),
            "lags": lag_table(compared),
            "loop_learning": loop_learning_table(compared, record.evaluations),
        }
        prediction = predicted(record, compared)
        if prediction is not None:
            built["prediction"] = prediction_table(prediction, compared)
        splits = split_table(record, compared)
        if splits is not None:
            built["splits"] = splits
    if record.tuning.running:
        built["running"] = running_table(record)
    if run.comparison is not None:
        built["speedup"] = tables.speedup_table(run, workload, reference)
    if workload is not None:
        built["quoted_lengths"] = tables.quoted_lengths_table(workload, reference)
        built["quoted_drafts"] = tables.quoted_drafts_table(workload, reference)
    return built


def _projection_tables(projection: ProjectionRecord | None) -> dict[str, Any]:
    if projection is None:
        return {}
    return {
        "projection_check": projection_tables.check_table(projection),
        "projection_own": projection_tables.own_table(projection),
        "projection_published": projection_tables.published_table(projection),
    }


def _projection_figures(projection: ProjectionRecord | None) -> dict[str, str]:
    if projection is None:
        return {}
    drawn = projection.figures
    calibrations = [c for c in (projection.run_calibration, projection.paper_calibration) if c is not None]
    return {
        "projection_fits": simulator_figures.measured_against_simulated(calibrations),
        "projection_running": simulator_figures.running_batch(drawn.running) if drawn.running else "",
        "projection_map": simulator_figures.speedup_map(drawn.speedup_map),
        "projection_gpus": simulator_figures.speedup_over_gpus(drawn.lag_lines),
        "projection_steps": simulator_figures.stage_waterfall(drawn.autoregressive, drawn.speculative),
    }
