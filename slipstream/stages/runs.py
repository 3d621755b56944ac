"""MLflow runs of an execution and of its tasks: opened once, found again by a retry, ended with results."""

from __future__ import annotations

import fcntl
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slipstream import supervisor
from slipstream.config import require
from slipstream.drafts.length import DraftLength
from slipstream.kubernetes.profile import NODE_VARIABLE, ClusterProfile, active_profile
from slipstream.losslessness.verdict import LOSSLESS
from slipstream.recipe import Recipe, load_recipe
from slipstream.records.run import DriftRecord, RunRecord
from slipstream.records.stages import CertificateRecord
from slipstream.report.drift import drift_metrics, drift_tags, setting_tags
from slipstream.report.live import live_page as report_page
from slipstream.report.results import certificate_metrics, description, result_metrics, verdict_tags
from slipstream.stages.context import RunContext, recorded_recipe
from slipstream.tracking.config import EXECUTION, KIND_TAG, PART
from slipstream.tracking.mlflow_store import TrackingError, open_store
from slipstream.tracking.spool import GPUS_TAG, RunStatus, has_ended, now_ms, open_executions, spent
from slipstream.tracking.tracker import Tracker
from slipstream.types import Arm, Dtype

COMMIT_VARIABLE, IMAGE_VARIABLE = "SLIPSTREAM_GIT_COMMIT", "SLIPSTREAM_IMAGE"
"""Environment variables that are set when an image is built: it holds no repository, and does not know its name."""

_EXECUTION_VARIABLE = "FLYTE_INTERNAL_EXECUTION_ID"  # of every pod of Flyte
_ADDRESS_VARIABLES = ["FLYTE_INTERNAL_EXECUTION_PROJECT", "FLYTE_INTERNAL_EXECUTION_DOMAIN", _EXECUTION_VARIABLE]
_GIT_TIMEOUT_S = 5.0


def origin_tags(environment: Mapping[str, str] = os.environ, *, gpu: str = "") -> dict[str, str]:
    """Tags of commit, image, node, type of GPU and Flyte execution; unknown ones are left out."""
    commit = environment.get(COMMIT_VARIABLE) or checkout_commit(Path(__file__).parents[1])
    tags = {
        "git.commit": commit,
        "mlflow.source.git.commit": commit,  # MLflow shows this one as the run's version
        "image": environment.get(IMAGE_VARIABLE, ""),
        "node": environment.get(NODE_VARIABLE) or platform.node(),
        "gpu": gpu,
        "flyte.execution_url": execution_url(environment),
    }
    return {name: value for name, value in tags.items() if value}


def execution_url(environment: Mapping[str, str] = os.environ) -> str:
    """Address of this task's execution in Flyte's console; empty outside a cluster, or where no profile names one."""
    project, domain, name = (environment.get(variable, "") for variable in _ADDRESS_VARIABLES)
    console = active_profile(environment).flyte.console if project and name else None
    return f"{console.rstrip('/')}/projects/{project}/domains/{domain}/executions/{name}" if console else ""


def flyte_execution(environment: Mapping[str, str] = os.environ) -> str:
    """Name of this task's execution in Flyte; empty outside a cluster."""
    return environment.get(_EXECUTION_VARIABLE, "")


def live_page(context: RunContext, cluster: ClusterProfile, *, since_s: float) -> str:
    """Page of what a task's runs have logged since it began, with links to its execution in Flyte and in MLflow."""
    recipe = load_recipe(str(recorded_recipe(Path(context.root), context.execution)))
    links = {"the run in MLflow": _mlflow_url(context, recipe, cluster), "the execution in Flyte": execution_url()}
    return report_page(Path(context.root), context.execution, since_s=since_s, links=links)


def _mlflow_url(context: RunContext, recipe: Recipe, cluster: ClusterProfile) -> str:
    """Address of the execution's run on MLflow's server; empty where none is named, or it does not answer."""
    server = cluster.tracking and (cluster.tracking.console or cluster.tracking.uri)
    if not server or recipe.tracking.uri is None:
        return ""
    try:
        route = open_store(recipe.tracking.uri).run_route(experiment_name(recipe), context.execution)
    except TrackingError:
        return ""
    return f"{server.rstrip('/')}/{route}" if route else ""


def checkout_commit(directory: Path) -> str:
    """Commit that `directory` is checked out at, `-dirty` if files differ from it; empty outside a repository."""
    try:
        _git(directory, "ls-files", "--error-unmatch", "__init__.py")  # fails in another repository
        return _git(directory, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(directory: Path, *arguments: str) -> str:
    command = ["git", "-C", str(directory), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_GIT_TIMEOUT_S).stdout.strip()


@contextmanager
def tracked(
    context: RunContext,
    recipe: Recipe,
    node: str,
    tags: Mapping[str, str] | None = None,
    *,
    name: str | None = None,
    params: Mapping[str, str] | None = None,
    gpu: str = "",
) -> Iterator[Tracker]:
    """Open the MLflow run of a task, below the execution's; a retried task attaches to the run of its first attempt.

    On one machine an exception or an interrupt ends the execution's run too, and so it ends the run of an ablation's
    part. Under Flyte the failure handler ends the run of a whole execution, once no attempt follows: between two
    attempts the execution goes on, and no other may take its nodes.

    Args:
        name: name of the run; None: the node's.
        gpu: type of the accelerators that the task uses.
    """
    supervisor.raise_on_signals()
    if has_ended(Path(context.root), experiment_name(recipe), context.execution):
        execution_run(context, recipe).detach()
    try:
        own = {GPUS_TAG: str(num_gpus(recipe, node)), **dtype_tags(recipe), **origin_tags(gpu=gpu), **(tags or {})}
        key, parent = f"{context.execution}/{node}", context.execution  # equal at every attempt
        with _opened(context, recipe, key, parent, name=name or node, tags=own, params=params) as tracker:
            try:
                yield tracker
            except (KeyboardInterrupt, SystemExit):
                supervisor.ignore_signals()
                raise
    except BaseException as error:
        if context.part_of or not flyte_execution():
            execution_run(context, recipe).close(RunStatus.of_error(type(error)))
        raise


def dtype_tags(recipe: Recipe) -> dict[str, str]:
    """Tags of the numeric types; a task that computes nothing runs before `auto` is resolved, and has none."""
    dtypes = {"dtype.learner": recipe.learner.dtype, "dtype.engine": recipe.engine.dtype}
    return {name: dtype.value for name, dtype in dtypes.items() if dtype is not Dtype.AUTO}


def num_gpus(recipe: Recipe, node: str) -> int:
    """Number of GPUs that are reserved while the task `node` runs."""
    links_policy = node == "prepare_policy" and recipe.policy.scratch is None
    uses_none = links_policy or node in ("prepare_data", "report_speedup")
    return 0 if uses_none or not recipe.layout.has_gpus else recipe.layout.num_gpus


def experiment_name(recipe: Recipe) -> str:
    """MLflow experiment of a recipe's runs."""
    return recipe.tracking.experiment or recipe.name


def execution_run(
    context: RunContext, recipe: Recipe, tags: Mapping[str, str] | None = None, params: Mapping[str, str] | None = None
) -> Tracker:
    """Open the MLflow run of the execution, parent of its tasks' runs and below its ablation's, or attach to it."""
    own = {KIND_TAG: PART if context.part_of else EXECUTION, **(tags or {})}
    key, parent, name = context.execution, context.part_of or None, context.execution.rpartition("/")[2]
    return _opened(context, recipe, key, parent, name=name, tags=own, params=params)


def _opened(
    context: RunContext, recipe: Recipe, key: str, parent: str | None, *, tags: Mapping[str, str], **given: Any
) -> Tracker:
    return Tracker(
        recipe.tracking,
        root=Path(context.root),
        experiment=recipe.name,
        key=key,
        parent_key=parent,
        tags={"workload": recipe.workload.value, "seed": str(recipe.grpo.seed), **tags},
        **given,
    )


@contextmanager
def alone_on(cluster: ClusterProfile, root: Path, execution: str) -> Iterator[None]:
    """Let no second execution start on GPU nodes without a queue, where Ray jobs would hold nodes by halves for ever.

    The run of the execution is opened within, under a lock on the shared volume.
    """
    if cluster.gpu is None or cluster.queue is not None:
        yield
        return
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".nodes.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        others = [name for name in open_executions(root) if name != execution]
        rule = f"must be alone on cluster {cluster.name}, which has no queue"
        fix = "launch it when that one has ended; `slipstream reconcile` ends the runs of one that was terminated"
        require(not others, "execution", rule, ", ".join([execution, *others]), fix)
        yield


NOTE = "mlflow.note.content"
"""Tag that MLflow shows as a run's description, in Markdown."""


def started_text(recipe: Recipe, execution: str) -> str:
    """Description of a run without results."""
    url = execution_url()
    link = f" [The execution in Flyte]({url})." if url else ""
    return f"Recipe {recipe.name}, workload {recipe.workload.value}: execution {execution} goes on.{link}"


def end_execution(context: RunContext, recipe: Recipe, certificate: CertificateRecord) -> None:
    """End the run of an execution that consists of a certificate alone."""
    tracker = execution_run(context, recipe)
    tracker.log(certificate_metrics(certificate))
    tracker.set_tags({NOTE: f"The engine is {certificate.verdict}: {certificate.reason}"})
    tracker.close(_status(certificate))


def end_reported_execution(
    context: RunContext, recipe: Recipe, record: RunRecord, directory: Path, drift: DriftRecord
) -> None:
    """End the run of an execution with its results, its drift, and the report and figures in `directory`."""
    tracker = execution_run(context, recipe)
    hours, gpu_hours = spent(Path(context.root), context.execution, now_ms=now_ms())
    tracker.log({**result_metrics(record, hours=hours, gpu_hours=gpu_hours), **drift_metrics(drift)})
    arm = next((arm for arm in record.arms if arm.arm is Arm.SPECULATIVE), None)
    length = arm and DraftLength(num_speculative_tokens=arm.num_speculative_tokens, schedule=arm.schedule)
    k = "0" if length is None else length.label
    tracker.log_params({"k": k})
    tracker.set_tags(
        {
            "k": k,
            "arms": record.requested.value,
            **({} if record.certificate is None else {"losslessness": record.certificate.verdict}),
            **setting_tags(record),
            **verdict_tags(record),
            **drift_tags(drift),
            NOTE: description(record, execution_url=execution_url()),
        }
    )
    for name in ("report.html", "report.json", "run.json"):
        tracker.log_artifact(directory / name)
    for path in sorted((directory / "figures").glob("*.svg")):
        tracker.log_artifact(path, folder="figures")
    tracker.close(_status(record.certificate))


def _status(certificate: CertificateRecord | None) -> RunStatus:
    """Status of an execution: failed if it speculates and that was not shown to be lossless."""
    return RunStatus.FINISHED if certificate is None or certificate.verdict == LOSSLESS else RunStatus.FAILED
