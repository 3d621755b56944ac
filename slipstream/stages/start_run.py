"""Check the recipe, and open or reopen the run that all other tasks belong to."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from slipstream.config import require
from slipstream.drafts.methods import require_package
from slipstream.kubernetes.flyte_admin import FlyteError, admin_of
from slipstream.kubernetes.profile import LOCAL, ClusterProfile, read_profile, require_fits
from slipstream.recipe import Recipe, difference, load_recipe, parameters, recipe_path, resolve_recipe, write_recipe
from slipstream.rewards.function import kept, open_reward, write_kept
from slipstream.stages.context import (
    RunContext,
    recorded_arms,
    recorded_recipe,
    require_arms,
    require_loop,
    started_by,
    write_arms,
)
from slipstream.stages.fail_run import reconcile
from slipstream.stages.runs import NOTE, alone_on, execution_run, flyte_execution, origin_tags, started_text
from slipstream.tracking.spool import RunStatus
from slipstream.types import Arm, ArmLoop, Arms

logger = logging.getLogger(__name__)


def start_run(  # noqa: PLR0913  # one input a line of the launch
    recipe_name: str,
    *,
    root: Path,
    execution: str,
    overrides: Mapping[str, Any],
    resume: bool = False,
    reuse_stored: bool = True,
    cluster: ClusterProfile | None = None,
    loop: ArmLoop | None = None,
    arms: Arms = Arms.BOTH,
) -> tuple[RunContext, Path]:
    """Check the whole recipe before anything expensive starts, write it out in full, and open the parent run.

    Args:
        resume: continue in the directory of `execution`, which must have been started with the same recipe and arms.
        reuse_stored: take data, policy and draft from the store where another execution made the same.
        cluster: cluster that the recipe must fit on; None: this machine.
        loop: loop of the workflow's arms; None: the workflow trains no arm, or accepts every recipe.
    """
    root = root.resolve()
    recipe, origins = resolve_recipe(recipe_name, overrides=overrides)
    if loop is not None:
        require_loop(recipe, loop)
        require_arms(recipe, arms)
    cluster = cluster or read_profile(LOCAL)
    tracked, recipe = recipe.tracking, on_cluster(recipe, cluster)
    origins |= {} if recipe.tracking == tracked else {"tracking.uri": f"cluster {cluster.name}"}
    if Arm.SPECULATIVE in arms.members and cluster.is_local:  # pods have another image, where pretraining checks this
        require_package(recipe.draft.method)
    end_terminated(root, cluster)
    context = RunContext(execution=execution, root=str(root), reuse_stored=reuse_stored, arms=arms.value)
    path = recorded_recipe(root, execution)
    with open_reward(recipe.reward):
        """A function that cannot be called is an error here."""
    own, recipe = recipe.reward, replace(recipe, reward=kept(recipe.reward, path.parent))
    if resume:
        _require_same(recipe, arms, root, execution)
        _require_ended(root, execution, cluster)
    write_kept(own, recipe.reward)
    is_recorded = recipe_path(recipe_name).resolve() == path  # the recorded file already has the origin of each value
    resolved = path if is_recorded else write_recipe(recipe, path, origins)
    tags = {**origin_tags(), NOTE: started_text(recipe, execution)}
    params = parameters(recipe) | ({} if loop is None else {"arms": arms.value})
    with alone_on(cluster, root, execution):
        write_arms(root, execution, arms, flyte_execution=flyte_execution())
        tracker = execution_run(context, recipe, tags, params)
    try:
        tracker.log_artifact(resolved)
    except BaseException as error:
        tracker.close(RunStatus.of_error(type(error)))
        raise
    tracker.detach()
    for warning in memory.warnings() if (memory := recipe.memory()) else ():
        logger.warning("memory: %s", warning)
    what = (execution, "resumes" if resume else "starts", recipe.name, recipe.workload.value, arms.value)
    logger.info("run %s %s: recipe %s, workload %s, arms %s", *what)
    return context, resolved


def end_terminated(root: Path, cluster: ClusterProfile) -> None:
    """End the runs of executions that were terminated, where the profile names Flyte's server; never fail by it."""
    if cluster.is_local:
        return
    if cluster.flyte.endpoint is None:
        logger.info("runs of terminated executions stay open: profile %s names no flyte.endpoint", cluster.name)
        return
    try:
        reconcile(root, admin_of(cluster))
    except FlyteError as error:
        logger.warning("runs of terminated executions stay open: %s", error)


def _require_ended(root: Path, execution: str, cluster: ClusterProfile) -> None:
    """Refuse to resume an execution that still runs, where the profile names Flyte's server: two would write its files.

    On one machine `slipstream run` holds a lock on the execution.
    """
    by = started_by(root, execution)
    if cluster.is_local or cluster.flyte.endpoint is None or by == flyte_execution():
        return
    try:
        state = admin_of(cluster).execution(by)
    except FlyteError as error:
        logger.warning("whether %s has ended is not known: %s", by, error)
        return
    rule = "must name an execution that has ended"
    is_over = state is None or state.has_ended
    require(is_over, "resume_execution", rule, execution, f"terminate {by} in Flyte, or wait for its end")


def on_cluster(recipe: Recipe, cluster: ClusterProfile) -> Recipe:
    """Set the cluster's tracking server in a recipe that names none; one that the nodes cannot hold is refused."""
    if cluster.is_local:
        return recipe
    require_fits(
        cluster,
        nodes=recipe.placement.nodes,
        gpus_per_node=recipe.placement.gpus_per_node,
        trains_from_scratch=recipe.policy.scratch is not None,
    )
    if cluster.tracking is None or recipe.tracking.uri is not None:
        return recipe
    return replace(recipe, tracking=replace(recipe.tracking, uri=cluster.tracking.uri))


def _require_same(recipe: Recipe, arms: Arms, root: Path, execution: str) -> None:
    """Refuse to resume with another recipe or other arms: stages that are finished belong to the first ones."""
    recorded = recorded_recipe(root, execution)
    require(recorded.is_file(), "resume_execution", f"must name an execution under {root}", execution, "see its names")
    both_arms = "arms", arms.value, recorded_arms(root, execution).value
    name, got, first = difference(recipe, load_recipe(str(recorded))) or both_arms
    rule, fix = f"must be {first!r}, with which {execution} was started", "give it that value, or start a new execution"
    require(got == first, name, rule, got, fix)
