"""Runs that die in the middle: nothing is lost, and what goes on from the checkpoint equals what never stopped."""

from __future__ import annotations

import os
import re
import signal
import threading
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
from tests.small import RECIPE as SMALL
from tests.small import additions, train_arm

pytestmark = pytest.mark.slow


class Killed(Exception):  # noqa: N818  # stands for the end of the process
    """The driver dies here."""


class MortalEngine:
    """The engine; its process is killed while it owes one generation."""

    def __init__(self, engine: Any, dies_at_call: int) -> None:
        self._engine, self._calls_left = engine, dies_at_call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        import ray

        self._calls_left -= 1
        if self._calls_left == 0:
            pid: Any = ray.get(self._engine.workers[0].actor.__ray_call__.remote(lambda _: os.getpid()))
            os.kill(pid, signal.SIGSTOP)  # so that it cannot be done before it is killed
            threading.Timer(0.1, os.kill, [pid, signal.SIGKILL]).start()
        return self._engine.generate(*args, **kwargs)


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return load_recipe("tiny", overrides=SMALL)


@pytest.fixture(scope="module")
def whole(
    tmp_path_factory: pytest.TempPathFactory, ray_session: None, recipe: Recipe, policy: Path
) -> tuple[ArmRecord, Path]:
    directory = tmp_path_factory.mktemp("whole")
    return train_arm(recipe, policy, directory), directory


def assert_equal(resumed: ArmRecord, whole: ArmRecord) -> None:
    assert [step.step for step in resumed.steps] == [0, 1, 2, 3]
    for ours, theirs in zip(resumed.steps, whole.steps, strict=True):
        assert (ours.train, ours.mismatch, ours.reward_mean) == (theirs.train, theirs.mismatch, theirs.reward_mean)
        assert ours.num_response_tokens == theirs.num_response_tokens
    assert any(step.train.grad_norm > 0 for step in whole.steps), "some step must have learned something"


def trained_policy(directory: Path) -> dict[str, bytes]:
    """The bytes of every tensor of the policy that a run ended with."""
    from safetensors.numpy import load_file

    return {name: array.tobytes() for name, array in load_file(directory / "policy" / "model.safetensors").items()}


def without_restarts(recipe: Recipe) -> Recipe:
    return replace(
        recipe, engine=replace(recipe.engine, max_restarts=0), learner=replace(recipe.learner, max_restarts=0)
    )


def test_a_run_whose_engine_is_killed_while_it_generates_goes_on_with_another_and_ends_equal(
    tmp_path: Path, recipe: Recipe, policy: Path, whole: tuple[ArmRecord, Path], caplog: pytest.LogCaptureFixture
) -> None:
    record = train_arm(recipe, policy, tmp_path, within=partial(MortalEngine, dies_at_call=4))

    assert_equal(record, whole[0])
    assert [step.num_engine_restarts for step in record.steps] == [0, 0, 0, 1]
    assert re.search(r"engine 0 on [\d.]+ died during generate with policy version 3", caplog.text)


def test_a_run_that_may_replace_no_engine_stops_when_one_is_killed_and_resumes(
    tmp_path: Path, recipe: Recipe, policy: Path, whole: tuple[ArmRecord, Path]
) -> None:
    from slipstream.workers.calls import LostWorkerError

    with pytest.raises(LostWorkerError, match=r"engine 0 on [\d.]+ died during generate with policy version 3"):
        train_arm(without_restarts(recipe), policy, tmp_path, within=partial(MortalEngine, dies_at_call=4))

    assert_equal(train_arm(recipe, policy, tmp_path), whole[0])


def test_a_run_that_dies_between_optimizer_step_and_checkpoint_repeats_that_step_alike(
    tmp_path: Path, recipe: Recipe, policy: Path, whole: tuple[ArmRecord, Path]
) -> None:
    def log(metrics: Mapping[str, float], step: int) -> None:
        if step == 3:  # updated, not yet saved: the last checkpoint is that of step 2
            raise Killed

    with pytest.raises(Killed):
        train_arm(recipe, policy, tmp_path, log=log)
    again: list[int] = []

    resumed = train_arm(recipe, policy, tmp_path, log=lambda metrics, step: again.append(step))

    assert again == [2, 3]
    assert_equal(resumed, whole[0])


def test_a_run_whose_learner_is_killed_between_optimizer_step_and_checkpoint_repeats_that_step_alike(
    tmp_path: Path,
    recipe: Recipe,
    policy: Path,
    whole: tuple[ArmRecord, Path],
    monkeypatch: pytest.MonkeyPatch,
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


CORRECTED = {**SMALL["grpo"], "loss": {"correction": "token", "truncated_importance_sampling": 2.0}}


def one_step_off(lag: int) -> Recipe:
    loop = {"mode": "one_step_off", "max_off_policy_steps": lag}
    return load_recipe("tiny", overrides={**SMALL, "loop": loop, **({"grpo": CORRECTED} if lag else {})})


def regenerated(record: ArmRecord) -> list[int]:
    return [step.overlap.num_regenerated for step in record.steps if step.overlap is not None]


def test_one_step_off_ends_equal_after_the_driver_or_an_engine_died(
    tmp_path: Path, policy: Path, ray_session: None, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine dies in the batch of step 2, while the learner has left version 1; the driver after step 3 of 4."""
    recipe = one_step_off(1)
    caplog.set_level("INFO")
    undisturbed = train_arm(recipe, policy, tmp_path / "whole")
    assert "2 workers share the" in caplog.text
    assert [step.policy_version for step in undisturbed.steps] == [0, 0, 1, 2]

    def log(metrics: Mapping[str, float], step: int) -> None:
        if step == 3:
            raise Killed

    replaced = train_arm(recipe, policy, tmp_path / "replaced", within=partial(MortalEngine, dies_at_call=3))
    assert_equal(replaced, undisturbed)
    assert trained_policy(tmp_path / "replaced") == trained_policy(tmp_path / "whole")
    assert regenerated(replaced) == [0, 0, 8, 0]

    with pytest.raises(Killed):
        train_arm(recipe, policy, tmp_path / "resumed", log=log)
    resumed = train_arm(recipe, policy, tmp_path / "resumed")
    assert_equal(resumed, undisturbed)
    assert trained_policy(tmp_path / "resumed") == trained_policy(tmp_path / "whole")
    assert regenerated(resumed) == [0, 0, 8, 0]  # the checkpoint after step 2 has the batch of step 3 of 4 alone


def test_a_tracking_server_that_is_down_for_the_whole_run_gets_every_point_when_it_comes_back(
    tmp_path: Path, recipe: Recipe, policy: Path, whole: tuple[ArmRecord, Path]
) -> None:
    from mlflow.tracking import MlflowClient

    from slipstream.tracking.config import TrackingConfig
    from slipstream.tracking.replay import replay
    from slipstream.tracking.spool import spool_directory
    from slipstream.tracking.tracker import Tracker

    down = TrackingConfig(uri="http://127.0.0.1:9", replay_every_s=0.1)
    with Tracker(down, root=tmp_path, experiment="tiny", key="e/train", name="train") as tracker:
        record = train_arm(recipe, policy, tmp_path / "arm", log=tracker.log)
    assert_equal(record, whole[0])

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    replay(spool_directory(tmp_path), uri)

    client = MlflowClient(uri)
    runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert len(runs) == 1
    points = client.get_metric_history(runs[0].info.run_id, "train/loss")
    assert [(p.step, p.value) for p in sorted(points, key=lambda p: p.step)] == [
        (step.step, step.train.loss) for step in whole[0].steps
    ]


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


def test_a_checkpoint_of_another_recipe_is_refused(
    tmp_path: Path, recipe: Recipe, policy: Path, whole: tuple[ArmRecord, Path]
) -> None:
    short = replace(recipe, grpo=replace(recipe.grpo, num_steps=2))
    train_arm(short, policy, tmp_path)  # the same recipe, only shorter
    other = replace(recipe, grpo=replace(recipe.grpo, seed=recipe.grpo.seed + 1))

    with pytest.raises(CheckpointError, match="must be of this run's recipe, got another one's"):
        train_arm(other, policy, tmp_path)


def test_draft_pretraining_that_dies_goes_on_from_its_checkpoint_and_ends_equal(
    tmp_path: Path, policy: Path, ray_session: None
) -> None:
    from safetensors.torch import load_file

    from slipstream.stages.pretrain_draft import train_on

    draft = {
        "num_prompts": 12,
        "num_heldout_prompts": 4,
        "num_steps": 6,
        "checkpoint_every_steps": 2,
        "tokens_per_step": 128,
    }
    recipe = load_recipe("tiny", overrides={**SMALL, "draft": {"pretrain": draft}})
    prompts = additions(policy, num=16, addend=2)

    def dies_at(last: int) -> Callable[[int, float], None]:
        def on_step(step: int, loss: float) -> None:
            if step == last:
                raise Killed

        return on_step

    whole = train_on(prompts, recipe, policy=policy, directory=tmp_path / "whole", on_step=dies_at(-1))
    with pytest.raises(Killed):
        train_on(prompts, recipe, policy=policy, directory=tmp_path / "torn", on_step=dies_at(4))
    again: list[int] = []
    resumed = train_on(
        prompts, recipe, policy=policy, directory=tmp_path / "torn", on_step=lambda step, loss: again.append(step)
    )

    assert again == [4, 5]
    assert resumed.losses == whole.losses
    assert resumed.heldout_rate_by_position == whole.heldout_rate_by_position
    files = [next((tmp_path / name / "draft").glob("*.safetensors")) for name in ("torn", "whole")]
    torn, untorn = (load_file(file) for file in files)
    assert torn.keys() == untorn.keys()
    assert all(bool((torn[name] == untorn[name]).all()) for name in torn)
