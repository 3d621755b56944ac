"""Rank what an ablation's parts left: a table, a figure and a page, and the results in MLflow."""

from __future__ import annotations

import logging
from pathlib import Path

from slipstream.recipe import load_recipe
from slipstream.records.files import read_record
from slipstream.records.steps import ArmRecord
from slipstream.stages.context import RunContext, recorded_recipe
from slipstream.stages.runs import NOTE, execution_run
from slipstream.study.ablate import PlanRecord, ablation_context, ablation_run, arm_directory, ending, read_plan
from slipstream.study.ablation_grid import Kind, Part
from slipstream.study.ablation_page import AblationPaths, write_ablation
from slipstream.study.ablation_ranking import answer, outcome_metrics, rank, result_metrics
from slipstream.study.ablation_records import AblationRecord, Failure, Variant
from slipstream.tracking import RunStatus, Tracker, end_open_runs

logger = logging.getLogger(__name__)

NODE = "rank_ablation"
_LOST = "it left no word: its task was lost, cut off or never started"
_MAX_TAG_CHARACTERS = 5000


def rank_ablation(root: Path, execution: str) -> Path:
    """Rank, write the page and end the ablation's run; the directory of the page.

    A failed variant is in the table of failures and fails nothing else.
    """
    plan = read_plan(root, execution)
    record = collect(root, plan)
    directory, paths = _write(root, plan, record)
    _log_outcomes(root, plan, record)
    tracker = _run(root, plan)
    _log(tracker, record, paths)
    tracker.close()
    logger.info("ablation %s: %s", execution, " ".join(answer(record)) or "nothing was ranked")
    return directory


def fail_ablation(root: Path, execution: str, *, message: str) -> Path | None:
    """End the open runs of a failed ablation, and rank what there is; None for one that has no plan yet."""
    if not (root / execution / "plan_ablation" / "plan.json").is_file():
        logger.error("ablation %s failed before it was planned: %s", execution, message)
        return None
    plan = read_plan(root, execution)
    record = collect(root, plan)
    directory, paths = _write(root, plan, record)
    end_open_runs(root, execution, RunStatus.FAILED)
    tracker = _run(root, plan)
    _log(tracker, record, paths)
    tracker.set_tags({"failed.message": message[-_MAX_TAG_CHARACTERS:] or "unknown"})
    tracker.close(RunStatus.FAILED)
    logger.error("ablation %s failed; what it knows is in %s", execution, paths.html)
    return directory


def collect(root: Path, plan: PlanRecord) -> AblationRecord:
    """Every arm that there is, ranked, and why the others are not."""
    baselines = {
        (part.variant.setting.workload, part.variant.seed): arm
        for part in plan.of_kind(Kind.BASELINE)
        if (arm := _arm(root, plan, part)) is not None
    }
    arms: dict[Variant, ArmRecord] = {}
    failures: list[Failure] = []
    for part in plan.of_kind(Kind.VARIANT):
        arm = _arm(root, plan, part)
        if arm is not None:
            arms[part.variant] = arm
        else:
            failures.append(Failure(variant=part.variant, reason=_reason(root, plan, part)))
    return rank(plan.execution, plan.recipe, arms=arms, baselines=baselines, failures=failures)


def _arm(root: Path, plan: PlanRecord, part: Part) -> ArmRecord | None:
    path = arm_directory(root, plan.execution, part) / "arm.json"
    found = ending(root, plan.execution, part.name)
    return read_record(ArmRecord, path) if found is not None and found.is_finished and path.is_file() else None


def _reason(root: Path, plan: PlanRecord, part: Part) -> str:
    """Its own, else that of what it needs: a part that never started says nothing itself."""
    found = ending(root, plan.execution, part.name)
    if found is not None and found.reason:
        return found.reason
    for name in part.needs:
        needed = ending(root, plan.execution, name)
        if needed is not None and needed.reason:
            return f"{name} failed: {needed.reason}"
    return _LOST


def _write(root: Path, plan: PlanRecord, record: AblationRecord) -> tuple[Path, AblationPaths]:
    directory = root / plan.execution / NODE
    directory.mkdir(parents=True, exist_ok=True)
    return directory, write_ablation(record, directory)


def _run(root: Path, plan: PlanRecord) -> Tracker:
    recipe = load_recipe(str(recorded_recipe(root, f"{plan.execution}/{plan.parts[0].name}")))
    return ablation_run(ablation_context(root, plan.execution, recipe), recipe)


def _log(tracker: Tracker, record: AblationRecord, paths: AblationPaths) -> None:
    """Results as metrics, table and figure as artifacts."""
    tracker.log(result_metrics(record))
    words = [*answer(record), f"{len(record.failures)} variants failed.", "The page is the artifact `ablation.html`."]
    tracker.set_tags({NOTE: "\n\n".join(words), "num_failed": str(len(record.failures))})
    for path in (paths.html, paths.json, paths.figure):
        if path is not None:
            tracker.log_artifact(path)


def _log_outcomes(root: Path, plan: PlanRecord, record: AblationRecord) -> None:
    """Each variant's speedups, on its own run."""
    for outcome in record.outcomes:
        name = f"{plan.execution}/{outcome.variant.name}"
        recipe = load_recipe(str(recorded_recipe(root, name)))
        context = RunContext(execution=name, root=str(root), experiment=recipe.name, workload=recipe.workload.value)
        tracker = execution_run(context, recipe)
        tracker.log(outcome_metrics(outcome))
        tracker.close()
