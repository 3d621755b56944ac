"""The commands `slipstream simulate project`, `calibrate` and `audit`, and what they print.

Beside `slipstream.cli` the only file that prints. Measured and projected figures never share a column.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from slipstream.config import ConfigError, require
from slipstream.kernel_tables import audit_gemms
from slipstream.projection import (
    CalibrationRecord,
    CheckRecord,
    ProjectedBand,
    ProjectedPoint,
    ProjectionRequest,
    RequestedProjection,
    calibration_record,
    project_request,
    project_speedup,
)
from slipstream.records import RunRecord, read_record
from slipstream.sim import paper
from slipstream.sim.hardware import known_hardware
from slipstream.sim.models import known_models

_RUN_FILE = "run.json"
_PUBLISHED_MODEL, _PUBLISHED_HARDWARE = "qwen3-235b-a22b", "gb200"
_BANDS = (
    ("rollout speedup", "rollout_speedup"),
    ("step speedup", "step_speedup"),
    ("autoregressive step, s", "autoregressive_step_s"),
    ("speculative step, s", "speculative_step_s"),
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `simulate` with its commands."""
    simulate = commands.add_parser("simulate", help="project speculation to other models, GPUs, k and lags")
    inner = simulate.add_subparsers(required=True, metavar="command")
    projected = inner.add_parser("project", help="project from the paper's measurements, with bands")
    projected.add_argument("--model", choices=known_models(), required=True)
    projected.add_argument("--hardware", choices=known_hardware(), default="gb200")
    projected.add_argument("--gpus", type=int, required=True)
    projected.add_argument("--k", type=int, required=True, help="draft tokens an iteration")
    projected.add_argument("--acceptance-length", type=float, required=True, help="the bonus token counted")
    projected.add_argument("--lag", type=int, default=0, help="policy lag in steps; 0 is synchronous and colocated")
    projected.add_argument("--generation-fraction", type=float, default=0.75, help="of the GPUs, with a lag")
    projected.add_argument("--gpus-per-engine", type=int, default=0, help="0: the layout's, or what holds the weights")
    projected.add_argument("--rollouts", type=int, default=0, help="responses a step; 0 keeps the layout's")
    projected.add_argument("--mean-tokens", type=float, default=0.0, help="of a response; 0 keeps the layout's")
    projected.add_argument(
        "--kernel-tables", action="store_true", help="multiplications as NVIDIA measured them (extra kernel-tables)"
    )
    projected.set_defaults(run=_project)
    audited = inner.add_parser("audit", help="check NVIDIA's kernel tables of a system: larger must not be faster")
    audited.add_argument("--hardware", choices=known_hardware(), required=True)
    audited.set_defaults(run=_audit)
    calibrated = inner.add_parser("calibrate", help="fit the model to a run and check it on the speculative arm")
    source = calibrated.add_mutually_exclusive_group(required=True)
    source.add_argument("--run", dest="run_path", help=f"directory of a report, or its {_RUN_FILE}")
    source.add_argument("--mlflow-run", help="execution whose report logged its records, as its parent run is called")
    source.add_argument("--paper", action="store_true", help="the 16 generation times of arXiv 2604.26779")
    calibrated.add_argument("--uri", default="sqlite:///runs/mlflow.db", help="tracking server of --mlflow-run")
    calibrated.set_defaults(run=_calibrate)


def projection_lines(request: ProjectionRequest, found: RequestedProjection) -> list[str]:
    """The table of `simulate project`: a column a source, all of them projected."""
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
        f"k = {request.k}, acceptance length {request.acceptance_length:g}, {split}",
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
    """The tables of a calibration: its variants, then measured beside simulated, in columns of their own."""
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
    """Predicted beside measured for the arm that the calibration never saw."""
    if check is None:
        return ["no speculative arm with k > 0: nothing to check the calibration on"]
    return [
        f"speculative arm, k = {check.k}, acceptance length {check.acceptance_length:.2f} of the sweep; not fitted",
        f"{'generation time':44} {'measured s':>11} {'predicted s':>12} {'error':>8}",
        _beside("mean of a step", check.measured_s, check.predicted_s),
        f"predicted p10 to p90: {check.predicted_p10_s:.3f} to {check.predicted_p90_s:.3f} s",
    ]


def point_lines(points: Sequence[ProjectedPoint]) -> list[str]:
    """Projections on the run's own machine."""
    heading = f"{'projected on this machine':30} {'AL assumed':>11} {'rollout speedup':>22} {'step speedup':>22}"
    rows = [
        f"{f'k = {p.k}':30} {p.acceptance_length:11.2f} {_band(p.rollout_speedup):>22} {_band(p.step_speedup):>22}"
        for p in points
    ]
    return [heading, *rows]


def _project(options: argparse.Namespace) -> int:
    request = ProjectionRequest(
        model=options.model,
        hardware=options.hardware,
        num_gpus=options.gpus,
        k=options.k,
        acceptance_length=options.acceptance_length,
        lag=options.lag,
        generation_fraction=options.generation_fraction,
        gpus_per_engine=options.gpus_per_engine,
        num_rollouts=options.rollouts,
        mean_tokens=options.mean_tokens,
    )
    _show(projection_lines(request, project_request(request, kernel_tables=options.kernel_tables)))
    return 0


def _audit(options: argparse.Namespace) -> int:
    audits = audit_gemms(options.hardware)
    _show([str(audit) for audit in audits])
    return 0 if all(audit.accepted for audit in audits) else 1


def _calibrate(options: argparse.Namespace) -> int:
    if options.paper:
        _show(calibration_lines(calibration_record("arXiv 2604.26779, measured", paper.calibrate_paper())))
        return 0
    run = _read_run(options)
    require(
        run.layout is not None,
        "--run",
        "must be of a recipe that names its simulator.model and simulator.hardware",
        run.recipe,
    )
    found = project_speedup(run.arms, run.tuning, layout=run.layout, execution=run.execution)
    assert found.run_calibration is not None
    _show([*calibration_lines(found.run_calibration), "", *check_lines(found.run_check), ""])
    _show(point_lines(found.from_run))
    return 0


def _read_run(options: argparse.Namespace) -> RunRecord:
    if options.run_path is not None:
        path = Path(options.run_path)
        path = path / _RUN_FILE if path.is_dir() else path
        require(path.is_file(), "--run", f"must be a report's directory or its {_RUN_FILE}", str(options.run_path))
        return read_record(RunRecord, path)
    from slipstream.tracking import TrackingError, fetch_artifact

    with tempfile.TemporaryDirectory() as directory:
        key = f"{options.mlflow_run}/report_speedup"
        try:
            path = fetch_artifact(options.uri, key=key, name=_RUN_FILE, directory=Path(directory))
        except TrackingError as error:
            raise ConfigError(f"--mlflow-run: {error}") from error
        return read_record(RunRecord, path)


def _published(request: ProjectionRequest) -> dict[str, float]:
    """The paper's own projection of the same point, if it has one."""
    if (request.model, request.hardware) != (_PUBLISHED_MODEL, _PUBLISHED_HARDWARE):
        return {}
    for point in paper.read_simulator_reference().projected:
        same = (point.num_gpus, point.lag, point.k) == (request.num_gpus, request.lag, request.k)
        if same and point.acceptance_length == request.acceptance_length:
            return {"rollout_speedup": point.rollout_speedup, "step_speedup": point.step_speedup}
    return {}


def _beside(label: str, measured_s: float, simulated_s: float) -> str:
    return f"{label:44} {measured_s:11.3f} {simulated_s:12.3f} {simulated_s / measured_s - 1:+8.1%}"


def _band(band: ProjectedBand) -> str:
    return f"{band.p10:.2f} / {band.median:.2f} / {band.p90:.2f}"


def _show(lines: Sequence[str]) -> None:
    for line in lines:
        print(line.rstrip())
