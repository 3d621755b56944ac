"""Commands `slipstream simulate project`, `calibrate` and `balance`, and their output.

Only this module and `slipstream.cli` print. Measured and projected figures never share a column.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

from slipstream.catalog import section_names
from slipstream.config import require
from slipstream.records.files import read_record
from slipstream.records.run import RunRecord
from slipstream.simulator.balance import BalanceRecord, BalanceRow, balance
from slipstream.simulator.calibration import CalibrationRecord
from slipstream.simulator.iteration import Drafting
from slipstream.simulator.observed import (
    CheckRecord,
    calibrate_paper,
    calibrate_run,
    known_layout,
    read_simulator_reference,
    run_setting,
)
from slipstream.simulator.projection import (
    PAPER_SOURCE,
    PUBLISHED_MODEL,
    ProjectedPoint,
    ProjectionRequest,
    RequestedProjection,
    project_request,
    project_run,
    swept_ks,
)
from slipstream.statistics import Spread
from slipstream.types import Arm, LoopMode

FetchRun = Callable[[str, str], RunRecord]
"""Function that reads an execution's records, from its name and the tracking server's address."""

_RUN_FILE = "run.json"
_REPORT = "report_speedup"  # directory of the report inside a run's directory
_BANDS = (
    ("rollout speedup", "rollout_speedup"),
    ("step speedup", "step_speedup"),
    ("autoregressive step, s", "autoregressive_step_s"),
    ("speculative step, s", "speculative_step_s"),
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], *, fetch_run: FetchRun) -> None:
    """Add `simulate` and its subcommands."""
    simulate = commands.add_parser("simulate", help="project speculation to other models, GPUs, k and lags")
    inner = simulate.add_subparsers(required=True, metavar="command")
    projected = inner.add_parser("project", help="project from the paper's measurements, with bands")
    projected.add_argument("--model", choices=section_names("models"), required=True)
    projected.add_argument("--hardware", choices=section_names("hardware"), default="gb200")
    projected.add_argument("--gpus", dest="num_gpus", metavar="GPUS", type=int, required=True)
    projected.add_argument("--k", type=int, required=True, help="draft tokens an iteration")
    words = "proposer: k passes of eagle3, one of dflash, or a scan of the context"
    projected.add_argument("--drafting", type=Drafting, choices=[*Drafting], default=Drafting.EAGLE3, help=words)
    projected.add_argument("--acceptance-length", type=float, required=True, help="bonus token included")
    projected.add_argument("--lag", type=int, default=0, help="policy lag in steps; 0 is synchronous and colocated")
    projected.add_argument("--generation-fraction", type=float, default=0.75, help="fraction of GPUs; used with a lag")
    projected.add_argument("--gpus-per-engine", type=int, default=0, help="0: the layout's, or as many as weights need")
    rollouts = "responses a step; 0 keeps the layout's"
    projected.add_argument("--rollouts", dest="num_rollouts", metavar="ROLLOUTS", type=int, default=0, help=rollouts)
    projected.add_argument("--mean-tokens", type=float, default=0.0, help="tokens of a response; 0 keeps the layout's")
    projected.set_defaults(run=_project)
    calibrated = inner.add_parser("calibrate", help="fit the model to a run and check it on the speculative arm")
    source = _add_run_options(calibrated, fetch_run)
    source.add_argument("--paper", action="store_true", help="the 16 generation times of arXiv 2604.26779")
    calibrated.set_defaults(run=_calibrate)
    balanced = inner.add_parser("balance", help="predict each split of a run's machine into generation and training")
    _add_run_options(balanced, fetch_run)
    balanced.add_argument("--lag", type=int, help="policy lag in steps; default: that of the run's loop, else 1")
    loops = [mode.value for mode in LoopMode if mode is not LoopMode.SYNCHRONOUS]
    balanced.add_argument("--mode", choices=loops, help="loop mode; default: that of the run's loop, else in_flight")
    balanced.add_argument("--gpus-per-node", type=int, default=1, help="list only splits in whole nodes of this size")
    balanced.set_defaults(run=_balance)


def _add_run_options(parser: argparse.ArgumentParser, fetch_run: FetchRun) -> argparse._MutuallyExclusiveGroup:
    """Add the options that name the run."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--run", dest="run_path", help=f"directory of a run, directory of its report, or {_RUN_FILE}")
    source.add_argument("--mlflow-run", help="name of an execution in MLflow whose report logged its records")
    parser.add_argument("--uri", default="sqlite:///runs/mlflow.db", help="tracking server of --mlflow-run")
    parser.set_defaults(fetch_run=fetch_run)
    return source


def projection_lines(request: ProjectionRequest, found: RequestedProjection) -> list[str]:
    """Format the table of `simulate project`, a column a source; all figures are projected."""
    scenario = request.scenario()
    setting = scenario.setting
    split = (
        f"lag {scenario.lag}, {scenario.generation_gpus} GPUs generate" if scenario.lag else "synchronous, colocated"
    )
    published = _published(request)
    lines = [
        f"{found.calibrated.model}, {setting.num_gpus} x {found.calibrated.hardware}, {setting.precision}",
        f"{setting.num_rollouts} rollouts of {scenario.mean_tokens:.0f} tokens on average, "
        f"{setting.gpus_per_engine} GPUs an engine",
        f"{request.drafting}, k = {request.k}, acceptance length {request.acceptance_length:g}, {split}",
        "the learner packs its sequences"
        if setting.packed
        else f"the learner pads each response to {setting.max_response_tokens} tokens",
        "",
        f"{'projected, p10 / median / p90':30} {'ideal stack':>22} {'calibrated':>22}"
        + (f" {'paper, projected':>18}" if published else ""),
    ]
    for label, name in _BANDS:
        bands = [_band(getattr(each, name)) for each in (found.ideal, found.calibrated)]
        quoted = f" {published[name]:18.2f}" if name in published else ""
        lines.append(f"{label:30} {bands[0]:>22} {bands[1]:>22}{quoted}")
    lines += ["", *(f"warning: {warning}" for warning in found.calibrated.warnings)]
    return [*lines, *(f"of the layout: {assumption}" for assumption in found.assumptions)]


def calibration_lines(record: CalibrationRecord) -> list[str]:
    """Format the tables of a calibration: variants, then measured beside simulated, in separate columns."""
    lines = [
        f"calibrated on: {record.source}",
        f"{'variant':10} {'weight':>7} {'free parameters':>16} {'set by data':>12} {'rms error':>10} {'largest':>9}",
    ]
    lines += [
        f"{v.regime:10} {v.weight:7.3f} {v.num_parameters:16d} {v.effective_parameters:12.1f} "
        f"{v.rms_error:10.1%} {v.max_error:9.1%}"
        for v in record.variants
    ]
    lines += ["", f"{'generation time':44} {'measured s':>11} {'simulated s':>12} {'error':>8}"]
    return [*lines, *(_beside(cell.label, cell.measured_s, cell.simulated_s) for cell in record.cells)]


def check_lines(check: CheckRecord | None) -> list[str]:
    """Format predicted beside measured seconds of the arm that the calibration does not use."""
    if check is None:
        return ["no speculative arm with k > 0: nothing to check the calibration on"]
    return [
        f"speculative arm, k = {check.k}, acceptance length {check.acceptance_length:.2f} of the sweep; not fitted",
        f"{'generation time':44} {'measured s':>11} {'predicted s':>12} {'error':>8}",
        _beside("mean of a step", check.measured_s, check.predicted_s),
        f"predicted p10 to p90: {check.predicted_p10_s:.3f} to {check.predicted_p90_s:.3f} s",
    ]


def point_lines(points: Sequence[ProjectedPoint]) -> list[str]:
    """Format the projections on the run's machine."""
    heading = f"{'projected on this machine':30} {'AL assumed':>11} {'rollout speedup':>22} {'step speedup':>22}"
    rows = [
        f"{f'k = {p.k}':30} {p.acceptance_length:11.2f} {_band(p.rollout_speedup):>22} {_band(p.step_speedup):>22}"
        for p in points
    ]
    return [heading, *rows]


def balance_lines(record: BalanceRecord) -> list[str]:
    """Format the table of `simulate balance`: a line a split with each arm's step and bound, the best split marked."""
    arms = [arm for arm in Arm if any(row.arm is arm for row in record.rows)]
    by_split: dict[tuple[int, int], dict[Arm, BalanceRow]] = {}
    for row in record.rows:
        by_split.setdefault((row.generation, row.training), {})[row.arm] = row
    lines = [
        f"synchronous step, measured: {_by_arm(record.synchronous_step_s)}",
        f"asynchronous step, measured: {_by_arm(record.asynchronous_step_s) or 'none'}",
        f"projected, {record.mode.value}, lag {record.lag}; {record.unit}s for generation : training, * the best",
        "",
        f"{'split':>13}" + "".join(f" {arm.value + ' step s':>21}   {'exposed s':>9} {'bound by':<18}" for arm in arms),
    ]
    best = {arm: record.best(arm) for arm in arms}
    for (generation, training), rows in by_split.items():
        cells = "".join(
            f" {rows[arm].step_s:21.3f} {'*' if rows[arm] == best[arm] else ' '} {rows[arm].exposed_s:9.3f} "
            f"{rows[arm].bound:<18}"
            for arm in arms
        )
        lines.append(f"{f'{generation} : {training}':>13}{cells}")
    return lines


def _project(options: argparse.Namespace) -> int:
    request = ProjectionRequest(**{field.name: vars(options)[field.name] for field in fields(ProjectionRequest)})
    _show(projection_lines(request, project_request(request)))
    return 0


def _calibrate(options: argparse.Namespace) -> int:
    if options.paper:
        _show(calibration_lines(calibrate_paper().record(PAPER_SOURCE)))
        return 0
    run = _asked_run(options)
    found = calibrate_run(run.arms, run.tuning, run_setting(known_layout(run)))
    _show([*calibration_lines(found.ensemble.record(run.execution)), "", *check_lines(found.check), ""])
    _show(point_lines(project_run(found, swept_ks(run.tuning))))
    return 0


def _balance(options: argparse.Namespace) -> int:
    run = _asked_run(options)
    own = run.asynchronous[0] if run.asynchronous else None
    mode = options.mode or (LoopMode.IN_FLIGHT.value if own is None else own.loop)
    lag = (1 if own is None else own.max_off_policy_steps) if options.lag is None else options.lag
    _show(balance_lines(balance(run, lag=lag, mode=LoopMode(mode), gpus_per_node=options.gpus_per_node)))
    return 0


def _asked_run(options: argparse.Namespace) -> RunRecord:
    if options.run_path is None:
        return options.fetch_run(options.mlflow_run, options.uri)
    path = Path(options.run_path)
    places = (path, path / _RUN_FILE, path / _REPORT / _RUN_FILE)
    found = next((place for place in places if place.is_file()), None)
    rule = f"must be a run's directory, its report's, or the report's {_RUN_FILE}"
    require(found is not None, "--run", rule, str(path), "give one whose report is written")
    assert found is not None
    return read_record(RunRecord, found)


def _published(request: ProjectionRequest) -> dict[str, float]:
    """Look up the paper's projection of the same point; empty if there is none."""
    if (request.model, request.hardware, request.drafting) != (PUBLISHED_MODEL, "gb200", Drafting.EAGLE3):
        return {}
    for point in read_simulator_reference().projected:
        same = (point.num_gpus, point.lag, point.k) == (request.num_gpus, request.lag, request.k)
        if same and point.acceptance_length == request.acceptance_length:
            return {"rollout_speedup": point.rollout_speedup, "step_speedup": point.step_speedup}
    return {}


def _by_arm(step_s: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.3f} s" for name, seconds in step_s.items())


def _beside(label: str, measured_s: float, simulated_s: float) -> str:
    return f"{label:44} {measured_s:11.3f} {simulated_s:12.3f} {simulated_s / measured_s - 1:+8.1%}"


def _band(band: Spread) -> str:
    return f"{band.p10:.2f} / {band.median:.2f} / {band.p90:.2f}"


def _show(lines: Sequence[str]) -> None:
    for line in lines:
        print(line.rstrip())
