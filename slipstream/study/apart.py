"""Ablation: plan all variants, produce each part in `<root>/<ablation>/<part>/` and an MLflow run of its own, rank.

Stages of the whole chain produce a part. Parts share data, policy and draft through the store. How a part ended is a
record beside it, which the other parts read instead of the platform's status.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slipstream.drafts.methods import require_package
from slipstream.kubernetes.profile import ClusterProfile
from slipstream.recipe import Recipe, load_recipe, parameters, write_recipe
from slipstream.records.files import read_record, write_record
from slipstream.records.stages import TuningRecord
from slipstream.records.steps import ArmRecord
from slipstream.rewards.function import kept, write_kept
from slipstream.stages.context import RunContext, arm_node, recorded_recipe
from slipstream.stages.deliverables import assemble, deliver
from slipstream.stages.prepare_data import prepare_data
from slipstream.stages.prepare_policy import POLICY_RECORDS, prepare_policy
from slipstream.stages.pretrain_draft import pretrain_draft
from slipstream.stages.recipe_engines import fitting_weights, given_length
from slipstream.stages.runs import NOTE, alone_on, execution_run, origin_tags
from slipstream.stages.start_run import end_terminated, on_cluster
from slipstream.stages.train_grpo import train_grpo
from slipstream.stages.tune_draft_length import tune_draft_length
from slipstream.study.ranking import StudyRecord, Trained, outcome_metrics, rank, result_metrics
from slipstream.study.study_page import answers, write_study
from slipstream.study.variants import Grid, Kind, Part, Study, Variant, parts, variant_recipes
from slipstream.tracking.config import ABLATION, KIND_TAG
from slipstream.tracking.spool import RunStatus, end_open_runs
from slipstream.types import Arm

logger = logging.getLogger(__name__)

_PLAN, _ENDING = "plan.json", "part.json"
_PLAN_NODE, _POLICY_NODE = "plan_ablation", "prepare_policy"
_MAX_TAG_CHARACTERS = 5000


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRecord:
    """Parts of an ablation."""

    execution: str
    recipe: str
    parts: tuple[Part, ...]

    def of_kind(self, kind: Kind) -> tuple[Part, ...]:
        """Return the parts of one kind."""
        return tuple(part for part in self.parts if part.kind is kind)


@dataclass(frozen=True, kw_only=True, slots=True)
class PartRecord:
    """Ending of a part."""

    reason: str  # why the part failed; empty where it finished


class PartMissingError(RuntimeError):
    """A part that this part needs has failed."""


def plan_ablation(
    recipe_name: str,
    grid: Grid,
    *,
    root: Path,
    execution: str,
    requested: Mapping[str, Any],
    cluster: ClusterProfile,
    reuse_stored: bool = True,
) -> dict[Kind, list[RunContext]]:
    """Validate and write the recipe of every variant before anything starts, and open the ablation's MLflow run.

    Raises:
        ConfigError: a variant's recipe or the cluster breaks a rule; the error names the variant.
    """
    root = root.resolve()
    resolved = variant_recipes(recipe_name, grid, requested)
    recipes = {variant: on_cluster(recipe, cluster) for variant, (recipe, _) in resolved.items()}
    for recipe in recipes.values() if cluster.is_local else ():  # pods have another image; there pretraining checks
        require_package(recipe.draft.method)
    rewards = {recipe.reward: kept(recipe.reward, root / execution / _PLAN_NODE) for recipe in recipes.values()}
    for own, copy in rewards.items():
        write_kept(own, copy)
    recipes = {variant: replace(recipe, reward=rewards[recipe.reward]) for variant, recipe in recipes.items()}
    first = next(iter(recipes.values()))
    plan = PlanRecord(execution=execution, recipe=first.name, parts=parts(recipes))
    for part in plan.parts:
        path = recorded_recipe(root, f"{execution}/{part.name}")
        write_recipe(recipes[part.variant], path, resolved[part.variant][1])
    write_record(plan, root / execution / _PLAN_NODE / _PLAN)
    axes = {name: values for name, values in vars(grid).items() if name != "online"}  # that one is a bake-off's
    params = {f"grid.{name}": ", ".join(map(str, values)) or "the recipe's" for name, values in axes.items()}
    context = RunContext(execution=execution, root=str(root), reuse_stored=reuse_stored)
    tags = {KIND_TAG: ABLATION, **origin_tags()}
    end_terminated(root, cluster)
    with alone_on(cluster, root, execution):
        execution_run(context, first, tags, {**params, "recipe": first.name}).detach()
    counts = ", ".join(f"{len(plan.of_kind(kind))} of {kind.value}" for kind in Kind)
    logger.info("ablation %s starts: recipe %s, parts: %s", execution, first.name, counts)
    return {
        kind: [replace(context, execution=f"{execution}/{part.name}") for part in plan.of_kind(kind)] for kind in Kind
    }


def make_part(context: RunContext) -> str:
    """Run the part that `context` names in an MLflow run of its own, and record how it ended; returns its name."""
    root = Path(context.root)
    plan = read_plan(root, context.part_of)
    part = next(part for part in plan.parts if f"{plan.execution}/{part.name}" == context.execution)
    recipe = load_recipe(str(recorded_recipe(root, context.execution)))
    logger.info("ablation: part %d of %d, %s", plan.parts.index(part) + 1, len(plan.parts), part.name)
    execution_run(context, recipe, origin_tags(), parameters(recipe)).detach()
    path = root / context.execution / _ENDING  # an interrupted part leaves no record
    try:
        for name in part.needs:  # without them the part would fail too, or have no baseline
            found = ending(root, plan.execution, name)
            if found is None:
                raise PartMissingError(f"{name} left no record: its task was lost or never started")
            if found.reason:
                raise PartMissingError(f"{name} failed: {found.reason}")
        _make(context, recipe, part)
    except Exception as error:
        write_record(PartRecord(reason=f"{type(error).__name__}: {error}"), path)
        execution_run(context, recipe).close(RunStatus.FAILED)
        logger.error("ablation: %s failed, the other parts continue: %s", context.execution, error)
        raise
    write_record(PartRecord(reason=""), path)
    execution_run(context, recipe).close()
    return part.name


def rank_ablation(root: Path, execution: str) -> Path:
    """Rank the variants, list failures with their reasons, and close the ablation's run; return the page's folder."""
    plan = read_plan(root, execution)
    record = collect(root, plan)
    for outcome in record.outcomes:
        name = f"{execution}/{outcome.variant.name}"
        recipe = load_recipe(str(recorded_recipe(root, name)))
        with execution_run(RunContext(execution=name, root=str(root)), recipe) as tracker:
            tracker.log(outcome_metrics(outcome))
    directory = _report(root, plan, record)
    logger.info("ablation %s: %s", execution, " ".join(answers(record)))
    return directory


def fail_ablation(root: Path, execution: str, *, message: str) -> None:
    """Close the open runs of a failed ablation and rank its finished variants; one without a plan has neither."""
    if not (root / execution / _PLAN_NODE / _PLAN).is_file():
        logger.error("ablation %s failed before it was planned: %s", execution, message)
        return
    end_open_runs(root, execution, RunStatus.FAILED)
    plan = read_plan(root, execution)
    directory = _report(root, plan, collect(root, plan), failed=message)
    logger.error("ablation %s failed; its results so far are in %s", execution, directory)


def collect(root: Path, plan: PlanRecord) -> StudyRecord:
    """Rank every variant that has an arm and a baseline; the others fail with a reason."""
    arms: dict[str, ArmRecord | None] = {}
    for part in (*plan.of_kind(Kind.BASELINE), *plan.of_kind(Kind.VARIANT)):
        node = arm_node(Arm.AUTOREGRESSIVE if part.kind is Kind.BASELINE else Arm.SPECULATIVE)
        path, found = root / plan.execution / part.name / node / "arm.json", ending(root, plan.execution, part.name)
        is_there = found is not None and not found.reason and path.is_file()
        arms[part.name] = read_record(ArmRecord, path) if is_there else None
    ended: dict[Variant, Trained | str] = {}
    for part in plan.of_kind(Kind.VARIANT):
        arm, baseline = arms[part.name], next(arms[name] for name in part.needs if name in arms)
        if arm is None:
            ended[part.variant] = _reason(root, plan, part)
        elif baseline is None:
            ended[part.variant] = "its baseline is missing"
        else:
            ended[part.variant] = Trained(arm=arm, baseline=baseline)
    return rank(Study.ABLATION, ended, execution=plan.execution, recipe=plan.recipe)


def read_plan(root: Path, execution: str) -> PlanRecord:
    """Read what `plan_ablation` planned."""
    return read_record(PlanRecord, root / execution / _PLAN_NODE / _PLAN)


def ending(root: Path, execution: str, name: str) -> PartRecord | None:
    """Read how a part ended; None without a record."""
    path = root / execution / name / _ENDING
    return read_record(PartRecord, path) if path.is_file() else None


def _make(context: RunContext, recipe: Recipe, part: Part) -> None:
    """Run the stages of a part, on the policy that the policy's part delivered."""
    data = prepare_data(context, recipe, trains_draft=part.kind in (Kind.DRAFT, Kind.VARIANT))
    if part.kind is Kind.POLICY:
        policy = prepare_policy(context, recipe, data=data)
        deliver(context, _POLICY_NODE, policy, records=POLICY_RECORDS, weights=(".",))
        return
    delivered = Path(context.root) / context.part_of / part.needs[0] / "deliverables" / _POLICY_NODE
    policy = assemble(context, delivered)
    if part.kind is Kind.BASELINE:  # an autoregressive arm reads neither draft nor tuning
        train_grpo(context, recipe, [Arm.AUTOREGRESSIVE], policy=policy, data=data, draft=None, tuning=None)
        return
    draft = pretrain_draft(context, recipe, policy=policy, data=data)
    if part.kind is Kind.VARIANT:
        k = part.variant.setting.num_speculative_tokens
        if k:
            tuning = _given_length(context, recipe, k, policy=policy, draft=draft)
        else:
            tuning = tune_draft_length(context, recipe, policy=policy, data=data, draft=draft)
        train_grpo(context, recipe, [Arm.SPECULATIVE], policy=policy, data=data, draft=draft, tuning=tuning)


def _given_length(context: RunContext, recipe: Recipe, k: int, *, policy: Path, draft: Path) -> Path:
    """Write the tuning record of a draft length that the grid names, without measuring it."""
    fitting_weights(recipe, policy, draft)
    directory = context.directory("tune_draft_length")
    sampling = given_length(recipe, k).sampling.value
    record = TuningRecord(
        chosen_k=k, reason=f"k={k} is what the grid asks for", points=(), schedule=(), sampling=sampling
    )
    write_record(record, directory / "tuning.json")
    return directory


def _reason(root: Path, plan: PlanRecord, part: Part) -> str:
    """Return why a part has no result: its own failure, else the failure of a part that it needs."""
    for name in (part.name, *part.needs):
        found = ending(root, plan.execution, name)
        if found is not None and found.reason:
            return found.reason if name == part.name else f"{name} failed: {found.reason}"
    return "it left no record: its task was lost, cancelled or never started"


def _report(root: Path, plan: PlanRecord, record: StudyRecord, *, failed: str | None = None) -> Path:
    """Write the page, log it with the results, and close the ablation's run; `failed` is the message of its failure."""
    directory = root / record.execution / record.study.node
    paths = write_study(record, directory)
    recipe = load_recipe(str(recorded_recipe(root, f"{plan.execution}/{plan.parts[0].name}")))
    words = [*answers(record), f"{len(record.failures)} variants failed.", "The page is the artifact `ablation.html`."]
    tracker = execution_run(RunContext(execution=plan.execution, root=str(root)), recipe, {KIND_TAG: ABLATION})
    tracker.log(result_metrics(record))
    tags = {} if failed is None else {"failed.message": failed[-_MAX_TAG_CHARACTERS:] or "unknown"}
    tracker.set_tags({NOTE: "\n\n".join(words), "num_failed": str(len(record.failures)), **tags})
    for path in paths:
        tracker.log_artifact(path)
    tracker.close(RunStatus.FINISHED if failed is None else RunStatus.FAILED)
    return directory
