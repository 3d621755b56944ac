"""Commands `slipstream simulate project`, `calibrate` and `balance`, and their output.

Measured and projected figures never share a column.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from statistics import fmean

from slipstream.catalog import section_names
from slipstream.config import ConfigError
from slipstream.records.files import read_record
from slipstream.records.run import RunRecord
from slipstream.records.steps import ArmRecord
from slipstream.report.tables import check_table, lengths_table, split_table, table_text
from slipstream.simulator.balance import balance
from slipstream.simulator.calibration import CalibrationRecord
from slipstream.simulator.iteration import Drafting
from slipstream.simulator.observed import (
    calibrate_paper,
    calibrate_run,
    known_layout,
    read_simulator_reference,
    run_setting,
)
from slipstream.simulator.projection import PUBLISHED_MODEL, ProjectionRequest, project_request, project_run
from slipstream.statistics import Spread
from slipstream.tracking.mlflow_store import TrackingError, open_store
from slipstream.types import LoopMode
from slipstream.workers.placement.plan import table

_RUN_FILE = "run.json"
_REPORT = "report_speedup"  # directory of the report inside a run's directory
_BANDS = (
    ("rollout speedup", "rollout_speedup"),
    ("step speedup", "step_speedup"),
    ("autoregressive step, s", "autoregressive_step_s"),
    ("speculative step, s", "speculative_step_s"),
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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
    source = _add_run_options(calibrated)
    source.add_argument("--paper", action="store_true", help="the 16 generation times of arXiv 2604.26779")
    calibrated.set_defaults(run=_calibrate)
    balanced = inner.add_parser("balance", help="predict each split of a run's machine into generation and training")
    _add_run_options(balanced)
    balanced.add_argument("--lag", type=int, help="policy lag in steps; default: that of the run's loop, else 1")
    loops = [mode.value for mode in LoopMode if mode is not LoopMode.SYNCHRONOUS]
    balanced.add_argument("--mode", choices=loops, help="loop mode; default: that of the run's loop, else in_flight")
    balanced.add_argument("--gpus-per-node", type=int, default=1, help="list only splits in whole nodes of this size")
    balanced.set_defaults(run=_balance)


def _add_run_options(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    """Add the options that name the run."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--run", dest="run_path", help=f"directory of a run, directory of its report, or {_RUN_FILE}")
    source.add_argument("--mlflow-run", help="name of an execution in MLflow whose report logged its records")
    parser.add_argument("--uri", default="sqlite:///runs/mlflow.db", help="tracking server of --mlflow-run")
    return source


def _project(options: argparse.Namespace) -> int:
    """Print the bands of a request, a column a source; all figures are projected."""
    request = ProjectionRequest(**{field.name: vars(options)[field.name] for field in fields(ProjectionRequest)})
    found, scenario, published = project_request(request), request.scenario(), _published(request)
    setting, generating = scenario.setting, f"lag {scenario.lag}, {scenario.generation_gpus} GPUs generate"
    split = generating if scenario.lag else "synchronous, colocated"
    engines = f"{setting.gpus_per_engine} GPUs an engine"
    padding = f"pads each response to {setting.max_response_tokens} tokens"
    rows = [
        ["projected, p10 / median / p90", "ideal stack", "calibrated", *(["paper, projected"] if published else [])]
    ]
    for label, name in _BANDS:
        spreads: list[Spread] = [getattr(each, name) for each in (found.ideal, found.calibrated)]
        bands = [f"{each.p10:.2f} / {each.median:.2f} / {each.p90:.2f}" for each in spreads]
        quoted = [f"{published[name]:.2f}" if name in published else ""] if published else []
        rows.append([label, *bands, *quoted])
    print(f"{found.calibrated.model}, {setting.num_gpus} x {found.calibrated.hardware}, {setting.precision}")
    print(f"{setting.num_rollouts} rollouts of {scenario.mean_tokens:.0f} tokens on average, {engines}")
    print(f"{request.drafting}, k = {request.k}, acceptance length {request.acceptance_length:g}, {split}")
    print(f"the learner {'packs its sequences' if setting.packed else padding}\n\n{table(rows)}\n")
    for warning in found.calibrated.warnings:
        print(f"warning: {warning}")
    for assumption in found.assumptions:
        print(f"of the layout: {assumption}")
    return 0


def _calibrate(options: argparse.Namespace) -> int:
    """Print a calibration; of a run also its check on the arm that is not fitted, and projections on its machine."""
    if options.paper:
        print(calibration_text(calibrate_paper().record("arXiv 2604.26779, measured")))
        return 0
    run = _asked_run(options)
    found = calibrate_run(run.arms, run.tuning, run_setting(known_layout(run)))
    print(f"{calibration_text(found.ensemble.record(run.execution))}\n")
    if found.check is None:
        print("no speculative arm with one k > 0: nothing to check the calibration on\n")
    else:
        length = f"acceptance length {found.check.acceptance_length:.2f} of the sweep"
        print(f"speculative arm, k = {found.check.k}, {length}; not fitted\n{table_text(check_table(found.check))}\n")
    print(table_text(lengths_table(project_run(found), "projected on this machine")))
    return 0


def calibration_text(record: CalibrationRecord) -> str:
    """Render the tables of a calibration: variants, then measured beside simulated, in separate columns."""
    variants = [["variant", "weight", "free parameters", "set by data", "rms error", "largest"]]
    for each in record.variants:
        numbers = f"{each.weight:.3f}", str(each.num_parameters), f"{each.effective_parameters:.1f}"
        variants.append([each.regime, *numbers, f"{each.rms_error:.1%}", f"{each.max_error:.1%}"])
    cells = [["generation time", "measured s", "simulated s", "error"]]
    for cell in record.cells:
        error = f"{cell.simulated_s / cell.measured_s - 1:+.1%}"
        cells.append([cell.label, f"{cell.measured_s:.3f}", f"{cell.simulated_s:.3f}", error])
    return f"calibrated on: {record.source}\n{table(variants)}\n\n{table(cells)}"


def _balance(options: argparse.Namespace) -> int:
    """Print a line a split with each arm's projected step and bound, the best split marked."""
    run = _asked_run(options)
    own = run.asynchronous[0] if run.asynchronous else None
    mode = options.mode or (LoopMode.IN_FLIGHT.value if own is None else own.loop)
    lag = (1 if own is None else own.max_off_policy_steps) if options.lag is None else options.lag
    found = balance(run, lag=lag, mode=LoopMode(mode), gpus_per_node=options.gpus_per_node)
    print(f"synchronous step, measured: {_by_arm(run.arms)}")
    print(f"asynchronous step, measured: {_by_arm(run.asynchronous) or 'none'}")
    print(f"projected, {mode}, lag {lag}\n\n{table_text(split_table(found))}")
    return 0


def _asked_run(options: argparse.Namespace) -> RunRecord:
    if options.run_path is None:
        return _fetched_run(options.mlflow_run, options.uri)
    path = Path(options.run_path)
    for place in (path, path / _RUN_FILE, path / _REPORT / _RUN_FILE):
        if place.is_file():
            return read_record(RunRecord, place)
    rule = f"must be a run's directory, its report's, or the report's {_RUN_FILE}"
    raise ConfigError(f"--run {rule}, got {str(path)!r}; give one whose report is written")


def _fetched_run(execution: str, uri: str) -> RunRecord:
    """Read the record that `execution` logged on the tracking server at `uri`."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            path = open_store(uri).fetch_artifact(f"{execution}/{_REPORT}", _RUN_FILE, Path(directory))
        except TrackingError as error:
            raise ConfigError(f"--mlflow-run: {error}") from error
        return read_record(RunRecord, path)


def _published(request: ProjectionRequest) -> dict[str, float]:
    """Look up the paper's projection of the same point; empty if there is none."""
    if (request.model, request.hardware, request.drafting) != (PUBLISHED_MODEL, "gb200", Drafting.EAGLE3):
        return {}
    for point in read_simulator_reference().projected:
        same = (point.num_gpus, point.lag, point.k) == (request.num_gpus, request.lag, request.k)
        if same and point.acceptance_length == request.acceptance_length:
            return {"rollout_speedup": point.rollout_speedup, "step_speedup": point.step_speedup}
    return {}


def _by_arm(arms: Sequence[ArmRecord]) -> str:
    """Format the mean step of each arm."""
    step_s = {arm.arm.value: fmean(step.times.step_s for step in arm.timed_steps) for arm in arms}
    return ", ".join(f"{name} {seconds:.3f} s" for name, seconds in step_s.items())
