"""Runs that die in the middle: nothing is lost, and what goes on from the checkpoint equals what never stopped."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from slipstream.learner.checkpoint import CheckpointError
from slipstream.recipe import Recipe, load_recipe
from slipstream.records.steps import ArmRecord
from slipstream.tracking.config import TrackingConfig
from slipstream.tracking.replay import replay
from slipstream.tracking.tracker import Tracker
from tests.faults.test_killed_drivers import Mortal
from tests.small import RECIPE as SMALL
from tests.small import train_arm

pytestmark = pytest.mark.slow


class Killed(Exception):  # noqa: N818  # stands for the end of the process
    """The driver dies here."""


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return load_recipe("tiny", overrides=SMALL)


@pytest.fixture(scope="module")
def whole(
    tmp_path_factory: pytest.TempPathFactory, ray_session: None, recipe: Recipe, policy: Path
) -> tuple[ArmRecord, Path]:
    """A run that nothing disturbs but a tracking server that is down, and its directory."""
    directory = tmp_path_factory.mktemp("whole")
    down = TrackingConfig(uri="http://127.0.0.1:9", replay_every_s=0.1)
    with Tracker(down, root=directory, experiment="tiny", key="e/train", name="train") as tracker:
        return train_arm(recipe, policy, directory, log=tracker.log), directory


def assert_equal(resumed: ArmRecord, whole: ArmRecord) -> None:
    assert [step.step for step in resumed.steps] == [0, 1, 2, 3]
    for ours, theirs in zip(resumed.steps, whole.steps, strict=True):
        assert (ours.train, ours.mismatch, ours.reward_mean) == (theirs.train, theirs.mismatch, theirs.reward_mean)
        assert ours.num_response_tokens == theirs.num_response_tokens
    assert any(step.train.grad_norm > 0 for step in whole.steps), "some step must have learned something"


def trained_policy(directory: Path) -> bytes:
    return (directory / "policy" / "model.safetensors").read_bytes()


def dies_at(last: int) -> Callable[[Mapping[str, float], int], None]:
    """A log at whose step the driver dies: the update is made, and not yet saved."""

    def log(metrics: Mapping[str, float], step: int) -> None:
        if step == last:
            raise Killed

    return log


def test_a_run_whose_engine_is_killed_while_it_generates_goes_on_with_another_and_ends_equal(
    tmp_path: Path, recipe: Recipe, policy: Path, whole: tuple[ArmRecord, Path], caplog: pytest.LogCaptureFixture
) -> None:
    record = train_arm(recipe, policy, tmp_path, within=partial(Mortal, death=("generate", 4)))
    assert_equal(record, whole[0])
    assert [step.num_engine_restarts for step in record.steps] == [0, 0, 0, 1]
    assert re.search(r"engine 0 on [\d.]+ died during generate with policy version 3", caplog.text)


def test_a_run_that_dies_between_optimizer_step_and_checkpoint_repeats_that_step_alike(
    tmp_path: Path, recipe: Recipe, policy: Path, whole: tuple[ArmRecord, Path]
) -> None:
    with pytest.raises(Killed):
        train_arm(recipe, policy, tmp_path, log=dies_at(3))  # the last checkpoint is that of step 2
    again: list[int] = []
    resumed = train_arm(recipe, policy, tmp_path, log=lambda metrics, step: again.append(step))
    assert again == [2, 3]
    assert_equal(resumed, whole[0])


def test_a_run_whose_learner_is_killed_between_optimizer_step_and_checkpoint_repeats_that_step_alike(
    tmp_path: Path, recipe: Recipe, policy: Path, whole: tuple[ArmRecord, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray
    from ray.exceptions import RayActorError

    from slipstream.train import arm
    from slipstream.workers.learners import RemoteLearner

    learners: list[RemoteLearner] = []
    genuine = arm.start_learner

    @contextmanager
    def noted(config: Any, **where: Any) -> Iterator[RemoteLearner]:
        with genuine(config, **where) as learner:
            learners.append(learner)
            yield learner

    def log(metrics: Mapping[str, float], step: int) -> None:
        if step == 3 and len(learners) == 1:  # updated; the checkpoint would come next
            rank = learners[0].workers[0].actor
            ray.kill(rank)  # asks only: the loop goes on when it is dead
            with pytest.raises(RayActorError):
                while True:
                    ray.get(rank.__ray_ready__.remote())

    monkeypatch.setattr(arm, "start_learner", noted)
    assert_equal(train_arm(recipe, policy, tmp_path, log=log), whole[0])
    assert len(learners) == 2


def regenerated(record: ArmRecord) -> list[int]:
    return [step.overlap.num_regenerated for step in record.steps if step.overlap is not None]


def test_one_step_off_ends_equal_after_the_driver_or_an_engine_died(
    tmp_path: Path, policy: Path, ray_session: None, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine dies in the batch of step 2, while the learner has left version 1; the driver after step 3 of 4."""
    grpo = {**SMALL["grpo"], "loss": {"correction": "token", "truncated_importance_sampling": 2.0}}
    loop = {"mode": "one_step_off", "max_off_policy_steps": 1}
    recipe = load_recipe("tiny", overrides={**SMALL, "loop": loop, "grpo": grpo})
    caplog.set_level("INFO")
    undisturbed = train_arm(recipe, policy, tmp_path / "whole")
    assert "2 workers share the" in caplog.text
    assert [step.policy_version for step in undisturbed.steps] == [0, 0, 1, 2]

    replaced = train_arm(recipe, policy, tmp_path / "replaced", within=partial(Mortal, death=("generate", 3)))
    assert_equal(replaced, undisturbed)
    assert trained_policy(tmp_path / "replaced") == trained_policy(tmp_path / "whole")
    assert regenerated(replaced) == [0, 0, 8, 0]

    with pytest.raises(Killed):
        train_arm(recipe, policy, tmp_path / "resumed", log=dies_at(3))
    resumed = train_arm(recipe, policy, tmp_path / "resumed")
    assert_equal(resumed, undisturbed)
    assert trained_policy(tmp_path / "resumed") == trained_policy(tmp_path / "whole")
    assert regenerated(resumed) == [0, 0, 8, 0]  # the checkpoint after step 2 has the batch of step 3 of 4 alone


def test_a_tracking_server_that_is_down_for_the_whole_run_gets_every_point_when_it_comes_back(
    whole: tuple[ArmRecord, Path],
) -> None:
    """The runs that others hold against this one had no server."""
    from mlflow.tracking import MlflowClient

    record, directory = whole
    uri = f"sqlite:///{directory / 'mlflow.db'}"
    replay(directory, uri)
    client = MlflowClient(uri)
    (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    points = sorted((p.step, p.value) for p in client.get_metric_history(run.info.run_id, "train/loss"))
    assert points == [(step.step, step.train.loss) for step in record.steps]


def test_a_checkpoint_of_another_recipe_is_refused(recipe: Recipe, policy: Path, whole: tuple[ArmRecord, Path]) -> None:
    other = replace(recipe, grpo=replace(recipe.grpo, seed=recipe.grpo.seed + 1))
    with pytest.raises(CheckpointError, match="must be of this run's recipe, got another one's"):
        train_arm(other, policy, whole[1])


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_it(
    caplog: pytest.LogCaptureFixture, recipe: Recipe, policy: Path, whole: tuple[ArmRecord, Path]
) -> None:
    """The newest checkpoint has a flipped bit; then both are cut short."""
    record, directory = whole
    older, newest = sorted((directory / "checkpoints").glob("step-??????"))
    file = next(newest.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)

    resumed = train_arm(recipe, policy, directory)

    assert "is damaged" in caplog.text
    assert newest.name in caplog.text
    assert_equal(resumed, record)
    for checkpoint in (older, newest):
        file = next(checkpoint.glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="no checkpoint can be resumed from; remove them to start anew"):
        train_arm(recipe, policy, directory)
