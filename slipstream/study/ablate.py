"""The parts of an ablation: planned at once, made one by one, each in `<root>/<ablation>/<part>/` and in an MLflow run
below the ablation's.

A part is made by the stages of the whole chain. Data, policy and draft come from the store, so that the parts that
share them only look them up. How a part ended is a record beside it: the others read that, not what the platform says.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slipstream.kubernetes.profile import ClusterProfile
from slipstream.recipe import Recipe, load_recipe, parameters, write_recipe
from slipstream.records.files import read_record, write_record
from slipstream.records.stages import TuningRecord
from slipstream.stages.context import RunContext, recorded_recipe
from slipstream.stages.deliverables import assemble, deliver
from slipstream.stages.origin import origin_tags
from slipstream.stages.prepare_data import prepare_data
from slipstream.stages.prepare_policy import prepare_policy
from slipstream.stages.pretrain_draft import pretrain_draft
from slipstream.stages.recipe_engines import draft_weights
from slipstream.stages.runs import execution_run
from slipstream.stages.start_run import on_cluster
from slipstream.stages.train_grpo import train_grpo
from slipstream.stages.tune_draft_length import tune_draft_length
from slipstream.study.ablation_grid import Grid, Kind, Part, parts, variant_recipes
from slipstream.tracking import ABLATION, KIND_TAG, RunStatus, Tracker
from slipstream.types import Arm

logger = logging.getLogger(__name__)

POLICY_RECORDS = ("policy.json", "*config.json", "tokenizer*", "*.jinja")
_PLAN, _ENDING = "plan.json", "part.json"
_POLICY_NODE = "prepare_policy"
_RECIPES = "the recipe's"
_GRID = ("draft_inits", "methods", "losses", "draft_lengths", "seeds", "workloads")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRecord:
    """What an ablation consists of."""

    execution: str
    recipe: str
    parts: tuple[Part, ...]

    def of_kind(self, kind: Kind) -> tuple[Part, ...]:
        """Its parts of one kind."""
        return tuple(part for part in self.parts if part.kind is kind)


@dataclass(frozen=True, kw_only=True, slots=True)
class PartRecord:
    """How a part ended."""

    is_finished: bool
    reason: str  # empty where it is finished


class PartMissingError(RuntimeError):
    """A part that this one needs has failed."""


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
    """Check the recipe of every variant before anything starts, write them all out, and open the ablation's run.

    Returns:
        What each part works for, by kind.
    Raises:
        ConfigError: the recipe or the cluster refuses a variant, which the error names.
    """
    root = root.resolve()
    resolved = variant_recipes(recipe_name, grid, requested)
    recipes = {variant: on_cluster(recipe, cluster) for variant, (recipe, _) in resolved.items()}
    planned = parts(recipes)
    first = next(iter(recipes.values()))
    plan = PlanRecord(execution=execution, recipe=first.name, parts=planned)
    for part in planned:
        path = recorded_recipe(root, f"{execution}/{part.name}")
        write_recipe(recipes[part.variant], path, resolved[part.variant][1])
    whole = ablation_context(root, execution, first)
    write_record(plan, whole.directory("plan_ablation") / _PLAN)
    axes = {f"grid.{name}": ", ".join(map(str, getattr(grid, name))) or _RECIPES for name in _GRID}
    ablation_run(whole, first, origin_tags(), {**axes, "recipe": first.name}).detach()
    counts = ", ".join(f"{len(plan.of_kind(kind))} of {kind.value}" for kind in Kind)
    logger.info("ablation %s starts: recipe %s, parts: %s", execution, first.name, counts)
    return {
        kind: [
            replace(
                whole,
                execution=f"{execution}/{part.name}",
                workload=part.variant.setting.workload.value,
                reuse_stored=reuse_stored,
            )
            for part in plan.of_kind(kind)
        ]
        for kind in Kind
    }


def make_part(context: RunContext) -> str:
    """Make the part that `context` names, and record how it ended; its name.

    Raises:
        PartMissingError: a part that it needs failed.
    """
    plan = read_plan(Path(context.root), context.part_of)
    part = next(part for part in plan.parts if f"{plan.execution}/{part.name}" == context.execution)
    recipe = load_recipe(str(recorded_recipe(Path(context.root), context.execution)))
    logger.info("ablation: part %d of %d, %s", plan.parts.index(part) + 1, len(plan.parts), part.name)
    with _recorded(context, recipe):
        _require_made(context, part)
        if part.kind is Kind.POLICY:
            _make_policy(context, recipe)
        elif part.kind is Kind.DRAFT:
            _shared(context, recipe, part)
        elif part.kind is Kind.BASELINE:
            _train(context, recipe, part, Arm.AUTOREGRESSIVE)
        else:
            _train(context, recipe, part, Arm.SPECULATIVE)
    return part.name


def arm_directory(root: Path, execution: str, part: Part) -> Path:
    """Where the arm of a baseline or a variant leaves its record."""
    arm = Arm.AUTOREGRESSIVE if part.kind is Kind.BASELINE else Arm.SPECULATIVE
    return root / execution / part.name / f"train_grpo_{arm.value}"


def read_plan(root: Path, execution: str) -> PlanRecord:
    """What `plan_ablation` planned."""
    return read_record(PlanRecord, root / execution / "plan_ablation" / _PLAN)


def has_plan(root: Path, execution: str) -> bool:
    """Whether the ablation came so far."""
    return (root / execution / "plan_ablation" / _PLAN).is_file()


def ending(root: Path, execution: str, name: str) -> PartRecord | None:
    """How a part ended; None for one that left no word."""
    path = root / execution / name / _ENDING
    return read_record(PartRecord, path) if path.is_file() else None


def ablation_context(root: Path, execution: str, recipe: Recipe) -> RunContext:
    """The ablation itself."""
    return RunContext(
        execution=execution, root=str(root), experiment=recipe.name, workload=recipe.workload.value, reuse_stored=True
    )


def ablation_run(
    context: RunContext, recipe: Recipe, tags: Mapping[str, str] | None = None, params: Mapping[str, str] | None = None
) -> Tracker:
    """The MLflow run of the ablation, to which those of its parts belong."""
    return execution_run(context, recipe, {KIND_TAG: ABLATION, **(tags or {})}, params)


@contextmanager
def _recorded(context: RunContext, recipe: Recipe) -> Iterator[None]:
    """The part's MLflow run around the block, and the record of how the block ended. An interrupt leaves none."""
    path = Path(context.root) / context.execution / _ENDING
    execution_run(context, recipe, origin_tags(), parameters(recipe)).detach()
    try:
        yield
    except Exception as error:
        write_record(PartRecord(is_finished=False, reason=f"{type(error).__name__}: {error}"), path)
        execution_run(context, recipe).close(RunStatus.FAILED)
        logger.error("ablation: %s failed, the others go on: %s", context.execution, error)
        raise
    write_record(PartRecord(is_finished=True, reason=""), path)
    execution_run(context, recipe).close()


def _require_made(context: RunContext, part: Part) -> None:
    """Nothing is tried without what it needs: it would fail as that did, or be compared with nothing."""
    for name in part.needs:
        found = ending(Path(context.root), context.part_of, name)
        if found is None:
            raise PartMissingError(f"{name} did not end: its task was lost or never ran")
        if not found.is_finished:
            raise PartMissingError(f"{name} failed: {found.reason}")


def _make_policy(context: RunContext, recipe: Recipe) -> None:
    """Data and policy, whose weights are put where the pods of the other parts find them."""
    data = prepare_data(context, recipe, trains_draft=False)
    policy = prepare_policy(context, recipe, data=data)
    deliver(context, _POLICY_NODE, policy, records=POLICY_RECORDS, weights=(".",))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shared:
    """What a part takes from others."""

    data: Path
    policy: Path
    draft: Path


def _shared(context: RunContext, recipe: Recipe, part: Part, *, with_draft: bool = True) -> _Shared:
    """Data, policy and draft, each made only if nobody did; without a draft the policy stands in for it."""
    data = prepare_data(context, recipe, trains_draft=with_draft)
    policy = _policy(context, part)
    if not with_draft:
        return _Shared(data=data, policy=policy, draft=policy)
    return _Shared(data=data, policy=policy, draft=pretrain_draft(context, recipe, policy=policy, data=data))


def _policy(context: RunContext, part: Part) -> Path:
    """What the policy's part delivered: the same files for every part."""
    whole = Path(context.root) / context.part_of

    def never(name: str, target: Path) -> None:
        raise AssertionError(f"weights {name} lie under the root, not in {target}")

    return assemble(context, whole / part.needs[0] / "deliverables" / _POLICY_NODE, never)


def _train(context: RunContext, recipe: Recipe, part: Part, arm: Arm) -> None:
    shared = _shared(context, recipe, part, with_draft=arm is Arm.SPECULATIVE)
    tuning = shared.data  # the autoregressive arm reads neither draft nor tuning
    if arm is Arm.SPECULATIVE:
        tuning = _tuning(context, recipe, part, shared)
    train_grpo(context, recipe, arm, policy=shared.policy, data=shared.data, draft=shared.draft, tuning=tuning)


def _tuning(context: RunContext, recipe: Recipe, part: Part, shared: _Shared) -> Path:
    """The draft length by measured time, or the one that the grid names, which is not measured before it is used."""
    k = part.variant.setting.num_speculative_tokens
    if not k:
        return tune_draft_length(context, recipe, policy=shared.policy, data=shared.data, draft=shared.draft)
    from slipstream.drafts.compatibility import require_fit

    weights = draft_weights(recipe.draft, shared.draft)
    require_fit(recipe.draft, shared.policy, weights, max_model_len=recipe.engine.max_model_len)
    directory = context.directory("tune_draft_length")
    record = TuningRecord(chosen_k=k, reason=f"k={k} is what the grid asks for", points=(), schedule=())
    write_record(record, directory / "tuning.json")
    return directory
