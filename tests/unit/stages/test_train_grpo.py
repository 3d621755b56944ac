"""The labels of an arm's run are true for that arm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.config import ConfigError
from slipstream.drafts.length import DraftLength
from slipstream.drafts.methods import DraftSampling
from slipstream.recipe import Recipe, load_recipe, parameters
from slipstream.records.files import read_record, write_record
from slipstream.records.stages import TuningRecord
from slipstream.records.steps import ArmRecord, ScheduleEntry
from slipstream.stages import train_grpo as stage
from slipstream.stages.certify_losslessness import tuned_length
from slipstream.stages.context import RunContext, arm_node
from slipstream.stages.recipe_engines import draft_length
from slipstream.stages.train_grpo import arm_labels, in_loop, steps_a_turn
from slipstream.train.arm import ArmPlan
from slipstream.train.turns import Turn
from slipstream.types import Arm, ArmLoop
from tests.unit.lagging import ONE_STEP_OFF
from tests.unit.stages.tuned import tuned


def test_an_arm_that_drafts_is_labelled_with_its_k_and_the_recipes_draft() -> None:
    assert arm_labels(load_recipe("tiny"), Arm.SPECULATIVE, DraftLength(num_speculative_tokens=5)) == {
        "arm": "speculative",
        "k": "5",
        "loop": "synchronous",
        "max_off_policy_steps": "0",
        "draft.method": "eagle3",
        "draft.init": "in_domain",
        "draft.sampling": "probabilistic",
    }


def test_an_arm_is_labelled_with_the_drafts_that_tuning_chose_and_with_none_that_are_looked_up() -> None:
    length = DraftLength(num_speculative_tokens=5, sampling=DraftSampling.GREEDY)
    auto = load_recipe("tiny", overrides={"draft": {"sampling": "auto"}})
    assert arm_labels(auto, Arm.SPECULATIVE, length)["draft.sampling"] == "greedy"
    ngram = load_recipe("tiny", overrides={"draft": {"method": "ngram"}})
    assert arm_labels(ngram, Arm.SPECULATIVE, DraftLength(num_speculative_tokens=5))["draft.sampling"] == "none"


@pytest.mark.parametrize("asked", ["auto", "greedy"])
def test_an_arm_and_its_certificate_take_the_drafts_of_the_tuning_record_at_every_attempt(
    tmp_path: Path, asked: str
) -> None:
    recipe = load_recipe("tiny", overrides={"draft": {"sampling": asked}})
    record = TuningRecord(chosen_k=3, reason="", points=(), schedule=(), sampling="greedy")
    write_record(record, tmp_path / "tuning.json")
    greedy = DraftLength(num_speculative_tokens=3, sampling=DraftSampling.GREEDY)
    for _ in range(2):
        length = draft_length(recipe, tmp_path)
        assert length == greedy
        plan = stage.arm_plan(recipe, Arm.SPECULATIVE, policy=tmp_path, draft=tmp_path, length=length)
        started: Any = plan.start_engine
        assert started.args[0].draft.sampling is DraftSampling.GREEDY
    assert tuned_length(recipe, tmp_path) == greedy
    write_record(replace(record, chosen_k=0), tmp_path / "tuning.json")
    assert tuned_length(recipe, tmp_path).sampling is DraftSampling.GREEDY


def test_an_arm_without_drafts_has_none_also_where_speculation_lost() -> None:
    recipe = load_recipe("tiny")
    for arm in Arm:
        labels = arm_labels(recipe, arm, DraftLength(num_speculative_tokens=0))
        assert labels == {
            "arm": arm.value,
            "k": "0",
            "loop": "synchronous",
            "max_off_policy_steps": "0",
            "draft.method": "none",
            "draft.init": "none",
            "draft.sampling": "none",
        }
        own = {"draft.method", "draft.init", "draft.sampling"}
        assert {name for name in labels if name in parameters(recipe)} == own


def test_the_arms_of_both_loops_share_neither_node_nor_policy_nor_labels() -> None:
    recipe = load_recipe("tiny", overrides=ONE_STEP_OFF)
    each = [(arm, loop) for loop in ArmLoop for arm in Arm]
    assert [arm_node(*one) for one in each] == [
        "train_grpo_autoregressive",
        "train_grpo_speculative",
        "train_grpo_autoregressive_asynchronous",
        "train_grpo_speculative_asynchronous",
    ]
    length = DraftLength(num_speculative_tokens=0)
    labels = [tuple(arm_labels(in_loop(recipe, loop), arm, length).values()) for arm, loop in each]
    assert len(set(labels)) == 4


def test_the_synchronous_arm_of_an_asynchronous_recipe_is_that_of_the_recipe_without_the_loop() -> None:
    plain = load_recipe("tiny", overrides={"grpo": ONE_STEP_OFF["grpo"]})
    recipe = load_recipe("tiny", overrides=ONE_STEP_OFF)
    assert in_loop(recipe, ArmLoop.SYNCHRONOUS) == plain
    assert in_loop(recipe, ArmLoop.ASYNCHRONOUS) is recipe
    assert arm_labels(recipe, Arm.SPECULATIVE, DraftLength(num_speculative_tokens=5))["loop"] == "one_step_off"
    with pytest.raises(ConfigError, match="must be one_step_off or in_flight here, got 'synchronous'"):
        in_loop(plain, ArmLoop.ASYNCHRONOUS)


def test_an_arm_that_drafts_by_the_running_batch_says_so() -> None:
    schedule = tuple(
        ScheduleEntry(batch_from=start, batch_to=end, num_speculative_tokens=k)
        for start, end, k in ((1, 8, 5), (9, 48, 2))
    )
    length = DraftLength(num_speculative_tokens=5, schedule=schedule)
    assert arm_labels(load_recipe("tiny"), Arm.SPECULATIVE, length)["k"] == "by_batch"


def test_what_is_certified_is_what_trained_or_the_longest_draft_that_lost(tmp_path: Path) -> None:
    by_batch = load_recipe("tiny", overrides={"draft": {"length": "by_batch"}})
    tuning = tuned(tmp_path, (1, 8, 5), (9, 48, 2))
    assert tuned_length(by_batch, tuning) == draft_length(by_batch, tuning)
    write_record(TuningRecord(chosen_k=0, reason="lost", points=(), schedule=()), tmp_path / "tuning.json")
    assert tuned_length(by_batch, tmp_path) == DraftLength(num_speculative_tokens=11)


@dataclass
class Trained:
    """In the place of `train`: arms that take three steps each, and note them."""

    steps: list[str] = field(default_factory=list)
    validated: list[Any] = field(default_factory=list)
    fails: Arm | None = None

    def __call__(self, recipe: Recipe, plan: ArmPlan, *, turn: Turn | None, **_: Any) -> ArmRecord:
        for step in range(3):
            if turn is not None:
                turn.begin(step)
            if plan.arm is self.fails and step == 1:
                raise ValueError("no memory")
            self.steps.append(f"{plan.arm[0]}{step}")
        self.validated.append(plan.validation)
        return ArmRecord(arm=plan.arm, num_speculative_tokens=plan.num_speculative_tokens, steps=())


class FakeRun:
    def __init__(self, fake: Trained, *, directory: Path, **given: Any) -> None:
        self.directory = directory
        self.train = partial(fake, **given)


class Process:
    """An idle one, of a stage before."""

    def __init__(self, closed: list[str], name: str) -> None:
        self._closed, self._name = closed, name

    def close(self) -> None:
        self._closed.append(self._name)


Train = Callable[..., tuple[Trained, list[str]]]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Train:
    """Trains both arms of a recipe with fakes around them; what they did, and how their MLflow runs ended."""
    write_record(TuningRecord(chosen_k=2, reason="told so", points=(), schedule=()), tmp_path / "tuning.json")

    def run(overrides: dict[str, Any], *, fails: Arm | None = None) -> tuple[Trained, list[str]]:
        fake, runs = Trained(fails=fails), list[str]()

        @contextmanager
        def tracked(context: RunContext, recipe: Recipe, node: str, *_: Any, **__: Any) -> Iterator[Any]:
            try:
                yield SimpleNamespace(log=None, log_artifact=lambda path: None)
            except BaseException as error:
                runs.append(f"{node}: {type(error).__name__}")
                raise
            runs.append(node)

        for name in ("connect", "accelerators", "decode", "tokenizer"):
            monkeypatch.setattr(stage, name, lambda *_: {})
        monkeypatch.setattr(stage, "versions", lambda: {"vllm": "1"})
        monkeypatch.setattr(
            stage, "read_prompt_sets", lambda data: SimpleNamespace(train=(), validation=("a problem",))
        )
        monkeypatch.setattr(stage, "tracked", tracked)
        monkeypatch.setattr(stage, "Run", partial(FakeRun, fake))
        context = RunContext(execution="e", root=str(tmp_path), experiment="x", workload="rl_zero")
        recipe = load_recipe(
            "tiny", overrides={"learner": {"dtype": "float32"}, "engine": {"dtype": "float32"}, **overrides}
        )
        with suppress(ValueError):
            stage.train_grpo(
                context, recipe, list(Arm), policy=tmp_path, data=tmp_path, draft=tmp_path, tuning=tmp_path
            )
        return fake, runs

    return run


def test_arms_take_turns_and_their_records_have_the_packages_of_their_machine(trained: Train, tmp_path: Path) -> None:
    fake, runs = trained({})
    assert fake.steps == ["a0", "s0", "s1", "a1", "a2", "s2"]
    assert fake.validated == [("a problem",)] * 2
    assert sorted(runs) == ["train_grpo_autoregressive", "train_grpo_speculative"]
    for arm in Arm:
        assert read_record(ArmRecord, tmp_path / "e" / arm_node(arm) / "arm.json").versions == {"vllm": "1"}


def test_without_turns_one_arm_is_trained_after_the_other(trained: Train) -> None:
    fake, _ = trained({"placement": {"arms_in_turn": "off"}})
    assert fake.steps == ["a0", "a1", "a2", "s0", "s1", "s2"]


def test_an_arm_that_fails_ends_the_other_at_its_next_turn_and_both_runs(trained: Train) -> None:
    fake, runs = trained({}, fails=Arm.SPECULATIVE)
    assert fake.steps == ["a0", "s0"]
    assert sorted(runs) == ["train_grpo_autoregressive: ValueError", "train_grpo_speculative: ValueError"]


def test_a_retry_trains_what_is_not_done(trained: Train) -> None:
    trained({"placement": {"arms_in_turn": "off"}}, fails=Arm.SPECULATIVE)
    fake, runs = trained({})
    assert fake.steps == ["s0", "s1", "s2"]
    assert runs == ["train_grpo_speculative"]


@pytest.mark.parametrize("arms_in_turn", ["on", "off"])
def test_no_arm_starts_with_a_process_of_an_earlier_stage(
    trained: Train, monkeypatch: pytest.MonkeyPatch, arms_in_turn: str
) -> None:
    closed: list[str] = []
    for name, idle in (("engine", stage.idle_engines), ("learner", stage.idle_learners)):
        process: Any = Process(closed, name)
        idle.put("key", process, capacity=1)
    trained({"placement": {"arms_in_turn": arms_in_turn}})
    assert closed == ["engine", "learner"]


def test_engines_that_never_stop_are_trained_alone_and_overlapping_ones_take_longer_turns() -> None:
    assert steps_a_turn(load_recipe("tiny")) == 1
    assert steps_a_turn(load_recipe("tiny_async")) >= 8
    in_flight = {"mode": "in_flight", "max_off_policy_steps": 1}
    assert steps_a_turn(load_recipe("tiny_async", overrides={"loop": in_flight})) == 0
    assert steps_a_turn(load_recipe("qwen3_8b")) == 0
