"""Command `slipstream gpu-check`: each stage in a process of its own with a time limit, and one archive of it all.

A stage may fail, hang or crash, and the next one still runs. Each stage gives a line of `lines.jsonl`:

    stage, name     which one
    outcome         passed, failed or skipped
    reason          why it failed or was skipped; empty after `passed`
    seconds         wall time of its process
    figures         what it measured, by name with the unit in the name
    not_exercised   with --dry: what of the stage a CPU cannot show
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
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from slipstream import logs
from slipstream.config import require
from slipstream.gpu_check import check_stages, learner_stages
from slipstream.gpu_check.check_stages import Setting, Skipped
from slipstream.gpu_check.throughput import throughput
from slipstream.records.files import write_atomic
from slipstream.run_command import ENVIRONMENT
from slipstream.supervisor import raise_on_signals, supervise
from slipstream.workers.placement.plan import table

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
_PATIENCE = 3  # times the limit without a GPU, on cores that others may use
_SHOWN = 4  # figures of a stage in the table


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage; `not_exercised` is what of it a CPU cannot show."""

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
    outcome: str
    reason: str = ""
    seconds: float = 0.0
    figures: Mapping[str, Any] = field(default_factory=dict)
    not_exercised: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """Command of a stage's process, which writes its result into `FOUND` of its directory."""

    stage: Stage
    command: Sequence[str]
    limit_s: float
    is_dry: bool = False


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `gpu-check`."""
    words = "check this machine's GPUs in stages, and pack all that a failed one needs into one archive"
    check = commands.add_parser("gpu-check", help=words)
    check.add_argument(
        "--dry", action="store_true", help="run the same stages on the CPU, shrunk: the check's own test"
    )
    numbers = [stage.number for stage in STAGES]
    check.add_argument(
        "--stage", type=int, nargs="+", choices=numbers, default=numbers, metavar="N", help="stages; default: all"
    )
    words = "directory of archives; default: runs/gpu-check"
    check.add_argument("--output", default="runs/gpu-check", metavar="DIR", help=words)
    check.set_defaults(run=_check)


def _check(options: argparse.Namespace) -> int:
    output = Path(options.output).resolve() / time.strftime("%Y%m%d-%H%M%S")
    require(not output.exists(), "--output", "must not hold a check of this second", str(output), "start it again")
    output.mkdir(parents=True)
    raise_on_signals()  # the archive is written after a SIGTERM too
    processes = [_process(stage, is_dry=options.dry) for stage in STAGES if stage.number in options.stage]
    lines = run_stages(processes, output, lanes=_LANES if options.dry else 1, on_line=_say)
    print(f"\n{_table(lines)}\n\narchive: {output.with_suffix('.tar.gz')}")
    return 1 if any(line.outcome == "failed" for line in lines) else 0


def _process(stage: Stage, *, is_dry: bool) -> Process:
    command = [sys.executable, "-m", "slipstream.gpu_check.check_command", str(stage.number), *(["--dry"] * is_dry)]
    limit_s = stage.limit_s * (_PATIENCE if is_dry else 1)
    return Process(stage=stage, command=command, limit_s=limit_s, is_dry=is_dry)


def run_stages(
    processes: Sequence[Process], output: Path, *, lanes: int = 1, on_line: Callable[[Line], None] = lambda line: None
) -> list[Line]:
    """Run the stages, and write `output`.tar.gz even if this is interrupted; returns a line a stage, in order.

    After a failure of stage 0 on a GPU the others are skipped, as each of them would fail for that reason.

    Args:
        lanes: stages that run at once.
    """
    lines: list[Line] = []
    _describe(output)
    try:
        with closing(_lines(processes, output, lanes)) as found:
            for line in found:
                lines.append(line)
                with (output / LINES).open("a") as file:
                    file.write(f"{json.dumps(asdict(line))}\n")
                on_line(line)
    finally:
        _pack(output)
    return lines


def _lines(processes: Sequence[Process], output: Path, lanes: int) -> Generator[Line, None, None]:
    alive: set[subprocess.Popen[bytes]] = set()
    gates = [process for process in processes if process.stage.number == 0 and not process.is_dry]
    rest = [process for process in processes if process not in gates]
    try:
        for process in gates:
            yield (line := _run(process, output, alive))
            if line.outcome == "failed":
                for other in rest:
                    reason = f"stage 0 failed: {line.reason}"
                    yield Line(stage=other.stage.number, name=other.stage.name, outcome="skipped", reason=reason)
                return
        with ThreadPoolExecutor(lanes) as lane:
            try:
                yield from lane.map(lambda process: _run(process, output, alive), rest)
            except BaseException:
                lane.shutdown(wait=False, cancel_futures=True)
                _end(alive)
                raise
    finally:
        _end(alive)


def _run(process: Process, output: Path, alive: set[subprocess.Popen[bytes]]) -> Line:
    """Run one stage to its end or its time limit, and judge it by what it wrote and how it ended."""
    stage = process.stage
    directory = output / f"{stage.number:02d}_{stage.name}"
    directory.mkdir()
    # Removed even if the stage is killed. Ray's sockets must have short paths.
    scratch = Path(tempfile.mkdtemp(prefix="gpu-check-", dir="/tmp"))
    environment = {**os.environ, **_ENVIRONMENT, **(_ON_CPU if process.is_dry else {}), "RAY_TMPDIR": str(scratch)}
    start_s = time.monotonic()
    with (directory / "log.txt").open("wb") as log:
        child = subprocess.Popen(
            [*process.command, str(directory), "--limit-s", str(process.limit_s)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        alive.add(child)
        is_late = False
        try:
            child.wait(process.limit_s)
        except subprocess.TimeoutExpired:
            is_late = True
        _end({child})
        alive.discard(child)
    seconds = round(time.monotonic() - start_s, 1)
    _keep_logs(scratch, directory / "ray")
    line = Line(
        stage=stage.number,
        name=stage.name,
        outcome="failed",
        seconds=seconds,
        not_exercised=stage.not_exercised if process.is_dry else (),
    )
    found = directory / FOUND
    said = json.loads(found.read_text()) if found.is_file() else {"reason": _ended(child.returncode)}
    if is_late:
        why = f"did not end within its {process.limit_s:g} s: log.txt ends with every stack"
        said |= {"outcome": "failed", "reason": why}
    return replace(line, **said)


def _end(alive: set[subprocess.Popen[bytes]]) -> None:
    """End the processes; each ends its own descendants when it is asked to."""
    for child in alive:
        child.terminate()
    for child in alive:
        try:
            child.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _ended(status: int) -> str:
    number = -status if status < 0 else status - 128
    with suppress(ValueError):
        return f"ended by {signal.Signals(number).name} without a result: see log.txt"
    return f"ended with status {status} without a result: see log.txt"


def _keep_logs(scratch: Path, directory: Path) -> None:
    """Copy the logs of Ray's processes, engines and learners among them, and remove all else."""
    logs = [path for path in scratch.glob("**/session_*/logs/*") if path.is_file() and path.stat().st_size]
    if logs:
        directory.mkdir()
    for path in logs:
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


def main() -> int:
    """Run one stage in this process, or supervise the process that does; no descendant is left."""
    parser = argparse.ArgumentParser(prog="slipstream.gpu_check.check_command")
    parser.add_argument("stage", type=int)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--limit-s", type=float, required=True)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--here", action="store_true", help="do not supervise")
    options = parser.parse_args()
    if not options.here:
        command = [sys.executable, "-m", "slipstream.gpu_check.check_command", *sys.argv[1:], "--here"]
        status = supervise(command, cwd=Path.cwd(), environment=os.environ).status
        return 128 - status if status < 0 else status
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    faulthandler.dump_traceback_later(0.95 * options.limit_s)
    logs.configure()
    raise_on_signals()  # figures so far are written
    (stage,) = [stage for stage in STAGES if stage.number == options.stage]
    with tempfile.TemporaryDirectory(prefix="work-", dir=os.environ.get("RAY_TMPDIR")) as work:
        run_stage(stage.work, Setting(directory=options.directory, work=Path(work), is_dry=options.dry))
    return 0


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


if __name__ == "__main__":
    sys.exit(main())
