"""The labels of an arm's run are true for that arm."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
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
from slipstream.records.stages import DraftRecord
from slipstream.records.steps import ArmRecord
from slipstream.stages import train_grpo as stage
from slipstream.stages.certify_losslessness import tuned_length
from slipstream.stages.context import RunContext, arm_node
from slipstream.stages.recipe_engines import draft_length
from slipstream.stages.train_grpo import arm_labels, in_loop, steps_a_turn
from slipstream.train.arm import ArmPlan
from slipstream.train.turns import Turn
from slipstream.types import Arm, ArmLoop
from tests.small import replace_in, run_context, tuned
from tests.unit.lagging import ONE_STEP_OFF


def labels(overrides: dict[str, Any], arm: Arm = Arm.SPECULATIVE, k: int = 5, **length: Any) -> dict[str, str]:
    recipe = load_recipe("tiny", overrides=overrides)
    return arm_labels(recipe, arm, DraftLength(num_speculative_tokens=k, **length))


def test_an_arm_that_drafts_is_labelled_with_its_k_and_the_draft_that_recipe_and_tuning_chose() -> None:
    drafts = {"draft.method": "eagle3", "draft.init": "in_domain", "draft.sampling": "probabilistic"}
    own = {"arm": "speculative", "k": "5", "loop": "synchronous", "max_off_policy_steps": "0"}
    assert labels({}) == own | drafts
    assert {name for name in labels({}) if name in parameters(load_recipe("tiny"))} == set(drafts)
    assert labels({"draft": {"sampling": "auto"}}, sampling=DraftSampling.GREEDY)["draft.sampling"] == "greedy"
    assert labels({"draft": {"method": "ngram"}})["draft.sampling"] == "none"  # they are looked up
    assert labels(ONE_STEP_OFF)["loop"] == "one_step_off"
    for arm in Arm:  # an arm without drafts has none, also where speculation lost
        assert labels({}, arm, k=0) == own | {"arm": arm.value, "k": "0"} | dict.fromkeys(drafts, "none")


@pytest.mark.parametrize("asked", ["auto", "greedy"])
def test_arm_and_certificate_take_the_drafts_of_the_tuning_record(tmp_path: Path, asked: str) -> None:
    recipe = load_recipe("tiny", overrides={"draft": {"sampling": asked}})
    tuned(tmp_path, sampling="greedy")
    greedy = DraftLength(num_speculative_tokens=3, sampling=DraftSampling.GREEDY)
    length = draft_length(recipe, tmp_path)
    assert length == tuned_length(recipe, tmp_path) == greedy
    plan = stage.arm_plan(recipe, Arm.SPECULATIVE, policy=tmp_path, draft=tmp_path, length=length)
    started: Any = plan.start_engine
    assert started.args[0].draft.sampling is DraftSampling.GREEDY
    assert tuned_length(recipe, tuned(tmp_path, k=0, sampling="greedy")).sampling is DraftSampling.GREEDY


@pytest.mark.parametrize(("init", "known"), [("in_domain", None), ("general", 1.0 + 0.9 + 0.9 * 0.8)])
def test_only_what_a_draft_reached_on_other_text_is_a_length_to_reach(
    tmp_path: Path, init: str, known: float | None
) -> None:
    rates = {"num_parameters": 1, "elapsed_s": 1.0, "heldout_rate_by_position": (0.9, 0.8, 0.7)}
    write_record(DraftRecord(method="eagle3", init=init, **rates), tmp_path / "draft.json")
    recipe, length = load_recipe("tiny", overrides={"draft": {"init": init}}), DraftLength(num_speculative_tokens=2)
    plan = stage.arm_plan(recipe, Arm.SPECULATIVE, policy=tmp_path, draft=tmp_path, length=length)
    assert plan.draft_length == pytest.approx(known)


def test_the_arms_of_both_loops_share_neither_node_nor_policy_nor_labels() -> None:
    recipe = load_recipe("tiny", overrides=ONE_STEP_OFF)
    each = [(arm, loop) for loop in ArmLoop for arm in Arm]
    nodes = ("train_grpo_autoregressive", "train_grpo_speculative")
    assert [arm_node(*one) for one in each] == [*nodes, *(f"{node}_asynchronous" for node in nodes)]
    length = DraftLength(num_speculative_tokens=0)
    assert len({tuple(arm_labels(in_loop(recipe, loop), arm, length).values()) for arm, loop in each}) == 4


def test_the_synchronous_arm_of_an_asynchronous_recipe_is_that_of_the_recipe_without_the_loop() -> None:
    plain = load_recipe("tiny", overrides={"grpo": ONE_STEP_OFF["grpo"]})
    recipe = load_recipe("tiny", overrides=ONE_STEP_OFF)
    assert in_loop(recipe, ArmLoop.SYNCHRONOUS) == plain
    assert in_loop(recipe, ArmLoop.ASYNCHRONOUS) is recipe
    with pytest.raises(ConfigError, match="must be one_step_off or in_flight here, got 'synchronous'"):
        in_loop(plain, ArmLoop.ASYNCHRONOUS)


def test_what_is_certified_is_what_trained_or_the_longest_draft_that_lost(tmp_path: Path) -> None:
    by_batch = load_recipe("tiny", overrides={"draft": {"length": "by_batch"}})
    length = draft_length(by_batch, tuned(tmp_path, (1, 8, 5), (9, 48, 2)))
    assert tuned_length(by_batch, tmp_path) == length
    assert arm_labels(by_batch, Arm.SPECULATIVE, length)["k"] == "by_batch"
    assert tuned_length(by_batch, tuned(tmp_path, k=0)) == DraftLength(num_speculative_tokens=13)


@dataclass
class Trained:
    """In the place of `train`: arms that take three steps each, and note them."""

    steps: list[str] = field(default_factory=list)
    validated: list[Any] = field(default_factory=list)
    fails: Arm | None = None
    turns: set[int] = field(default_factory=set)

    def __call__(self, recipe: Recipe, plan: ArmPlan, *, turn: Turn, **_: Any) -> ArmRecord:
        self.turns.add(turn.num_steps)
        for step in range(3):
            turn.begin(step)
            if plan.arm is self.fails and step == 1:
                raise ValueError("no memory")
            self.steps.append(f"{plan.arm[0]}{step}")
        self.validated.append(plan.validation)
        return ArmRecord(arm=plan.arm, num_speculative_tokens=plan.num_speculative_tokens, steps=())


Train = Callable[..., tuple[Trained, list[str]]]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Train:
    """Trains both arms of a recipe with fakes around them; what they did, and how their MLflow runs ended."""
    tuned(tmp_path, k=2)

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

        def start(*, directory: Path, **given: Any) -> Any:
            return SimpleNamespace(directory=directory, train=partial(fake, **given))

        for name in ("connect", "accelerators", "decode", "tokenizer"):
            monkeypatch.setattr(stage, name, lambda *_: {})
        sets = SimpleNamespace(train=(), validation=("a problem",))
        replace_in(monkeypatch, stage, read_prompt_sets=lambda data: sets, versions=lambda: {"vllm": "1"})
        replace_in(monkeypatch, stage, tracked=tracked, Run=start)
        dtypes = {"learner": {"dtype": "float32"}, "engine": {"dtype": "float32"}}
        recipe = load_recipe("tiny", overrides=dtypes | overrides)
        paths = dict.fromkeys(("policy", "data", "draft", "tuning"), tmp_path)
        with suppress(ValueError):
            stage.train_grpo(run_context(tmp_path), recipe, list(Arm), **paths)
        return fake, runs

    return run


@pytest.mark.parametrize(
    ("arms_in_turn", "steps"),
    [("on", ["a0", "s0", "s1", "a1", "a2", "s2"]), ("off", ["a0", "a1", "a2", "s0", "s1", "s2"])],
)
def test_arms_take_turns_or_follow_one_another_with_fresh_processes(
    trained: Train, tmp_path: Path, arms_in_turn: str, steps: list[str]
) -> None:
    closed: list[str] = []
    for name, idle in (("engine", stage.idle_engines), ("learner", stage.idle_learners)):
        process: Any = SimpleNamespace(close=partial(closed.append, name))
        idle.put("key", process, capacity=1)
    fake, runs = trained({"placement": {"arms_in_turn": arms_in_turn}})
    assert (fake.steps, closed) == (steps, ["engine", "learner"])
    assert fake.validated == [("a problem",)] * 2
    assert sorted(runs) == ["train_grpo_autoregressive", "train_grpo_speculative"]
    for arm in Arm:  # with the packages of its machine
        assert read_record(ArmRecord, tmp_path / "e" / arm_node(arm) / "arm.json").versions == {"vllm": "1"}


def test_an_arm_that_fails_ends_the_other_at_its_next_turn_and_both_runs(trained: Train) -> None:
    fake, runs = trained({}, fails=Arm.SPECULATIVE)
    assert fake.steps == ["a0", "s0"]
    assert sorted(runs) == ["train_grpo_autoregressive: ValueError", "train_grpo_speculative: ValueError"]


def test_a_retry_trains_what_is_not_done(trained: Train) -> None:
    trained({"placement": {"arms_in_turn": "off"}}, fails=Arm.SPECULATIVE)
    fake, runs = trained({})
    assert fake.steps == ["s0", "s1", "s2"]
    assert runs == ["train_grpo_speculative"]
    assert fake.turns == {1}, "what it took in turn before counts"


def test_engines_that_never_stop_are_trained_alone_and_overlapping_ones_take_longer_turns() -> None:
    assert steps_a_turn(load_recipe("tiny")) == 1
    assert steps_a_turn(load_recipe("tiny_async")) >= 8
    in_flight = {"mode": "in_flight", "max_off_policy_steps": 1}
    assert steps_a_turn(load_recipe("tiny_async", overrides={"loop": in_flight})) == 0
    assert steps_a_turn(load_recipe("qwen3_8b")) == 0
