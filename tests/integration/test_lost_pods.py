"""Tasks that lose an engine, the learner and their own pod, one an attempt, and end as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import ray

from slipstream.records.files import write_record
from slipstream.records.stages import TuningRecord
from slipstream.stages.context import RunContext
from slipstream.tracking.replay import replay
from slipstream.types import Arm, ArmLoop, Arms
from tests.integration.pods import Cluster, Running, Watcher, cluster, ray_processes, says
from tests.integration.small_recipe import write_small_recipe

pytestmark = pytest.mark.slow

_WHOLE, _TORN = "fwhole", "ftorn"
_ARM = "train_grpo_autoregressive"  # it takes the last of four steps in turn
_SUMS = {"num_train_problems": 40, "num_draft_rows": 60, "min_terms": 2, "max_terms": 3}
_RECIPE: dict[str, Any] = {
    # A loss is not mended within the attempt: it ends it, and the next one goes on.
    "engine": {"max_restarts": 0, "dtype": "float32"},
    "learner": {"max_restarts": 0, "dtype": "float32"},
    "grpo": {"num_steps": 4, "prompts_per_step": 4, "group_size": 4, "checkpoint_every_steps": 2},
    "draft": {"pretrain": {"num_prompts": 12, "num_heldout_prompts": 4, "num_steps": 6, "checkpoint_every_steps": 2}},
    # The policy learns to end, after a number of tokens that differs: so do rewards, without which no step would learn.
    "policy": {"scratch": {"num_steps": 40}},
    "reward": {"overlong": {"buffer_tokens": 28}},
    "sampling": {"max_response_tokens": 32},
    "data": {"synthetic": {**_SUMS, "careless_rate": 0.0}},
    "tracking": {"replay_every_s": 1.0},
}


@dataclass(frozen=True, kw_only=True)
class Chain:
    """A cluster, and the chain on it as far as it is shared: data, policy, and a draft length that was not measured."""

    pods: Cluster
    root: Path
    literals: dict[str, Any]  # of what the tasks take, by the name of their input

    def run(self, task: Any, node: str, *, execution: str, watchers: Sequence[Watcher] = ()) -> Any:
        context = RunContext(execution=execution, root=str(self.root), reuse_stored=False)
        literals = {**self.literals, **_literals(task, context=context)}
        inputs = {name: literals[name] for name in task.python_interface.inputs}
        outputs = replace(self.pods, execution=execution).run(task, inputs, node=node, watchers=watchers)
        (output,) = outputs.values()
        return output

    def record(self, output: Any, name: str) -> dict[str, Any]:
        return json.loads(self.pods.fetched(output)[name])

    def attempts(self, node: str) -> list[str]:
        """Kinds of end of the attempts at a node of the torn execution."""
        found = [attempt for attempt in self.pods.attempts if (attempt.execution, attempt.node) == (_TORN, node)]
        return [attempt.kind for attempt in found]


def _literals(task: Any, **values: Any) -> dict[str, Any]:
    from flytekit.core.context_manager import FlyteContextManager
    from flytekit.core.type_engine import TypeEngine

    types = {name: task.python_interface.inputs[name] for name in values}
    return dict(TypeEngine.dict_to_literal_map(FlyteContextManager.current_context(), values, types).literals)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The chain, and outputs of the torn and of the whole execution."""

    chain: Chain
    drafts: tuple[Any, Any]
    arms: tuple[Any, Any]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, ray_session: None) -> Iterator[Ended]:
    """Data and policy, and with them a draft and an arm that nothing disturbed, and a draft and an arm that lost all.

    Two pods run at a time: each spends its time starting, on one core.
    """
    from tasks.pretrain_draft import pretrain_draft
    from tasks.train_grpo import train_grpo
    from workflows.speculative_rl import speculative_rl

    directory = tmp_path_factory.mktemp("lost")
    root, tuning = directory / "shared", directory / "tuning"
    write_record(TuningRecord(chosen_k=2, reason="not measured", points=(), schedule=()), tuning / "tuning.json")
    recipe = str(write_small_recipe(directory / "smoke.yaml", _RECIPE))
    with cluster(directory / "pods", _WHOLE) as pods, ThreadPoolExecutor(1) as beside:
        pods.ray_address = ray.get_runtime_context().gcs_address
        made = pods.execute(speculative_rl, {"recipe": recipe, "run_root": str(root)}, last="prepare-0-policy")
        literals = {**made["start-run"], **made["prepare-0-data"], **made["prepare-0-policy"]}
        literals |= _literals(train_grpo, tuning=str(tuning), arms=Arms.BOTH, loop=ArmLoop.SYNCHRONOUS)
        chain = Chain(pods=pods, root=root, literals=literals)
        torn_draft = beside.submit(_torn_draft, chain, pretrain_draft)
        whole_draft = chain.run(pretrain_draft, "pretrain-draft", execution=_WHOLE)
        chain = replace(chain, literals={**literals, "draft": whole_draft})
        whole_arms = chain.run(train_grpo, "train", execution=_WHOLE)
        arms = (_torn_arms(chain, train_grpo), whole_arms)
        yield Ended(chain=chain, drafts=(torn_draft.result(), whole_draft), arms=arms)


def _kills(title: str, when: Callable[[Running], bool]) -> Watcher:
    """Kill the process of an engine or a learner in the middle of a call, once `when` is so."""
    actor, _, _ = title.partition(".")

    def watch(pod: Running) -> None:
        known: list[int] = []

        def find() -> bool:
            known.extend(ray_processes(actor, of=pod))
            return bool(known)

        def strike() -> bool:
            busy = [pid for pid in known if says(pid, title)] if when(pod) else []
            for pid in busy:
                os.kill(pid, signal.SIGKILL)
            return bool(busy)

        assert pod.wait_until(find), f"{actor} never started: {pod.pod.log.read_text()[-3000:]}"
        # A call may take a third of a second: few files are read, and often.
        assert pod.wait_until(strike, every_s=0.002), f"{title} never ran: {pod.pod.log.read_text()[-3000:]}"

    return watch


def _kills_all(checkpoint: Path) -> Watcher:
    """Kill learner and pod as soon as `checkpoint` is begun: a cluster of Ray ends with its job."""

    def watch(pod: Running) -> None:
        assert pod.wait_until(lambda: pod.says("resuming ")), pod.pod.log.read_text()[-3000:]
        learners = ray_processes("LearnerProcess", of=pod)
        assert learners
        was_begun = pod.wait_until(checkpoint.is_dir, every_s=0.001)  # it is there for milliseconds
        assert was_begun, f"{checkpoint} was never begun: {pod.pod.log.read_text()[-3000:]}"
        for pid in learners:
            os.kill(pid, signal.SIGKILL)
        pod.kill()

    return watch


def _points(root: Path, node: str, metric: str) -> list[tuple[int, float]]:
    """Steps and values of a metric of the one run that a node of the torn execution has."""
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{root / 'mlflow.db'}"
    replay(root, uri)
    client = MlflowClient(uri)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    (run,) = client.search_runs(experiments, filter_string=f"tags.`slipstream.key` = '{_TORN}/{node}'")
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, metric)
    return sorted((point.step, point.value) for point in history)


def _torn_draft(chain: Chain, task: Any) -> Any:
    checkpoint = chain.root / _TORN / "pretrain_draft" / "checkpoint"
    watchers = (
        _kills("EngineProcess.generate", lambda pod: True),
        _kills("LearnerProcess.draft_step", lambda pod: (checkpoint / "losses.json").is_file()),
        _kills_all(checkpoint / "step-4"),
    )
    return chain.run(task, "pretrain-draft", execution=_TORN, watchers=watchers)


def _torn_arms(chain: Chain, task: Any) -> Any:
    checkpoints = chain.root / _TORN / _ARM / "checkpoints"
    watchers = (
        _kills("EngineProcess.generate", lambda pod: (checkpoints / "step-000002").is_dir()),
        _kills("LearnerProcess.train_step", lambda pod: pod.says("step 3/4")),
        _kills_all(checkpoints / "step-000004.partial"),
    )
    return chain.run(task, "train", execution=_TORN, watchers=watchers)


def test_a_draft_outlives_its_engine_its_learner_and_its_pod(ended: Ended) -> None:
    assert ended.chain.attempts("pretrain-draft") == ["RECOVERABLE", "RECOVERABLE", "LOST", ""]
    torn, whole = (ended.chain.record(output, "draft.json") for output in ended.drafts)
    assert len(set(whole["losses"])) == 6
    assert torn["losses"] == whole["losses"]
    assert torn["heldout_rate_by_position"] == whole["heldout_rate_by_position"]
    drafts = [ended.chain.root / name / "pretrain_draft" / "draft" for name in (_TORN, _WHOLE)]
    torn_bytes, whole_bytes = (next(draft.glob("*.safetensors")).read_bytes() for draft in drafts)
    assert torn_bytes == whole_bytes
    assert _points(ended.chain.root, "pretrain_draft", "draft/loss") == list(enumerate(whole["losses"]))


@pytest.mark.parametrize("arm", [0, 1], ids=list(Arm))
def test_arms_in_turn_outlive_their_engine_their_learner_and_their_pod(ended: Ended, arm: int) -> None:
    assert ended.chain.attempts("train") == ["RECOVERABLE", "RECOVERABLE", "LOST", ""]
    torn, whole = (ended.chain.record(arms.collection.literals[arm], "arm.json") for arms in ended.arms)
    assert torn["steps_a_turn"] == whole["steps_a_turn"] == 1
    torn, whole = torn["steps"], whole["steps"]
    assert all(step["train"]["grad_norm"] > 0 for step in whole), "every step must have learned something"
    for ours, theirs in zip(torn, whole, strict=True):
        for field in ("step", "train", "mismatch", "reward_mean", "num_response_tokens"):
            assert ours[field] == theirs[field]
    losses = [(step["step"], step["train"]["loss"]) for step in whole]
    node = f"train_grpo_{list(Arm)[arm]}"
    assert _points(ended.chain.root, node, "train/loss") == losses
    assert [step for step, _ in _points(ended.chain.root, node, "time/step_s")] == [0, 1, 2, 3]
