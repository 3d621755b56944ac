"""A small run whose figures can be worked by hand, runs that lack something, and a demo as it was recorded."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from slipstream.recipe import Recipe, load_recipe
from slipstream.records.files import read_record
from slipstream.records.run import DriftRecord, RunRecord
from slipstream.records.stages import SweepPoint, TuningRecord
from slipstream.records.steps import AcceptanceStats, ArmRecord, EvaluationRecord, ScheduleEntry, StepRecord
from slipstream.report.page import render_page
from slipstream.stages.support import recipe_layout
from slipstream.types import Arm, Arms, StageTimes
from tests.unit.sampled import accepted

GOLDEN = Path(__file__).parents[1] / "golden"
ON_CORES = read_record(RunRecord, GOLDEN / "run.json")
"""`ASYNCHRONOUS` on two cores, kept as a file."""
_NAMES = ("stages", "step_times", "loops", "loop_learning", "draft_training", "acceptance", "sweep")
STAND_INS: dict[str, str] = dict.fromkeys((*_NAMES, "uniforms", "learning", "mismatch"), "<svg></svg>")
"""In the place of every figure, for tests of words and numbers: drawing a page takes a second."""


def page_text(record: RunRecord, *, drift: DriftRecord | None = None) -> str:
    """The page of a run without its figures, for tests of its words."""
    return render_page(record, drift=drift, drawn=STAND_INS)


def step(index: int, *, generation_s: float, reward: float, acceptance: AcceptanceStats | None = None) -> StepRecord:
    """A step whose other stages take exactly 2 s: 0.1 data, 0.2 prepare, 0.5 logprob, 1.2 train."""
    others = {"data_s": 0.1, "prepare_s": 0.2, "logprob_s": 0.5, "train_s": 1.2}
    times = StageTimes(generation_s=generation_s, step_s=generation_s + 2.0, **others)
    # Ten rollouts of 100 tokens: one truncated, two rewards late, three groups of equal rewards.
    kept = ON_CORES.arms[0].steps[0]
    return replace(kept, step=index, times=times, reward_mean=reward, acceptance=acceptance, policy_version=index)


def point(k: int, speedup: float) -> SweepPoint:
    took = {"generation_s": 6.0 / speedup, "generation_p10_s": 5.9 / speedup, "generation_p90_s": 6.2 / speedup}
    how: dict[str, Any] = {"batch": 16, "num_repeats": 3, "autoregressive_s": 6.0, "rate_by_position": (0.5,) * k}
    return SweepPoint(k=k, speedup=speedup, mean_acceptance_length=1 + 0.5 * k, **took, **how)


def arms() -> tuple[ArmRecord, ArmRecord]:
    """Generation after the warm-up: 6, 6, 4.5, 8 and 6 s, whose geometric mean is 6, against 3 s.

    The warm-up steps would change every figure.
    """
    rewards, base_s, spec_s = (0.1, 0.2, 0.3, 0.3, 0.4, 0.5), (50.0, 6.0, 6.0, 4.5, 8.0, 6.0), (50.0, *[3.0] * 5)
    drafted = ((10, 9, 5), (10, 8, 4), (20, 14, 6), (10, 9, 5), (10, 8, 4), (10, 8, 4))

    def steps(seconds: Sequence[float], drafts: Sequence[AcceptanceStats | None]) -> tuple[StepRecord, ...]:
        each = enumerate(zip(seconds, rewards, drafts, strict=True))
        return tuple(step(i, generation_s=s, reward=r, acceptance=a) for i, (s, r, a) in each)

    spec = steps(spec_s, [accepted(*counts) for counts in drafted])
    return (
        ArmRecord(arm=Arm.AUTOREGRESSIVE, num_speculative_tokens=0, steps=steps(base_s, [None] * 6)),
        ArmRecord(arm=Arm.SPECULATIVE, num_speculative_tokens=2, steps=spec),
    )


def with_steps(record: RunRecord, change: Callable[[StepRecord], StepRecord]) -> RunRecord:
    """The run with every step of its synchronous arms changed."""
    return replace(record, arms=tuple(replace(arm, steps=tuple(map(change, arm.steps))) for arm in record.arms))


def beside(
    base_s: Sequence[float], spec_s: Sequence[float], *, control: float = 1.0, steps_a_turn: int = 1
) -> RunRecord:
    """Arms in turn whose timed generation takes these seconds; log-probabilities and training `control` of them.

    Speculative steps take 0.3 s beside generation, 0.5 of log-probabilities and 1.2 of training.
    """
    made = []
    for arm, seconds, factor in zip(RECORD.arms, (base_s, spec_s), (control, 1.0), strict=True):
        others = {"data_s": 0.1, "prepare_s": 0.2, "logprob_s": 0.5 * factor, "train_s": 1.2 * factor}
        steps = [
            replace(arm.steps[0], step=i, reward_mean=0.5, times=StageTimes.in_sequence(generation_s=s, **others))
            for i, s in enumerate((50.0, *seconds))
        ]
        made.append(replace(arm, steps=tuple(steps), steps_a_turn=steps_a_turn))
    return replace(RECORD, arms=tuple(made))


RECORD = replace(
    ON_CORES,
    tuning=TuningRecord(
        chosen_k=2,
        reason="k=2 was fastest",
        points=(point(0, 1.0), point(2, 2.0), point(5, 0.75), point(7, 0.5)),
        schedule=(ScheduleEntry(batch_from=1, batch_to=16, num_speculative_tokens=2),),
    ),
    arms=arms(),
    evaluations=ON_CORES.evaluations[:3],  # 0.1 before, 0.3 without and 0.31 with speculation, each -+ 0.05
    asynchronous=(),
    layout=None,
)
"""A policy of 3.6 M parameters, a draft of 0.5 M with losses 2, 1 and 0.5, and a certificate of two tests."""
assert RECORD.tuning is not None
assert RECORD.draft is not None
assert RECORD.certificate is not None
TUNING, DRAFT, CERTIFICATE = RECORD.tuning, RECORD.draft, RECORD.certificate
_UNDRAFTED = tuple(replace(each, acceptance=None) for each in RECORD.arms[1].steps)
LOST = replace(
    RECORD,
    tuning=TuningRecord(chosen_k=0, reason="no k beat k=0", points=(point(0, 1.0), point(2, 0.9)), schedule=()),
    arms=(RECORD.arms[0], replace(RECORD.arms[1], num_speculative_tokens=0, steps=_UNDRAFTED)),
)


def overlapped(index: int, *, exposed_s: float, hidden_s: float, reward: float) -> StepRecord:
    """A step that waits `exposed_s` for rollouts; after the first one 80 of its 100 tokens lag by one version."""
    made = step(index, generation_s=exposed_s, reward=reward)
    step_s, kept = made.times.step_s, ON_CORES.asynchronous[0].steps[1]
    assert kept.overlap is not None  # scores took 0.05 s and 0.03 of them exposed, weights 0.15 and 0.05
    overlap = replace(
        kept.overlap,
        generation_s=exposed_s + hidden_s,
        hidden_s=hidden_s,
        engine_idle_fraction=1 - (exposed_s + hidden_s) / step_s,
        learner_idle_fraction=1 - 1.7 / step_s,
        num_awaited=2 if index == 3 else 0,
        num_restarted=1 if index == 0 else 0,
    )
    young, old = kept.lags  # ratios 1.0 and 1.1 in the mean, a quarter of the old ones clipped
    return replace(made, overlap=overlap, lags=(young, replace(old, ratio_max=2.0 + index)) if index else ())


def asynchronous_arm(arm: Arm, *, exposed_s: float, hidden_s: float) -> ArmRecord:
    """Six steps; the first takes 52 s."""
    waits = (50.0, *[exposed_s] * 5)
    steps = [
        overlapped(index, exposed_s=wait, hidden_s=hidden_s, reward=reward)
        for index, (wait, reward) in enumerate(zip(waits, (0.1, 0.2, 0.3, 0.3, 0.3, 0.4), strict=True))
    ]
    return ArmRecord(
        arm=arm,
        num_speculative_tokens=2 if arm is Arm.SPECULATIVE else 0,
        steps=tuple(steps),
        loop="one_step_off",
        max_off_policy_steps=1,
    )


ASYNCHRONOUS = replace(
    RECORD,
    asynchronous=(
        asynchronous_arm(Arm.AUTOREGRESSIVE, exposed_s=2.0, hidden_s=1.5),
        asynchronous_arm(Arm.SPECULATIVE, exposed_s=0.5, hidden_s=1.5),
    ),
    evaluations=ON_CORES.evaluations,  # 0.28 and 0.29 of the asynchronous arms
)


def right(policy: str, *correct_by_problem: int, prompt_hash: str = "abc123") -> EvaluationRecord:
    """Accuracy of 4 samples a problem, -+ 0.05."""
    value = sum(correct_by_problem) / 4 / len(correct_by_problem)
    kept = next(each for each in ON_CORES.evaluations if each.policy == policy)
    ends = (value - 0.05, value + 0.05)
    return replace(kept, avg_at_k=value, ci95=ends, correct_by_problem=correct_by_problem, prompt_hash=prompt_hash)


def evaluated_at(arm: ArmRecord, points: Mapping[int, EvaluationRecord]) -> ArmRecord:
    """The arm whose policy was evaluated after so many of its steps."""
    return replace(arm, steps=tuple(replace(each, evaluation=points.get(each.step)) for each in arm.steps))


CURVES = replace(
    RECORD,
    arms=(
        evaluated_at(RECORD.arms[0], {2: right("autoregressive", 2, 2)}),
        evaluated_at(RECORD.arms[1], {1: right("speculative", 1, 0), 2: right("speculative", 1, 3)}),
    ),
)
"""0.5 of both arms after two of four steps; the speculative one was evaluated after the first step too."""
ONE_STEP = replace(RECORD, arms=tuple(replace(arm, steps=arm.steps[:1]) for arm in RECORD.arms))
TWO_STEPS = replace(RECORD, arms=tuple(replace(arm, steps=arm.steps[:2]) for arm in RECORD.arms))


def alone(record: RunRecord, arm: Arm) -> RunRecord:
    """What is left of a run where one arm was asked for; without a speculative arm there is no draft."""
    kept = replace(
        record,
        arms=tuple(each for each in record.arms if each.arm is arm),
        asynchronous=tuple(each for each in record.asynchronous if each.arm is arm),
        evaluations=tuple(each for each in record.evaluations if each.policy.startswith(("start", arm.value))),
        requested=Arms(arm.value),
    )
    return kept if arm is Arm.SPECULATIVE else replace(kept, draft=None, tuning=None, certificate=None)


ONE_ARM = replace(alone(RECORD, Arm.AUTOREGRESSIVE), evaluations=())
BARE = replace(
    RECORD,
    workload="other",
    arms=(),
    data=(),
    evaluations=(),
    tuning=TuningRecord(chosen_k=0, reason="not swept", points=(), schedule=()),
    policy=replace(RECORD.policy, pretrain_steps=0, pretrain_losses=()),
    draft=replace(DRAFT, losses=(), heldout_rate_by_position=()),
)


_DEMO: dict[str, Any] = json.loads((GOLDEN / "demo_2026_11_21.json").read_text())
"""Times and counts of a demo's steps and of its sweep."""
_SPEEDUPS = [each["autoregressive_s"] / each["generation_s"] for each in _DEMO["points"]]
_POINTS = [
    SweepPoint(**each, num_repeats=3, speedup=speedup, rate_by_position=())
    for each, speedup in zip(_DEMO["points"], _SPEEDUPS, strict=True)
]
DEMO_TUNING = TuningRecord(chosen_k=_DEMO["chosen_k"], reason="recorded", points=tuple(_POINTS), schedule=())


def demo_arms(factor: float = 1.0) -> tuple[ArmRecord, ArmRecord]:
    """Both arms of the recorded demo, the speculative one's generation `factor` times as long."""
    base, spec = (
        tuple(_demo_step(index, values, slower) for index, values in enumerate(_DEMO[arm.value]))
        for arm, slower in ((Arm.AUTOREGRESSIVE, 1.0), (Arm.SPECULATIVE, factor))
    )
    return (
        ArmRecord(arm=Arm.AUTOREGRESSIVE, num_speculative_tokens=0, steps=base),
        ArmRecord(arm=Arm.SPECULATIVE, num_speculative_tokens=_DEMO["chosen_k"], steps=spec),
    )


def _demo_step(index: int, values: dict[str, Any], factor: float) -> StepRecord:
    generation_s = factor * values["generation_s"]
    times = {"data_s": 0.002, "prepare_s": 0.1, "generation_s": generation_s, "logprob_s": 0.38, "train_s": 1.19}
    return replace(
        step(index, generation_s=generation_s, reward=0.0),
        times=StageTimes(**times, step_s=generation_s + 1.672),
        num_rollouts=_DEMO["num_rollouts"],
        num_response_tokens=values["num_response_tokens"],
        num_truncated=values["num_truncated"],
    )


@cache
def demo_recipe() -> Recipe:
    """As the recorded demo computed: what `auto` stands for differs between machines."""
    return load_recipe("tiny", overrides={"engine": {"dtype": "bfloat16"}, "learner": {"dtype": "bfloat16"}})


@cache
def demo_run() -> RunRecord:
    """The record of a whole run around the recorded demo."""
    layout = recipe_layout(demo_recipe())
    made = replace(ON_CORES, execution="recorded", tuning=DEMO_TUNING, arms=demo_arms(), asynchronous=())
    return replace(made, layout=layout)
