"""Ends of executions: a failed one's partial results are kept on one page; runs of a terminated one are ended."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.kubernetes.flyte_admin import FlyteAdmin
from slipstream.losslessness.verdict import LOSSLESS
from slipstream.recipe import Recipe, load_recipe
from slipstream.records.files import read_record, write_atomic, write_record
from slipstream.records.stages import CertificateRecord, TuningRecord
from slipstream.records.steps import ArmRecord, EvaluationRecord, by_loop
from slipstream.report.formats import POLICY_LABELS, seconds
from slipstream.report.results import speedups
from slipstream.report.summary import summarise_arm, summarise_arms
from slipstream.stages.context import RunContext, arm_node, recorded_arms, recorded_recipe, started_by
from slipstream.stages.runs import execution_run, flyte_execution
from slipstream.tracking.spool import RunStatus, end_open_runs, open_executions
from slipstream.types import Arm, ArmLoop, Arms, arm_name

logger = logging.getLogger(__name__)

_MAX_TAG_CHARACTERS = 5000


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureRecord:
    """Failure of an execution: its node and message, with the stages that had finished."""

    execution: str
    node: str  # stage that failed
    message: str
    finished: tuple[str, ...]  # stages
    unfinished: tuple[str, ...]


def fail_run(root: Path, execution: str, *, message: str, stages: Sequence[str] = ()) -> None:
    """End the open runs of a failed execution, and write its error and results to failure.md and failure.json.

    Where Flyte's own execution would have resumed this one and was refused, this one stays as it is.

    Args:
        stages: those of its workflow, in their order; empty: the whole chain's.
    """
    path = recorded_recipe(root, execution)
    if not path.is_file():
        logger.error("execution %s failed before it was started: %s", execution, message)
        return
    if (own := flyte_execution()) and own != execution and own != started_by(root, execution):
        logger.error("execution %s, which would have resumed %s, was refused: %s", own, execution, message)
        return
    recipe, directory = load_recipe(str(path)), root / execution
    context = RunContext(execution=execution, root=str(root))
    chain = _endings(recipe, recorded_arms(root, execution))
    endings = {name: chain.get(name, f"{name}.json") for name in stages or chain}
    finished = tuple(name for name, ending in endings.items() if (directory / name / ending).is_file())
    unfinished = tuple(name for name in endings if name not in finished)
    node = _failed(finished, unfinished, directory, message)
    record = FailureRecord(execution=execution, node=node, message=message, finished=finished, unfinished=unfinished)
    page = context.directory("fail_run") / "failure.md"
    write_record(record, page.with_suffix(".json"))
    write_atomic(page, _page(record, recipe, directory).encode())
    end_open_runs(root, execution, RunStatus.FAILED)
    tracker = execution_run(context, recipe)
    tracker.set_tags({"failed.node": node, "failed.message": message[-_MAX_TAG_CHARACTERS:] or "unknown"})
    tracker.log_artifact(page)
    tracker.log_artifact(page.with_suffix(".json"))
    tracker.close(RunStatus.FAILED)
    logger.error("execution %s failed in %s; its partial results are in %s", execution, node, page)


_STATUS = {"SUCCEEDED": RunStatus.FINISHED, "ABORTED": RunStatus.KILLED}  # by Flyte's phase; else failed


def reconcile(root: Path, flyte: FlyteAdmin) -> dict[str, str]:
    """End the runs whose execution Flyte has ended: Terminate in the console starts no failure handler.

    One that another recovers or resumes, which goes on in its runs, is left alone until that one ends, and so is one
    that Flyte does not know.

    Returns:
        Flyte's phase of each execution whose runs were ended; `replay` sends their ends to the tracking server.
    Raises:
        FlyteError: Flyte does not answer.
    """
    going_on = {name for each in flyte.going_on() for name in (each.name, each.continues)}
    ended = {}
    for execution in open_executions(root):
        by = started_by(root, execution)
        state = None if {by, execution} & going_on else flyte.execution(by)
        if state is not None and state.has_ended:
            end_open_runs(root, execution, _STATUS.get(state.phase, RunStatus.FAILED))
            ended[execution] = state.phase
            logger.warning("execution %s is %s in Flyte; its open runs were ended", execution, state.phase)
    return ended


def _failed(finished: Sequence[str], unfinished: Sequence[str], directory: Path, message: str) -> str:
    """Stage that failed: of the unfinished ones the first that the error names, else the first that was begun.

    After the last stage, only verdicts can fail an execution, or what hands the stage's output on.
    """
    if "report_speedup" in finished or not unfinished:
        path = directory / "certify_losslessness" / "certificate.json"
        if path.is_file() and read_record(CertificateRecord, path).verdict != LOSSLESS:
            return "require_lossless"
        return "require_no_drift" if "report_speedup" in finished else finished[-1]
    named = [name for name in unfinished if name in message]
    begun = [name for name in unfinished if (directory / name).is_dir()]
    return [*named, *begun, *unfinished][0]


def _endings(recipe: Recipe, asked: Arms) -> dict[str, str]:
    """File that each stage of the execution leaves when it is done; without a speculative arm there is no draft."""
    loops = [ArmLoop.SYNCHRONOUS] if recipe.loop.is_synchronous else list(ArmLoop)
    arms = [(arm, loop) for loop in loops for arm in asked.members]
    speculates = Arm.SPECULATIVE in asked.members
    return {
        "prepare_data": "manifest.json",
        "prepare_policy": "policy/policy.json",
        **({"pretrain_draft": "draft.json", "tune_draft_length": "tuning.json"} if speculates else {}),
        **{arm_node(arm, loop): "arm.json" for arm, loop in arms},
        **{f"evaluate_aime_{name}": "evaluation.json" for name in ("start", *(arm_name(*each) for each in arms))},
        **({"certify_losslessness": "certificate.json"} if speculates else {}),
        "project_speedup": "projection.json",
        "report_speedup": "report.json",
    }


def _page(record: FailureRecord, recipe: Recipe, directory: Path) -> str:
    lines = [
        f"# {record.execution} failed",
        f"Recipe {recipe.name}, workload {recipe.workload.value}. Failed stage: {record.node}.",
        f"```\n{record.message}\n```",
        "## Stages",
        *(f"- {name}: finished" for name in record.finished),
        *(f"- {name}: not finished" for name in record.unfinished),
        "## Results",
        *(f"- {line}" for line in _results(record, directory)),
    ]
    return "\n\n".join(lines) + "\n"


def _results(record: FailureRecord, directory: Path) -> list[str]:
    lines: list[str] = []
    if "tune_draft_length" in record.finished:
        lines.append(read_record(TuningRecord, directory / "tune_draft_length" / "tuning.json").reason)
    arms = [name for name in record.finished if name.startswith("train_grpo")]
    synchronous, asynchronous = by_loop(read_record(ArmRecord, directory / name / "arm.json") for name in arms)
    lines += [_arm_result(arm) for arm in (*synchronous, *asynchronous) if arm.steps]
    ratios = speedups(summarise_arms(synchronous))
    lines += [f"{each.label.strip()}: {each.text}, {each.uncertainty}" for each in ratios]
    for name in (name for name in record.finished if name.startswith("evaluate_aime")):
        scored = read_record(EvaluationRecord, directory / name / "evaluation.json")
        lines.append(f"{scored.policy}: avg@{scored.k} {scored.avg_at_k:.3f}")
    if "certify_losslessness" in record.finished:
        certificate = read_record(CertificateRecord, directory / "certify_losslessness" / "certificate.json")
        lines.append(f"losslessness: {certificate.verdict}: {certificate.reason}")
    return lines or ["none yet"]


def _arm_result(record: ArmRecord) -> str:
    arm = summarise_arm(record)
    reward = f"reward {arm.reward_first.value:.3f} to {arm.reward_last.value:.3f}"
    name = f"{POLICY_LABELS[record.name]}, k={arm.k}"
    return f"{name}: {arm.num_steps} steps of {seconds(arm.step.median)} s (median), {reward}"
