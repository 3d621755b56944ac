"""Command `slipstream gpu-check`: each stage in a process of its own with a time limit, and one archive of it all.

A stage may fail, hang or crash, and the next one still runs.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import distributions
from multiprocessing import forkserver, get_context
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from slipstream import logs
from slipstream.config import require
from slipstream.gpu_check import check_stages, learner_stages
from slipstream.gpu_check.check_stages import Setting, Skipped
from slipstream.gpu_check.throughput import throughput
from slipstream.records.files import write_atomic
from slipstream.run_command import ENVIRONMENT
from slipstream.supervisor import raise_on_signals, supervise_call
from slipstream.workers.forked_workers import forked_workers
from slipstream.workers.placement.plan import table

Context = ForkServerContext | SpawnContext
LINES, FOUND = "lines.jsonl", "found.json"
_ENVIRONMENT = {
    **ENVIRONMENT,
    "HF_HUB_OFFLINE": "1",  # nothing is fetched: policies are random, prompts are made here
    "NCCL_DEBUG": "WARN",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # a process that asks for GPUs may fork others that use them
    "TORCH_SHOW_CPP_STACKTRACES": "1",
    "VLLM_LOGGING_LEVEL": "INFO",  # attention backend, runner, captured graphs, tokens of the cache
}
_ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
_GRACE_S = 10.0  # for the processes of a stage to end after its time limit
_LARGEST_FILE = 4 << 20  # of the archive: logs and records, no weights
_LANES = 2  # stages at once without a GPU, where most of each is a start on one core
_IMPORTED = (  # by the stages' processes
    "slipstream.gpu_check.check_command",
    "slipstream.drafts.eagle3",
    "slipstream.learner.megatron",
    "slipstream.workers.engines",
    "slipstream.workers.learners",
    "transformers.models.qwen3.modeling_qwen3",
)
_PATIENCE = 3  # times the limit without a GPU, on cores that others may use
_SHOWN = 4  # figures of a stage in the table


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of the check."""

    number: int
    work: Callable[[Setting], None]
    limit_s: float
    not_exercised: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of the stage, that of its function."""
        return self.work.__name__


STAGES = (
    Stage(
        0,
        check_stages.environment,
        90,
        ("driver, CUDA and free GPU memory", "requirements/gpu.lock: cpu.lock is compared"),
    ),
    Stage(1, check_stages.kernels, 180, ("torch's FlashAttention for packed rows", "AdamW on a GPU", "pinned memory")),
    Stage(
        2,
        check_stages.engine,
        300,
        ("vLLM's second model runner", "FlashAttention or FlashInfer", "bfloat16 beside float32"),
    ),
    Stage(
        3,
        check_stages.speculation,
        480,
        ("captured graphs of policy and draft", "the second runner's sampler", "k that changes under graphs"),
    ),
    Stage(4, check_stages.refit, 420, ("CUDA IPC, with the draft in its bucket", "weights that change under graphs")),
    Stage(
        5,
        learner_stages.learner,
        300,
        ("bfloat16 with float32 master weights", "the packing kernel", "a checkpoint through pinned memory"),
    ),
    Stage(6, learner_stages.draft, 240, ("a draft's update on a GPU beside the same one on the CPU",)),
    Stage(7, check_stages.in_turn, 300, ("an engine that sleeps", "memory that goes back to the driver")),
    Stage(
        8,
        check_stages.chain,
        1800,
        (
            "configs/tiny_gpu.yaml at its size",
            "the arm without drafts",
            "the choice of a draft length, which is told",
            "graphs, bfloat16, IPC and one GPU for all processes",
        ),
    ),
    Stage(9, throughput, 900, ("the shapes of Qwen3-8B", "memory beside its estimate")),
    Stage(10, check_stages.several, 480, ("NCCL", "an engine of two ranks", "placement on GPUs")),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """Outcome of one stage, as `lines.jsonl` holds it."""

    stage: int
    name: str
    outcome: str  # passed, failed or skipped
    reason: str = ""  # of `failed` and `skipped`
    seconds: float = 0.0  # wall time of its process
    figures: Mapping[str, Any] = field(default_factory=dict)  # by name with the unit in the name
    not_exercised: Sequence[str] = ()  # with --dry: what of the stage a CPU cannot show


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `gpu-check`."""
    words = "check this machine's GPUs in stages, and pack all that a failed one needs into one archive"
    check = commands.add_parser("gpu-check", help=words)
    words = "run the same stages on the CPU, shrunk: the check's own test"
    check.add_argument("--dry", action="store_true", help=words)
    numbers, words = [stage.number for stage in STAGES], "stages; default: all"
    check.add_argument("--stage", type=int, nargs="+", choices=numbers, default=numbers, metavar="N", help=words)
    words = "directory of archives; default: runs/gpu-check"
    check.add_argument("--output", default="runs/gpu-check", metavar="DIR", help=words)
    check.set_defaults(run=_check)


def _check(options: argparse.Namespace) -> int:
    output = Path(options.output).resolve() / time.strftime("%Y%m%d-%H%M%S")
    require(not output.exists(), "--output", "must not hold a check of this second", str(output), "start it again")
    output.mkdir(parents=True)
    raise_on_signals()  # the archive is written after a SIGTERM too
    os.environ.update({**_ENVIRONMENT, **(_ON_CPU if options.dry else {})})
    stages = [stage for stage in STAGES if stage.number in options.stage]
    processes = _sharing(output / "ray") if options.dry else nullcontext(get_context("spawn"))
    lines = run_stages(stages, output, processes, is_dry=options.dry, on_line=_say)
    print(f"\n{_table(lines)}\n\narchive: {output.with_suffix('.tar.gz')}")
    return 1 if any(line.outcome == "failed" for line in lines) else 0


@contextmanager
def _sharing(logs_directory: Path) -> Iterator[Context]:
    """Start one Ray for all stages, and servers that import once what they import and fork their processes."""
    context = get_context("forkserver")
    context.set_forkserver_preload(list(_IMPORTED))
    forkserver.ensure_running()  # it imports while Ray starts
    from slipstream.workers.session import disconnect, share

    scratch = _scratch()
    os.environ["RAY_TMPDIR"] = str(scratch)
    with forked_workers():
        try:
            with suppress(TimeoutError, RuntimeError):  # without it each stage starts its own, or says why it cannot
                share()
            raise_on_signals()  # Ray has installed handlers of its own
            yield context
        finally:
            disconnect()
            _keep_logs(scratch, logs_directory)


def run_stages(
    stages: Sequence[Stage],
    output: Path,
    processes: AbstractContextManager[Context],
    *,
    is_dry: bool = False,
    on_line: Callable[[Line], None] = lambda line: None,
) -> list[Line]:
    """Run the stages, and write `output`.tar.gz even if this is interrupted; returns a line a stage, in order.

    After a failure of stage 0 on a GPU the others are skipped, as each of them would fail for that reason.
    """
    lines: list[Line] = []
    _describe(output)
    try:
        with processes as context, closing(_lines(stages, output, context, is_dry)) as found:
            for line in found:
                lines.append(line)
                with (output / LINES).open("a") as file:
                    file.write(f"{json.dumps(asdict(line))}\n")
                on_line(line)
    finally:
        _pack(output)
    return lines


def _lines(stages: Sequence[Stage], output: Path, context: Context, is_dry: bool) -> Generator[Line, None, None]:
    alive: set[BaseProcess] = set()
    run = partial(_run, output=output, context=context, is_dry=is_dry, alive=alive)
    gates = [stage for stage in stages if stage.number == 0 and not is_dry]
    rest = [stage for stage in stages if stage not in gates]
    with ThreadPoolExecutor(_LANES if is_dry else 1) as lane:
        try:
            for stage in gates:
                yield (line := run(stage))
                if line.outcome == "failed":
                    for other in rest:
                        reason = f"stage 0 failed: {line.reason}"
                        yield Line(stage=other.number, name=other.name, outcome="skipped", reason=reason)
                    return
            # No lane is left with the longest stage at the end; the others are in order, and so are their lines.
            longest_s = max((stage.limit_s for stage in rest), default=0.0)
            order = sorted(rest, key=lambda stage: is_dry and stage.limit_s < longest_s)
            started = {stage.number: lane.submit(run, stage) for stage in order}
            yield from (started[stage.number].result() for stage in rest)
        except BaseException:
            lane.shutdown(wait=False, cancel_futures=True)
            _end(alive)
            raise


def _run(stage: Stage, *, output: Path, context: Context, is_dry: bool, alive: set[BaseProcess]) -> Line:
    """Run one stage to its end or its time limit, and judge it by what it wrote and how it ended."""
    directory, scratch = output / f"{stage.number:02d}_{stage.name}", _scratch()
    directory.mkdir()
    limit_s = stage.limit_s * (_PATIENCE if is_dry else 1)
    at = Setting(directory=directory, work=scratch, is_dry=is_dry)
    environment = dict(os.environ) if is_dry else {"RAY_TMPDIR": str(scratch)}
    start_s = time.monotonic()
    child = context.Process(target=_supervised, args=(stage, at, limit_s, environment))
    child.start()
    alive.add(child)
    child.join(limit_s)
    is_late = child.exitcode is None
    _end({child})
    alive.discard(child)
    seconds = round(time.monotonic() - start_s, 1)
    _keep_logs(scratch, directory / "ray")
    said: dict[str, Any] = {"outcome": "failed", "reason": _ended(child.exitcode or 0)}
    if (found := directory / FOUND).is_file():
        said = json.loads(found.read_text())
    if is_late:
        said |= {"outcome": "failed", "reason": f"did not end within its {limit_s:g} s: log.txt ends with every stack"}
    not_exercised = stage.not_exercised if is_dry else ()
    return Line(stage=stage.number, name=stage.name, seconds=seconds, not_exercised=not_exercised, **said)


def _scratch() -> Path:
    """Make a directory that is removed even if the stage is killed; Ray's sockets must have short paths."""
    return Path(tempfile.mkdtemp(prefix="gpu-check-", dir="/tmp"))


def _end(alive: Iterable[BaseProcess]) -> None:
    """End the processes; each ends its own descendants when it is asked to."""
    ending = [*alive]  # a lane's thread may remove its own meanwhile
    for child in ending:
        child.terminate()
    for child in ending:
        child.join(_GRACE_S)
        if child.exitcode is None:
            child.kill()
            child.join()


def _ended(status: int) -> str:
    number = -status if status < 0 else status - 128
    with suppress(ValueError):
        return f"ended by {signal.Signals(number).name} without a result: see log.txt"
    return f"ended with status {status} without a result: see log.txt"


def _keep_logs(scratch: Path, directory: Path) -> None:
    """Copy the logs of Ray's processes, engines and learners among them, and remove all else."""
    for path in scratch.glob("**/session_*/logs/*"):
        if path.is_file() and path.stat().st_size:
            directory.mkdir(exist_ok=True)
            shutil.copyfile(path, directory / path.name)
    shutil.rmtree(scratch, ignore_errors=True)


def _describe(output: Path) -> None:
    """Write versions of all installed packages, the machine, and the variables that programs here read."""
    versions = sorted(f"{each.metadata['Name']}=={each.version}" for each in distributions())
    (output / "packages.txt").write_text("\n".join(versions) + "\n")
    prefixes = ("CUDA", "HF_", "LD_", "NCCL", "NVIDIA", "OMP", "PYTHON", "PYTORCH", "RAY", "TORCH", "VLLM")
    told = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(prefixes)]
    machine = [f"Python {sys.version}", platform.platform(), *_told_by("nvidia-smi"), *_told_by("lscpu")]
    (output / "machine.txt").write_text("\n".join([*machine, "", *told]) + "\n")


def _told_by(*command: str) -> list[str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"{command[0]}: {error}"]
    return [done.stdout + done.stderr]


def _pack(output: Path) -> None:
    """Pack all files but weights, which are removed."""
    with tarfile.open(output.with_suffix(".tar.gz"), "w:gz") as archive:
        for path in sorted(output.rglob("*")):
            if path.is_symlink() or not path.is_file():
                continue
            if path.stat().st_size <= _LARGEST_FILE:
                archive.add(path, arcname=path.relative_to(output.parent))
            else:
                path.unlink()


def _say(line: Line) -> None:
    print(json.dumps(asdict(line)), flush=True)


def _table(lines: Sequence[Line]) -> str:
    rows = [["stage", "", "outcome", "s", "figures, or why"]]
    for line in lines:
        figures = [f"{name} {value:.4g}" for name, value in line.figures.items() if isinstance(value, int | float)]
        # The last line of an error from another process is the error; those before are the way that it took.
        said = line.reason.strip().splitlines()[-1] if line.reason else ", ".join(figures[:_SHOWN])
        rows.append([str(line.stage), line.name, line.outcome, f"{line.seconds:.0f}", said])
    return table(rows)


def _supervised(stage: Stage, at: Setting, limit_s: float, environment: Mapping[str, str]) -> None:
    """Run one stage in a fork of this process, whose output is the stage's log; no descendant is left."""
    with (at.directory / "log.txt").open("wb") as log:
        for number in (1, 2):
            os.dup2(log.fileno(), number)
    os.environ.update(environment)
    status = supervise_call(partial(_work, stage, at, limit_s)).status
    sys.exit(128 - status if status < 0 else status)


def _work(stage: Stage, at: Setting, limit_s: float) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    faulthandler.dump_traceback_later(0.95 * limit_s)
    logs.configure()
    run_stage(stage.work, at)


def run_stage(work: Callable[[Setting], None], at: Setting) -> None:
    """Run a stage and write its outcome, reason and figures, those so far if it is interrupted."""
    outcome, reason = "failed", "was interrupted"
    try:
        work(at)
        outcome, reason = "passed", ""
    except Skipped as error:
        outcome, reason = "skipped", str(error)
    except Exception as error:  # noqa: BLE001  # whatever a stage raises is its result
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}"
    finally:
        found = {"outcome": outcome, "reason": reason, "figures": at.figures}
        write_atomic(at.directory / FOUND, json.dumps(found).encode())
