"""Command line of Slipstream: train or check a recipe, run a study, compare executions. Commands print to stdout."""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

from slipstream import logs, run_command, simulate_command
from slipstream.config import LARGEST, ConfigError, parse_overrides, require
from slipstream.data.config import SYNTHETIC
from slipstream.gpu_check import check_command
from slipstream.kubernetes.flyte_admin import admin_of
from slipstream.kubernetes.profile import read_profile
from slipstream.recipe import Recipe, load_recipe, recipe_file_schema, resolve_recipe
from slipstream.records.files import write_atomic
from slipstream.stages.context import add_set
from slipstream.study import study_command
from slipstream.tracking.config import TrackingConfig, store_uri
from slipstream.tracking.mlflow_store import TrackingError, open_store, read_executions, view_addresses
from slipstream.tracking.replay import replay
from slipstream.tracking.spool import RunStatus, end_open_runs, open_executions
from slipstream.types import FinishReason, Prompt, Workload
from slipstream.workers.placement.memory import memory_text
from slipstream.workers.placement.plan import make_plan, parse_cluster, plan_text, table

_INTERRUPTED = 128 + signal.SIGINT
_UNREAD = 128 + signal.SIGPIPE  # a shell's status of a command whose reader has closed the pipe


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit status.

    It is 2 for bad input, 1 for a tracking error, 130 after Ctrl-C, 141 if nobody reads the output.
    """
    try:
        try:
            options = _parser().parse_args(arguments)
            return options.run(options)
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except TrackingError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        finally:
            if sys.stdout is not None:  # the caller may have closed it
                sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    except OSError as error:
        if sys.stdout is None or not _is_output_lost():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at exit
        if isinstance(error, BrokenPipeError):
            return _UNREAD
        print(f"error: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 1


def _is_output_lost() -> bool:
    """Return True if the output has no reader or cannot be written."""
    poller = select.poll()
    poller.register(sys.stdout, select.POLLOUT)
    if any(event & select.POLLERR for _, event in poller.poll(0)):
        return True
    try:
        sys.stdout.flush()
    except OSError:
        return True
    return False


Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def _parser() -> argparse.ArgumentParser:
    words = "Speculative rollouts for RL post-training of language models."
    parser = argparse.ArgumentParser(prog="slipstream", description=words)
    commands = parser.add_subparsers(required=True, metavar="command")
    run_command.add_commands(commands)
    for name, words in study_command.PRESETS.items():
        study_command.add_options(_command(commands, name, _study, words), name)
    _add_recipe_commands(commands)
    _command(commands, "cluster", _cluster, "list the nodes of the Ray cluster at RAY_ADDRESS, or this machine")
    check_command.add_command(commands)
    _add_cluster_commands(commands)
    _add_store_commands(commands)
    simulate_command.add_parser(commands)
    return parser


def _command(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], int], words: str
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=words)
    command.set_defaults(run=run)
    return command


def _add_recipe_commands(commands: Commands) -> None:
    check = _command(commands, "check", _check, "check a recipe without running it")
    words = "print the placement plan for this cluster, such as 8x4"
    check.add_argument("--cluster", metavar="NODESxGPUS", help=words)
    words = "number of neighbouring nodes in one NVLink domain"
    check.add_argument("--domain-nodes", type=int, metavar="N", help=words)
    _command(commands, "schema", _schema, "print the JSON schema of recipe files, which editors read")
    score = _command(commands, "score", _score, "try a recipe's reward on responses, before anything is trained")
    words = "JSON lines with `response` and `reference`, and where the reward reads them `data_source`, `extra_info`"
    score.add_argument("--responses", required=True, metavar="FILE", help=words)
    score.add_argument("--json", action="store_true", help="print one JSON line a response, with its `score`")
    words = "show prompts as the policy reads them, their lengths, and dropped rows"
    data = _command(commands, "data", _data, words)
    for command in (check, score, data):
        command.add_argument("recipe")
        add_set(command)


def _add_cluster_commands(commands: Commands) -> None:
    words = "check a Kubernetes cluster for what a profile's runs need"
    preflight = _command(commands, "preflight", _preflight, words)
    preflight.add_argument("--cluster", required=True, help="a profile of configs/clusters/, or a path to one")
    words = "namespace of Flyte's project and domain"
    preflight.add_argument("--namespace", default="slipstream-development", help=words)
    words = "context of the kubeconfig; default: its current one, or this pod's account"
    preflight.add_argument("--context", help=words)
    preflight.add_argument("--image", help="image of a pod that tries to write under the shared root")
    preflight.add_argument("--timeout-s", type=float, default=10.0, help="time limit of each request")
    words = "end the MLflow runs of executions that are over in Flyte"
    reconcile = _command(commands, "reconcile", _reconcile, words)
    smoke = _command(commands, "smoke", _smoke, "launch small executions on a Flyte, and say what held")
    for command in (reconcile, smoke):
        command.add_argument("--cluster", required=True, help="a profile with flyte.endpoint")
        command.add_argument("--project", default="slipstream")
        command.add_argument("--domain", default="development")
    reconcile.add_argument("--run-root", help="default: the profile's, where its volume is mounted")
    reconcile.add_argument("--ended", metavar="EXECUTION", help="this one is over: Flyte is not asked")
    smoke.add_argument("--version", required=True, help="version that the plans were registered under")
    smoke.add_argument("--context", help="context of the kubeconfig, to delete a pod of a task")


def _add_store_commands(commands: Commands) -> None:
    send = _command(commands, "replay", _replay, "send spooled points to a tracking server")
    send.add_argument("run_root")
    send.add_argument("--uri", help="tracking server; default: the SQLite store under run_root")
    compare = _command(commands, "compare", _compare, "compare executions from the tracking store")
    words = "compare executions of this experiment only; default: of all"
    compare.add_argument("--experiment", help=words)
    words = "executions to compare, in this order"
    compare.add_argument("--runs", nargs="+", default=[], metavar="EXECUTION", help=words)
    _add_store(compare)
    compare.add_argument("--html", help="path of the page; default: comparison.html in --run-root")
    views = _command(commands, "views", _views, "print the addresses of MLflow's tables of executions and arms")
    _add_store(views)
    views.add_argument("--server", required=True, help="address of the MLflow server on that store")


def _study(options: argparse.Namespace) -> int:
    """Run the workflow of a study through `pyflyte run`, and print its tables."""
    root = Path(options.run_root).resolve()
    launch = study_command.launched(options)
    status = run_command.run(launch, root)
    if status == 0:
        print(study_command.result(root, launch))
    return status


def _check(options: argparse.Namespace) -> int:
    is_used = options.domain_nodes is None or options.cluster is not None
    require(is_used, "--domain-nodes", "must be left out without --cluster", options.domain_nodes, "as in 8x4")
    changes = parse_overrides(options.set)
    own, origins = resolve_recipe(options.recipe, overrides=changes)
    others = [] if "workload" in origins else [workload for workload in Workload if workload is not own.workload]
    recipes = [own, *(load_recipe(options.recipe, workload=workload, overrides=changes) for workload in others)]
    for recipe in recipes:
        print(f"{recipe.name}, {recipe.workload.value}: {_sizes(recipe)}")
        memory = recipe.memory()
        for warning in memory.warnings() if memory else ():
            print(f"warning: {warning}")
    plans = [_plan(recipe, options.cluster, options.domain_nodes) for recipe in recipes]
    for plan in filter(None, dict.fromkeys(plans)):  # both workloads usually have the same plan
        print(f"\n{plan}")
    return 0


def _schema(_: argparse.Namespace) -> int:
    print(json.dumps(recipe_file_schema(), indent=1))
    return 0


def _plan(recipe: Recipe, cluster: str | None, domain_nodes: int | None) -> str:
    """Render the memory of each GPU, and on a cluster the placement plan; empty where neither is known."""
    if not recipe.layout.has_gpus:
        return "no GPUs: every process runs on one host (placement.gpus_per_node 0)" if cluster else ""
    parts = []
    if cluster is not None:
        parts.append(plan_text(make_plan(recipe.layout, parse_cluster(cluster, domain_nodes=domain_nodes))))
    if (found := recipe.memory()) is not None:
        parts.append(memory_text(found, recipe.refit_channel))
    elif recipe.simulator is not None:
        parts.append("memory: not counted")
    else:
        parts.append("memory: unknown; name simulator.model and simulator.hardware")
    return "\n\n".join(parts)


def _data(options: argparse.Namespace) -> int:
    from slipstream.stages.prepare_data import shown_data

    print(shown_data(load_recipe(options.recipe, overrides=parse_overrides(options.set))))
    return 0


def _score(options: argparse.Namespace) -> int:
    from slipstream.rewards.function import RewardError, open_reward

    config = load_recipe(options.recipe, overrides=parse_overrides(options.set)).reward
    found = _responses(Path(options.responses))
    rows = list(found.values())
    prompts = [
        Prompt(
            id=f"line {number}",
            text="",
            token_ids=(),
            answer=str(row["reference"]),
            data_source=str(row.get("data_source") or ""),
            extra=row.get("extra_info") or {},
        )
        for number, row in found.items()
    ]
    cut_off = [prompt.extra.get("finish_reason") == FinishReason.LENGTH for prompt in prompts]
    with open_reward(config) as reward:
        try:
            result = reward.judge(prompts, [row["response"] for row in rows], cut_off=cut_off)
        except RewardError as error:
            raise ConfigError(str(error)) from error
    if options.json:
        for row, score in zip(rows, result.rewards, strict=True):
            print(json.dumps({**row, "score": score}))
        return 0
    shown = [
        [prompt.id.removeprefix("line "), f"{score:g}", prompt.answer[:20], " ".join(row["response"].split())[-60:]]
        for prompt, row, score in zip(prompts, rows, result.rewards, strict=True)
    ]
    print(table([["line", "score", "reference", "response ends with"], *shown]))
    failed = result.num_timeouts + result.num_crashes + result.num_failures
    print(f"\nmean {fmean(result.rewards):.3f} of {len(rows)} responses, {failed} without a reward")
    for name, value in result.metrics.items():
        print(f"reward/{name} {value:g}")
    return 0


def _responses(path: Path) -> dict[int, dict[str, Any]]:
    """Read the responses by the number of their line."""
    require(path.is_file(), "--responses", "must name a file", str(path))
    rows: dict[int, dict[str, Any]] = {}
    # By line feeds alone: `splitlines` also splits at U+2028 and others, which may stand inside a JSON string.
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        shown = line[:200].decode(errors="replace")
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"--responses must hold JSON lines, got line {number} of {path}: {error}") from error
        is_whole = isinstance(row, dict) and isinstance(row.get("response"), str)
        is_whole = is_whole and type(row.get("reference")) in (str, int, float)  # as a row of data must have it
        rule = f"must have the text `response` and a `reference` in line {number}"
        require(is_whole, "--responses", rule, shown, "a reference is text or a number")
        is_mapping = isinstance(row.get("extra_info"), dict | None)
        require(is_mapping, "--responses", f"must have a mapping as `extra_info` in line {number}", shown)
        rows[number] = row
    require(bool(rows), "--responses", "must hold at least one response", str(path))
    return rows


def _cluster(_: argparse.Namespace) -> int:
    from slipstream.workers.session import connect, ray_nodes

    connect()
    rows = [["node", "CPUs free", "GPUs free", "object store, GB", "labels"]]
    for node in ray_nodes():
        labels = " ".join(f"{name}={value}" for name, value in sorted(node.labels.items()))
        cpus, gpus = f"{node.free_cpus:g} of {node.num_cpus:g}", f"{node.free_gpus:g} of {node.num_gpus}"
        rows.append([node.address, cpus, gpus, f"{node.object_store_bytes / 1e9:.1f}", labels])
    print(table(rows))
    return 0


def _preflight(options: argparse.Namespace) -> int:
    from slipstream.kubernetes.kubernetes_api import connect
    from slipstream.kubernetes.preflight import check, require_pods

    require(0 < options.timeout_s <= LARGEST, "--timeout-s", f"must lie in (0, {LARGEST}]", options.timeout_s)
    profile = read_profile(options.cluster)
    require_pods(profile)
    api = connect(context=options.context, timeout_s=options.timeout_s)
    record = check(api, profile, namespace=options.namespace, image=options.image)
    print(record.table)
    print("not asked: Flyte's own limits (task_resources), which deploy/flyte/values.yaml lifts")
    print(f"\n{record.num_missing} missing")
    return 1 if record.num_missing else 0


def _reconcile(options: argparse.Namespace) -> int:
    from slipstream.stages.fail_run import reconcile

    profile = read_profile(options.cluster)
    root = Path(options.run_root or profile.run_root)
    if options.ended is not None:
        open_ones = open_executions(root)
        require(options.ended in open_ones, "--ended", "must name an open execution", options.ended, str(open_ones))
        end_open_runs(root, options.ended, RunStatus.KILLED)
        ended = {options.ended: RunStatus.KILLED.value}
    else:
        ended = reconcile(root, admin_of(profile, project=options.project, domain=options.domain))
    for execution, phase in ended.items():
        print(f"{execution}: {phase}")
    print(f"runs of {len(ended)} execution(s) were ended")
    options.uri = profile.tracking.uri if profile.tracking is not None else None
    options.run_root = str(root)
    return _replay(options) if ended else 0


def _smoke(options: argparse.Namespace) -> int:
    from slipstream.kubernetes.kubernetes_api import connect, delete_pod
    from slipstream.kubernetes.smoke import smoke

    logs.configure()
    profile = read_profile(options.cluster)
    require(profile.gpu is None, "--cluster", "must be a profile without GPUs", profile.name, "as in cpu")
    admin = admin_of(profile, project=options.project, domain=options.domain)
    api = connect(context=options.context, timeout_s=10.0)
    uri = profile.tracking.uri if profile.tracking is not None else None
    rows = smoke(
        admin,
        options.version,
        delete_pod=partial(delete_pod, api, f"{options.project}-{options.domain}"),
        tracked=(lambda name: read_executions(uri, names=[name])[0].status) if uri else None,
    )
    print(table([["", "what", "seen"], *[["held" if held else "FAILED", *row] for held, *row in rows]]))
    return 0 if all(held for held, *_ in rows) else 1


def _sizes(recipe: Recipe) -> str:
    """Count the prompts of each set if they can be built here, and check that the stages have enough."""
    sources = (*recipe.data.train, *recipe.data.draft_in_domain, *recipe.data.draft_general, *recipe.data.validation)
    if recipe.policy.scratch is None or any(source.path != SYNTHETIC for source in sources):
        return "fine; the sizes of its prompt sets are checked when the data are read"
    from slipstream.data.tokenizer import build_tokenizer
    from slipstream.stages.support import recipe_prompt_sets

    tokenizer = build_tokenizer(max_length=recipe.policy.scratch_positions)
    sizes = recipe_prompt_sets(recipe, tokenizer).sizes()
    return "fine; prompts kept: " + ", ".join(f"{name} {size}" for name, size in sizes.items())


def _replay(options: argparse.Namespace) -> int:
    logs.configure()
    root = Path(options.run_root)
    uri = store_uri(TrackingConfig(uri=options.uri), root)
    try:
        result = replay(root, uri)
    except TrackingError as error:
        raise TrackingError(f"nothing more was sent: {error}") from error
    left_out = f"; {result.num_broken_lines} line(s) that a crash truncated are lost" if result.num_broken_lines else ""
    print(f"{result.num_runs} run(s) are whole on {uri}; {result.num_points} points were sent now{left_out}")
    for spool, reason in result.refused.items():
        print(f"error: {spool} has not arrived: {reason}", file=sys.stderr)
    if result.refused:
        print("fix this and replay again; to discard a run, remove its spool", file=sys.stderr)
    return 1 if result.refused else 0


def _add_store(command: argparse.ArgumentParser) -> None:
    command.add_argument("--run-root", default="runs", help="directory of the SQLite store that is read without --uri")
    command.add_argument("--uri", help="MLflow server, or sqlite:///FILE")


def _store(options: argparse.Namespace) -> str:
    return options.uri or store_uri(TrackingConfig(), Path(options.run_root))


def _compare(options: argparse.Namespace) -> int:
    from slipstream.report.comparison import comparison_table, render_comparison

    uri = _store(options)
    executions = read_executions(uri, experiment=options.experiment, names=options.runs)
    require(bool(executions), "experiment", "must have executions", options.experiment, f"none is on {uri}")
    print(comparison_table(executions))
    page = Path(options.html or f"{options.run_root}/comparison.html")
    try:
        write_atomic(page, render_comparison(executions, uri=uri).encode())
    except OSError as error:
        raise ConfigError(f"--html must be a path that can be written, got {str(page)!r} ({error.strerror})") from error
    print(f"\npage: {page}")
    return 0


def _views(options: argparse.Namespace) -> int:
    for experiment_id, name in sorted(open_store(_store(options)).experiments().items()):
        for view, address in view_addresses(options.server, experiment_id).items():
            print(f"{name}, {view}: {address}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
