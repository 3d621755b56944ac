"""Which loop a run trains with and over which engines, and what a verifier is handed of rollouts."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.config import merge
from slipstream.engine.config import SamplingConfig
from slipstream.engine.protocol import GenerationResult, GroupRequest
from slipstream.grpo.config import KvCache
from slipstream.grpo.update import Trained, Update
from slipstream.recipe import load_recipe
from slipstream.records.steps import RefitCheck, ScheduleEntry, StepRecord
from slipstream.refit.gate import Export
from slipstream.rewards.config import OverlongConfig, RewardConfig
from slipstream.rewards.reward import RewardResult
from slipstream.rewards.verifier import Verifier
from slipstream.train import arm
from slipstream.train.arm import ArmPlan, Run, score
from slipstream.train.batch import Submitted
from slipstream.train.loop import engine_seed
from slipstream.train.metrics import StageClock, Stopwatch
from slipstream.train.turns import ALONE, in_turn
from slipstream.types import Arm, FinishReason, Prompt, RolloutGroup
from slipstream.workers.calls import LostWorkerError, Worker
from tests.unit.train.world import (
    GROUP_SIZE,
    NUM_STEPS,
    PROMPTS,
    PROMPTS_PER_STEP,
    STREAM,
    FlightWorld,
    drawn,
    in_flight,
    one_step_off,
    synchronous,
    timeless,
)

ENGINE = Worker(None, "engine 0", "10.77.0.11")
TABLE = (ScheduleEntry(batch_from=1, batch_to=8, num_speculative_tokens=5),)
NO_DRAFTS = (ScheduleEntry(batch_from=1, batch_to=1, num_speculative_tokens=0),)
BASE: dict[str, Any] = {
    "grpo": {
        "num_steps": NUM_STEPS,
        "checkpoint_every_steps": 1,
        "prompts_per_step": PROMPTS_PER_STEP,
        "group_size": GROUP_SIZE,
        "seed": 0,
        "loss": {"truncated_importance_sampling": 2.0},
    },
    "sampling": {"temperature": 0.5},
}
ONE_STEP_OFF = {"loop": {"mode": "one_step_off", "max_off_policy_steps": 2}}
IN_FLIGHT = {"loop": {"mode": "in_flight", "max_off_policy_steps": 1, "kv_cache": "keep"}}
PILOTED = {"draft": {"autopilot": True}}


@dataclass
class Engines(FlightWorld):
    """Engines and their gate; at the generations whose numbers are in `lost` one dies."""

    workers: tuple[Worker, ...] = (ENGINE,)
    lost: list[int] = field(default_factory=list)
    modes: list[KvCache | None] = field(default_factory=list)
    tables: list[Sequence[ScheduleEntry]] = field(default_factory=list)
    dead: list[Worker] = field(default_factory=list)  # workers that died before any generation
    recalled: list[Sequence[bytes]] = field(default_factory=list)
    recoveries: list[str] = field(default_factory=list)
    sharing: list[str] = field(default_factory=list)  # nodes whose cores are shared with the learner
    num_asked: int = 0
    keeps_weights: bool = True
    after: list[str] = field(default_factory=list)  # the weights after so many updates

    def deliver(self, export: Export) -> RefitCheck:
        found = super().deliver(export)
        self.after.append(self.engine_weights)
        return found

    def run_in_flight(self, kv_cache: KvCache | None) -> None:
        self.modes.append(kv_cache)

    def draft_by(self, schedule: Sequence[ScheduleEntry]) -> None:
        self.tables.append(tuple(schedule))

    def generate(
        self, prompts: Sequence[Prompt], *, sampling: SamplingConfig, group_size: int, seed: int
    ) -> GenerationResult:
        self.num_asked += 1
        if self.num_asked in self.lost:
            raise LostWorkerError("engine 0 died", [ENGINE])
        return super().generate(prompts, sampling=sampling, group_size=group_size, seed=seed)

    def lost_workers(self) -> list[Worker]:
        return self.dead

    def histories(self) -> list[bytes]:
        if len(self.after) == 3:  # then one engine is lost
            raise LostWorkerError("engine 1 died", [ENGINE])
        return [f"engine {index} after {len(self.after)} refits".encode() for index in range(11)]

    def recall(self, histories: Sequence[bytes]) -> None:
        self.recalled.append(histories)

    def replace(self, lost: Sequence[Worker]) -> None:
        self.recoveries.append("replace")
        self.dead = [worker for worker in self.dead if worker not in lost]

    def engines_changed(self) -> None:
        self.recoveries.append("changed")

    def deliver_again(self, version: int) -> bool:
        self.recoveries.append(f"version {version} again")
        return self.keeps_weights

    def unnoted(self) -> AbstractContextManager[None]:
        return nullcontext()

    def load(self, *_: Any, **__: Any) -> None:
        """The weights are those of the start; there are no threads, and nobody reads the end."""

    save_hf = limit_threads = load

    def take_lost(self, names: Collection[str]) -> tuple[GroupRequest, ...]:
        return ()


VALIDATION = tuple(Prompt(id=f"v{i}", text="", token_ids=(2, i), answer="7") for i in range(2))
EVALUATED = {"evaluation": {"every_steps": 2, "num_samples_per_problem": 3}}
ONCE = {"engine": {"max_restarts": 0}}
Attempt = Callable[..., list[StepRecord]]


def run_of(
    directory: Path,
    engines: Engines,
    *overrides: dict[str, Any],
    plan_arm: Arm = Arm.SPECULATIVE,
    k: int = 0,
    schedule: tuple[ScheduleEntry, ...] = (),
    turn: Any = ALONE,
) -> Run:
    """A run of one arm that would be evaluated on two problems."""
    fakes: Any = engines
    plan = ArmPlan(
        arm=plan_arm,
        num_speculative_tokens=5 if schedule else k,
        draft=None,
        start_engine=lambda: nullcontext(fakes),
        schedule=schedule,
        validation=VALIDATION,
    )
    return Run(
        recipe=load_recipe("tiny", overrides=functools.reduce(merge, overrides, BASE)),
        plan=plan,
        policy=directory,
        prompts=PROMPTS,
        decode=lambda prompt, response: "x" * len(response),
        directory=directory,
        log=lambda metrics, step: None,
        turn=turn,
    )


@pytest.fixture
def attempted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Attempt:
    """Steps of a whole arm in a directory of this name; a response of odd length is right."""
    learners: dict[int, Any] = {}  # by thread
    monkeypatch.setattr(arm, "start_learner", lambda config, layout: nullcontext(learners[threading.get_ident()]))
    monkeypatch.setattr(arm, "open_channel", lambda *_: nullcontext())
    monkeypatch.setattr(arm, "RefitGate", lambda engines, *_, **__: engines)
    monkeypatch.setattr(arm, "own_node", lambda: "here")
    monkeypatch.setattr(arm, "shared_cores", lambda node, *parties: nullcontext(parties[0].sharing.append(node)))
    scores: Any = SimpleNamespace(
        judge=lambda prompts, texts, cut_off: RewardResult(
            rewards=tuple(float(len(text) % 2) for text in texts), num_timeouts=0, num_crashes=0
        )
    )

    def attempt(name: str, engines: Engines, *overrides: dict[str, Any], **how: Any) -> list[StepRecord]:
        fakes: Any = engines
        learners[threading.get_ident()] = fakes
        return run_of(tmp_path / name, engines, *overrides, **how).with_restarts(fakes, scores)

    return attempt


@pytest.mark.parametrize(
    ("loop", "versions"), [({}, [0, 1, 2, 3, 4, 5]), (ONE_STEP_OFF, [0, 0, 0, 1, 2, 3])], ids=["synchronous", "one off"]
)
def test_a_loop_generates_what_the_recipe_says_with_the_weights_that_it_says(
    attempted: Attempt, tmp_path: Path, loop: dict[str, Any], versions: list[int]
) -> None:
    engines = Engines(lag=2)
    records = attempted("arm", engines, loop, EVALUATED if loop else {})  # engines beside training evaluate nothing
    sampling = load_recipe("tiny", overrides=BASE).sampling
    for step, (version, call) in enumerate(zip(versions, engines.generated, strict=True)):
        seed = engine_seed(0, Arm.SPECULATIVE, step)
        assert call == ([prompt.id for prompt in STREAM.batch(step)], sampling, GROUP_SIZE, seed, version)
    assert [record.step for record in records] == list(range(NUM_STEPS))
    assert {update.temperature for update in engines.updates} == {0.5}
    assert (engines.modes, engines.sharing) == ([], ["here"] if loop else [])
    # Only a loop that lags writes down how many groups it asked for.
    submitted = Submitted(tmp_path / "arm" / "submitted").read()
    assert submitted == (NUM_STEPS * PROMPTS_PER_STEP if loop else 0)


def test_engines_in_flight_are_told_so_with_what_becomes_of_their_caches(attempted: Attempt, tmp_path: Path) -> None:
    engines = Engines(lag=1)
    records = attempted("arm", engines, IN_FLIGHT)
    assert engines.modes == [KvCache.KEEP]
    assert Counter(engines.trained) == Counter(prompt.id for step in range(NUM_STEPS) for prompt in STREAM.batch(step))
    assert max(each.lag for record in records for each in record.lags) <= 1
    assert {update.temperature for update in engines.updates} == {0.5}
    assert len(list(tmp_path.glob("arm/checkpoints/*.pending"))) == 2
    assert Submitted(tmp_path / "arm" / "submitted").read() == NUM_STEPS * PROMPTS_PER_STEP


@pytest.mark.parametrize(("loop", "num_ahead"), [({}, 0), (ONE_STEP_OFF, 2)], ids=["synchronous", "one off"])
def test_an_attempt_goes_on_after_what_was_done(
    attempted: Attempt, monkeypatch: pytest.MonkeyPatch, loop: dict[str, Any], num_ahead: int
) -> None:
    """After four of six steps a loop with a lag of 2 has generated both others; it goes on in the middle of a turn."""
    restarts: list[Stopwatch] = []
    monkeypatch.setattr(Stopwatch, "restart", lambda watch: restarts.append(watch))
    turn = SimpleNamespace(begin=lambda step: None, begins_with=lambda step: False, num_steps=8)

    class Interrupted(Engines):
        def train_step(self, update: Update) -> Trained:
            if update.batch.policy_version == 4:
                raise InterruptedError
            return super().train_step(update)

    whole, resumed = Engines(lag=2), Engines(lag=2)
    records = attempted("whole", whole, loop)
    with pytest.raises(InterruptedError):
        attempted("cut", Interrupted(lag=2), loop)
    found = attempted("cut", resumed, loop, turn=turn)
    assert len(restarts) == (1 if loop else 0)  # another arm's turn before it is no part of its first step
    assert timeless(found) == timeless(records)
    assert resumed.generated == whole.generated[4 + num_ahead :]
    assert resumed.updates == whole.updates[4:]


@pytest.mark.parametrize(("loop", "num_steps"), [({}, 1), (ONE_STEP_OFF, 2)], ids=["synchronous", "one off"])
def test_nothing_of_an_arm_works_in_the_turn_of_another(
    attempted: Attempt, monkeypatch: pytest.MonkeyPatch, loop: dict[str, Any], num_steps: int
) -> None:
    restarts: list[Stopwatch] = []
    monkeypatch.setattr(Stopwatch, "restart", lambda watch: restarts.append(watch))
    alone = Engines(lag=2)
    loop = merge(loop, {"grpo": {"checkpoint_every_steps": NUM_STEPS}})  # a checkpoint would wait for what is under way
    records = attempted("alone", alone, loop)
    worlds, work = {name: Engines(lag=2) for name in "ab"}, list[tuple[str, float, float]]()

    def noted(name: str, seconds: float, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **how: Any) -> Any:
            start_s = time.perf_counter()
            time.sleep(seconds)
            found = call(*args, **how)
            work.append((name, start_s, time.perf_counter()))
            return found

        return timed

    for name, world in worlds.items():
        monkeypatch.setattr(world, "generate", noted(name, 0.03, world.generate))
        monkeypatch.setattr(world, "train_step", noted(name, 0.0, world.train_step))
    arms = {name: lambda turn, name=name: attempted(name, worlds[name], loop, turn=turn) for name in worlds}
    found = in_turn(arms, num_steps=num_steps, needed=arms)
    spans = sorted(work, key=lambda span: span[1])
    turns = [list(own) for _, own in itertools.groupby(spans, key=lambda span: span[0])]
    assert all(max(end for *_, end in before) <= after[0][1] for before, after in itertools.pairwise(turns))
    pairs = NUM_STEPS // num_steps  # a, b, then b, a: two turns of one arm in a row, but for the first and the last
    assert [own[0][0] for own in turns] == ["a", *("ba"[i % 2] for i in range(pairs))]
    assert len(restarts) == (2 * pairs if "loop" in loop else 0)  # no turn of the other is part of a step
    for name, world in worlds.items():
        assert world.generated == alone.generated
        assert [step.reward_mean for step in found[name]] == [step.reward_mean for step in records]


def test_drafting_is_watched_where_the_recipe_says_so_and_there_is_something_to_draft_by(attempted: Attempt) -> None:
    """A resumed attempt knows what drafting cost."""
    watched, unasked, draftless, resumed = Engines(), Engines(), Engines(), Engines()
    attempted("watched", watched, PILOTED, schedule=TABLE)
    attempted("unasked", unasked, schedule=TABLE)
    attempted("draftless", draftless, PILOTED)
    # The first step warms up and three are measured, so that the fifth is a probe without drafts.
    assert watched.tables[:5] == [TABLE, TABLE, TABLE, TABLE, NO_DRAFTS]
    assert (unasked.tables, draftless.tables) == ([], [])
    with pytest.raises(LostWorkerError):
        attempted("cut", Engines(lost=[5]), PILOTED, ONCE, schedule=TABLE)
    attempted("cut", resumed, PILOTED, ONCE, schedule=TABLE)
    assert resumed.tables[0] == NO_DRAFTS


@pytest.mark.parametrize(
    ("loop", "recoveries"),
    [({}, ["replace", "changed"]), (ONE_STEP_OFF, ["replace", "changed", "version 0 again"])],
    ids=["synchronous", "one off"],
)
def test_a_lost_engine_is_replaced_as_allowed(attempted: Attempt, loop: dict[str, Any], recoveries: list[str]) -> None:
    """In turns the learner still has the engines' weights; beside training the way to them has to."""
    engines = Engines(lag=2, lost=[1])
    assert len(attempted("once", engines, loop, {"engine": {"max_restarts": 1}})) == NUM_STEPS
    assert engines.recoveries == recoveries
    with pytest.raises(LostWorkerError):
        attempted("never", Engines(lag=2, lost=[1]), loop, ONCE)


def test_an_engine_that_died_before_any_step_is_replaced(attempted: Attempt, caplog: pytest.LogCaptureFixture) -> None:
    engines, undisturbed = Engines(dead=[ENGINE]), Engines()
    records = attempted("lost", engines)
    assert engines.recoveries == ["replace"]
    assert f"train_grpo speculative: {ENGINE} died while no step ran and start again" in caplog.messages
    expected = attempted("undisturbed", undisturbed)
    assert without_times(records) == without_times(expected)
    assert undisturbed.recoveries == []


def test_histories_are_kept_and_given_to_a_resumed_run(attempted: Attempt, caplog: pytest.LogCaptureFixture) -> None:
    history, engines = {"draft": {"method": "history"}}, Engines()
    attempted("arm", engines, history, k=3)
    assert engines.recalled == [[]]
    assert [each for each in caplog.messages if "engine 1 died" in each] == [
        "train_grpo speculative: the engines' histories stay as they were written before: engine 1 died"
    ]
    resumed = Engines()
    attempted("arm", resumed, history, k=3)
    assert resumed.recalled == [[f"engine {index} after {NUM_STEPS} refits".encode() for index in range(11)]]
    for name, overrides, k in (("no drafts", history, 0), ("other drafts", {}, 3)):
        others = Engines()
        attempted(name, others, overrides, k=k)
        assert others.recalled == []


def test_the_reward_knows_how_many_responses_a_step_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In flight its calls have a group each, and the share that may fail is of the whole step."""

    def opened(config: RewardConfig, *, per_step: int) -> Any:
        raise InterruptedError(f"{per_step} responses")

    monkeypatch.setattr(arm, "open_reward", opened)
    with pytest.raises(InterruptedError, match=r"^6 responses$"):
        run_of(tmp_path, Engines()).train()


def asked_of_validation(engines: Engines) -> list[Any]:
    return [call for call in engines.generated if call[0] == ["v0", "v1"]]


def without_times(records: Sequence[StepRecord]) -> list[StepRecord]:
    return [replace(record, evaluation=None) for record in timeless(records)]


@pytest.mark.parametrize("each", list(Arm))
def test_an_arm_is_evaluated_while_it_trains_and_trains_as_if_it_were_not(attempted: Attempt, each: Arm) -> None:
    plain, evaluated = Engines(), Engines()
    alone = attempted("plain", plain, plan_arm=each)
    records = attempted("evaluated", evaluated, EVALUATED, plan_arm=each)
    settings = load_recipe("tiny", overrides=merge(BASE, EVALUATED)).evaluation.sampling
    # Version 2 has made two updates and version 4 four, asked with the seed of the other evaluations.
    asked = asked_of_validation(evaluated)
    assert asked == [(["v0", "v1"], settings, 3, 0, version) for version in (2, 4)]
    right = {}
    for step in (2, 4):
        groups = [drawn(prompt, evaluated.after[step], "0", (step, None), 3) for prompt in VALIDATION]
        counts = tuple(sum(len(rollout.token_ids) % 2 for rollout in group.rollouts) for group in groups)
        right[step] = each.value, counts
    found = {record.step: record.evaluation for record in records if record.evaluation}
    assert {step: (made.policy, made.correct_by_problem) for step, made in found.items()} == right
    assert without_times(records) == without_times(alone)
    assert [record.evaluation for record in alone] == [None] * NUM_STEPS
    assert (evaluated.weights, evaluated.trained) == (plain.weights, plain.trained)


def test_no_time_of_a_step_holds_an_evaluation(attempted: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    class Slow(Engines):
        def generate(self, prompts: Sequence[Prompt], **how: Any) -> GenerationResult:
            now[0] += 100.0 if list(prompts) == list(VALIDATION) else 1.0
            return super().generate(prompts, **how)

    monkeypatch.setattr(arm, "StageClock", lambda: StageClock(now_s=lambda: now[0]))
    records = attempted("arm", Slow(), EVALUATED)
    assert now[0] == 206.0
    assert [(record.times.generation_s, record.times.step_s) for record in records] == [(1.0, 1.0)] * NUM_STEPS


def test_an_arm_evaluates_writes_checkpoints_and_its_policy_in_its_own_turn(attempted: Attempt) -> None:
    events: list[str] = []

    class Noted(Engines):
        def generate(self, prompts: Sequence[Prompt], **how: Any) -> GenerationResult:
            if list(prompts) == list(VALIDATION):
                events.append("evaluates")
            return super().generate(prompts, **how)

        def save_checkpoint(self, path: Path, extra: dict[str, Any]) -> None:
            events.append("writes")

        def finish_checkpoint(self, *, timeout_s: float | None = None) -> None:
            events.append("has written")

        def save_hf(self, *_: Any) -> None:
            events.append("policy")

    turn = SimpleNamespace(begin=lambda step: events.append(f"turn {step}"), begins_with=lambda step: True, num_steps=1)
    steps = {"grpo": {"num_steps": 3, "checkpoint_every_steps": 2}}
    attempted("arm", Noted(), EVALUATED, steps, turn=turn)
    assert events == [
        *("turn 0", "turn 1", "writes", "has written", "turn 2", "evaluates", "turn 3", "policy", "has written")
    ]


def test_a_resumed_arm_evaluates_only_what_it_does_again(attempted: Attempt) -> None:
    whole, first, second = Engines(), Engines(lost=[6]), Engines()
    records = attempted("whole", whole, EVALUATED)
    with pytest.raises(LostWorkerError):  # the sixth generation is that of step 4; step 2 was evaluated
        attempted("cut", first, EVALUATED, ONCE)
    resumed = attempted("cut", second, EVALUATED, ONCE)
    assert [record.evaluation for record in resumed] == [record.evaluation for record in records]
    assert [version for *_, version in asked_of_validation(first)] == [2]
    assert [version for *_, version in asked_of_validation(second)] == [4]


SIGNAL = {"grpo": {"dynamic_sampling": {"max_extra_batches": 2}}}


def test_a_resumed_arm_samples_the_further_prompts_that_an_uninterrupted_one_does(attempted: Attempt) -> None:
    """It is cut off in the second batch of step 3, which is its seventh generation."""
    whole, first, second = Engines(), Engines(lost=[7]), Engines()
    records = attempted("whole", whole, SIGNAL)
    with pytest.raises(LostWorkerError):
        attempted("cut", first, SIGNAL, ONCE)
    resumed = attempted("cut", second, SIGNAL, ONCE)
    assert without_times(resumed) == without_times(records)
    assert (second.weights, second.trained) == (whole.weights, whole.trained)
    sampling = [record.dynamic_sampling for record in records if record.dynamic_sampling is not None]
    assert [each.num_batches for each in sampling] == [2, 1, 2, 3, 3, 3]
    assert [each.num_filled for each in sampling] == [0, 0, 0, 0, 1, 0]
    assert [each.num_surplus for each in sampling] == [0, 0, 1, 1, 0, 2]
    assert {each.num_trained for each in sampling} == {PROMPTS_PER_STEP}


def test_an_engine_lost_in_an_evaluation_gets_its_weights_again(
    attempted: Attempt, caplog: pytest.LogCaptureFixture
) -> None:
    """The learner has others by then: where nobody keeps the old ones the point is missing, and the arm goes on."""
    whole = attempted("whole", Engines(), EVALUATED)
    for keeps_weights in (True, False):
        engines = Engines(lost=[4], keeps_weights=keeps_weights)
        records = attempted(str(keeps_weights), engines, EVALUATED)
        assert engines.recoveries == ["replace", "changed", "version 2 again"]
        found = [record.evaluation for record in records]
        assert found == [whole[i].evaluation if keeps_weights or i != 2 else None for i in range(NUM_STEPS)]
        assert [record.num_engine_restarts for record in records] == [0, 0, 0, 1, 0, 0]
        untold = [replace(record, num_engine_restarts=0) for record in records]
        assert without_times(untold) == without_times(whole)
    assert "the policy after step 2 is not evaluated, training goes on" in caplog.text


def test_the_autopilot_learns_nothing_from_an_evaluation(attempted: Attempt) -> None:
    plain, evaluated = Engines(), Engines()
    alone = attempted("plain", plain, PILOTED, schedule=TABLE)
    records = attempted("evaluated", evaluated, PILOTED, EVALUATED, schedule=TABLE)
    assert evaluated.tables == plain.tables
    assert [record.autopilot for record in records] == [record.autopilot for record in alone]


def test_a_step_without_drafts_is_judged_unless_the_schedule_has_such_batches(tmp_path: Path) -> None:
    learner: Any = None
    trainers = [run_of(tmp_path, Engines(), schedule=table)._trainer(learner, ()) for table in ((), TABLE, NO_DRAFTS)]
    assert [trainer.guard._may_rest for trainer in trainers] == [False, False, True]


GUESS = "so \\boxed{7}? Let me check"


def decode(prompt: Sequence[int], response: Sequence[int]) -> str:
    """A guess at the answer; the template has opened a thought in prompts of odd numbers."""
    assert response
    return "<think>" * (prompt[1] % 2) + GUESS


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    with closing(Verifier(RewardConfig())) as verifier:
        yield verifier


def test_a_verifier_gets_each_rollouts_text_reference_and_whether_it_was_cut_off() -> None:
    handed: list[Any] = []

    class Noting(Verifier):
        def score(self, responses: Any, references: Any, *, cut_off: Sequence[bool] = ()) -> RewardResult:
            handed.append((list(responses), list(references), list(cut_off)))
            return super().score(responses, references, cut_off=cut_off)

    groups = [drawn(prompt, "weights", "0", (0, None), 2) for prompt in PROMPTS[:2]]
    cut = replace(groups[1].rollouts[1], finish_reason=FinishReason.LENGTH)
    groups[1] = replace(groups[1], rollouts=(groups[1].rollouts[0], cut))
    noting = Noting(RewardConfig())
    of_4 = partial(score, max_response_tokens=4)
    assert of_4(groups, noting, decode, overlong=OverlongConfig()).rewards == (1.0, 1.0, 0.0, 0.0)
    texts = [GUESS, GUESS, "<think>" + GUESS, "<think>" + GUESS]
    assert handed == [(texts, ["7"] * 4, [False, False, False, True])]
    lengths = [len(rollout.token_ids) for group in groups for rollout in group.rollouts]
    found = of_4(groups, noting, decode, overlong=OverlongConfig(buffer_tokens=4)).rewards
    assert found == tuple(reward - n / 4 for reward, n in zip((1.0, 1.0, 0.0, 0.0), lengths, strict=True))


LOOPS: dict[str, Callable[[FlightWorld], list[StepRecord]]] = {
    "synchronous": synchronous,
    "one step off": lambda world: one_step_off(world, 1),
    "in flight": lambda world: in_flight(world, 1),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_in_every_loop_a_guess_in_a_thought_that_the_prompt_opened_is_not_rewarded(
    verifier: Verifier, loop: str
) -> None:
    world, rewards = FlightWorld(), list[tuple[str, float]]()

    def scored(groups: Sequence[RolloutGroup]) -> RewardResult:
        result = score(groups, verifier, decode, max_response_tokens=4, overlong=OverlongConfig())
        prompts = [group.prompt.id for group in groups for _ in group.rollouts]
        rewards.extend(zip(prompts, result.rewards, strict=True))
        return result

    world.score = scored
    means = [record.reward_mean for record in LOOPS[loop](world)]
    trained = [prompt.id for step in range(NUM_STEPS) for prompt in STREAM.batch(step) for _ in range(GROUP_SIZE)]
    assert sorted(rewards) == sorted((prompt, float(int(prompt) % 2 == 0)) for prompt in trained)
    assert sum(means) / NUM_STEPS == sum(int(prompt) % 2 == 0 for prompt in trained) / len(trained)


def test_the_first_step_with_preemptions_is_a_warning(attempted: Attempt, caplog: pytest.LogCaptureFixture) -> None:
    """The engines' cache is full from the second generation on."""
    engines = Engines()
    generate = engines.generate
    engines.generate = lambda *args, **how: replace(generate(*args, **how), num_preemptions=4 * (engines.num_asked > 1))
    records = attempted("arm", engines)
    assert [record.num_preemptions for record in records] == [0, *[4] * (NUM_STEPS - 1)]
    (warning,) = [each.getMessage() for each in caplog.records if "preempted" in each.getMessage()]
    assert "step 2: the KV cache was full, and vLLM preempted and recomputed 4 rollouts" in warning
    assert "raise engine.gpu_memory_utilization" in warning
