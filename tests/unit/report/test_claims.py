"""Words for a ratio of times, by every rule; and the same verdict wherever a run's figures are shown."""

import re
from dataclasses import replace

import numpy as np
import pytest

from slipstream.records.run import RunRecord
from slipstream.records.steps import ArmRecord, DraftUpdate, StepRecord
from slipstream.report.claims import ClaimKind, claim, recorded, said
from slipstream.report.comparison import answer
from slipstream.report.results import description, result_metrics, terminal_table, verdict_tags
from slipstream.report.summary import summarise, summarise_arms
from slipstream.statistics import Estimate
from slipstream.study.ranking import Trained, rank
from slipstream.study.ranking import verdict as ranked_verdict
from slipstream.study.variants import Study
from slipstream.tracking.mlflow_store import Execution
from tests.unit.refusals import rows
from tests.unit.report.handmade import ASYNCHRONOUS, RECORD, beside, page_text, with_steps
from tests.unit.study.test_ranking import variant


def ratio(value: float, *ci95: float) -> Estimate:
    return Estimate(value=value, ci95=(ci95[0], ci95[1]) if ci95 else None)


EVEN = ratio(1.0, 0.99, 1.01)
UNPAIRED = "Unpaired: the arms ran one after the other."
AGAIN = "run again on a quiet machine, with the arms in turn."


@rows(
    """
1.5 1.2 1.8 | 1 0.99 1.01 | paired => Faster (1.50x, 95 % interval 1.20 to 1.80).
0.45 0.32 0.9 | 1 0.99 1.01 | paired => Slower (0.45x, 95 % interval 0.32 to 0.90).
0.61 0.43 1.38 | 1 0.99 1.01 | paired
    No difference seen; a difference of 48 % or more would have been seen (0.61x, 95 % interval 0.43 to 1.38).
1.5 1 1.8 | 1 0.99 1.01 | paired
    No difference seen; a difference of 40 % or more would have been seen (1.50x, 95 % interval 1.00 to 1.80).
0.9 0.8 1 | 1 0.99 1.01 | paired
    No difference seen; a difference of 10 % or more would have been seen (0.90x, 95 % interval 0.80 to 1.00).
1.5 | 1 0.99 1.01 | paired => Not measured. Too few timed steps for an interval: run more steps.
1.5 1.2 1.8 | 1 0.99 1.01 | unpaired
    Faster (1.50x, 95 % interval 1.20 to 1.80). Unpaired: the arms ran one after the other.
1.5 1.2 1.8 | 0.949 0.9 1 | paired
    Faster (1.50x, 95 % interval 1.20 to 1.80). Control 0.95x (95 % interval 0.90 to 1.00) lies outside 0.95 to 1.05.
0.5 0.4 0.6 | 1.1 1 1.2 | paired
    Slower (0.50x, 95 % interval 0.40 to 0.60). Control 1.10x (95 % interval 1.00 to 1.20) lies outside 0.95 to 1.05.
1.5 1.2 1.8 | 1.05 | paired => Faster (1.50x, 95 % interval 1.20 to 1.80).
1.5 1.2 1.8 | 1.11 1 1.2 | paired
    Not measured. The control, the same work in both arms, was 1.11x (95 % interval 1.00 to 1.20), outside 0.9 to 1.1:
    run again on a quiet machine, with the arms in turn.
0.45 | 0.4 | unpaired
    Not measured. The control, the same work in both arms, was 0.40x (too few steps, no interval), outside 0.9 to 1.1:
    run again on a quiet machine, with the arms in turn. Too few timed steps for an interval: run more steps. Unpaired:
    the arms ran one after the other.
1.5 1.2 1.8 | none | paired
    Not measured. There is no control that shows if the machine was as fast for both arms: run again.
"""
)
def test_a_ratio_is_put_into_words_by_its_interval_its_control_and_its_pairing(given: str, expected: str) -> None:
    """A row has ratio and control with the ends of their intervals; words begin with the kind of the claim."""
    estimate, control, pairing = given.split(" | ")
    of_control = None if control == "none" else ratio(*map(float, control.split()))
    found = claim(ratio(*map(float, estimate.split())), of_control, paired=pairing == "paired")
    assert found.sentence == expected
    assert expected.lower().startswith(found.kind)
    assert found.as_json() == {"kind": found.kind, "sentence": expected}


def test_arms_whose_training_overlaps_generation_have_a_verdict_that_says_there_is_no_control() -> None:
    found = claim(ratio(1.5, 1.2, 1.8), None, paired=True, overlaps=True)
    assert found.sentence == ("Faster (1.50x, 95 % interval 1.20 to 1.80). No control: training overlaps generation.")
    assert claim(ratio(1.5), None, paired=True, overlaps=True).kind is ClaimKind.NOT_MEASURED
    assert "These arms have no control, for their training overlaps generation." in page_text(ASYNCHRONOUS)
    assert "no control" not in page_text(RECORD)


def test_step_and_generation_are_each_about_their_own_interval_and_notes_that_they_share_stand_once() -> None:
    estimates = {"step": ratio(0.45, 0.32, 0.9), "generation": ratio(0.61, 0.43, 1.38)}

    def both(control: Estimate) -> str:
        return said({name: claim(each, control, paired=False) for name, each in estimates.items()})

    assert both(EVEN) == (
        "Step: slower (0.45x, 95 % interval 0.32 to 0.90). Generation: no difference seen; a difference of 48 % or "
        f"more would have been seen (0.61x, 95 % interval 0.43 to 1.38). {UNPAIRED}"
    )
    assert both(ratio(0.4, 0.35, 0.45)) == (
        "Step and generation: not measured. The control, the same work in both arms, was 0.40x (95 % interval 0.35 to "
        f"0.45), outside 0.9 to 1.1: {AGAIN} {UNPAIRED}"
    )


NINE, FOUR = (9.0, 9.1, 8.9, 9.2, 8.8, 9.0, 9.1, 8.9), (4.0, 4.1, 3.9, 4.2, 3.8, 4.0, 4.1, 3.9)
MIXED = (12.0, 7.0, 9.0, 11.0, 8.0, 10.0, 7.5, 9.5)
RUNS = {
    "faster": beside(NINE, FOUR),
    "slower": beside(FOUR, NINE),
    "no difference seen": beside(NINE, MIXED),
    "not measured": beside(NINE, FOUR, control=2.0),
}


@pytest.mark.parametrize(("kind", "record"), RUNS.items())
def test_every_place_says_the_same_of_a_run(kind: str, record: RunRecord) -> None:
    comparison = summarise_arms(record.arms).comparison
    assert comparison is not None
    assert [each.kind for each in comparison.claims.values()] == [kind, kind]
    headline = f"Speculation (eagle3, k = 2) against none. {said(comparison.claims)}"
    page, terminal = page_text(record), terminal_table(record)
    assert headline.startswith("Speculation (eagle3, k = 2) against none. Step") and kind in headline
    assert f'<p class="verdict">{headline}</p>' in page
    assert headline in " ".join(terminal.splitlines())
    assert description(record).startswith(headline)
    (row,) = [line for line in terminal.splitlines() if line.startswith("step speedup")]
    assert row.endswith(f": {kind}")
    assert re.search(rf'<th>step speedup</th><td class="">[^<]*</td><td class="">[^<]*</td><td class="">{kind}<', page)
    kinds = {name: each["kind"] for name, each in summarise(record)["verdict"].items()}
    assert kinds == {"step": kind, "generation": kind}
    assert verdict_tags(record) == {"verdict": headline, "verdict.step": kind, "verdict.generation": kind}
    metrics = result_metrics(record, hours=1.0, gpu_hours=0.0)
    assert [recorded(metrics, f"{name}_speedup") for name in comparison.claims] == [*comparison.claims.values()]
    assert answer(Execution(name="e", tags=verdict_tags(record))) == headline
    base, spec = record.arms
    study = rank(Study.BAKE_OFF, {variant(2): Trained(arm=spec, baseline=base)}, execution="b", recipe="tiny")
    assert ranked_verdict(study.rows[0]) == kind
    assert study.rows[0].claim.notes == comparison.claims["step"].notes


def test_the_control_is_training_without_the_drafts_own_and_none_where_steps_train_for_no_time() -> None:
    record = beside(NINE, FOUR)
    base, spec = record.arms
    update = DraftUpdate(loss=1.0, num_updates=1, elapsed_s=0.5)
    longer = [replace(each.times, train_s=each.times.train_s + 0.5) for each in spec.steps]
    learned = [replace(s, draft_update=update, times=times) for s, times in zip(spec.steps, longer, strict=True)]
    taught = replace(record, arms=(base, replace(spec, steps=tuple(learned))))
    assert summarise(taught)["control"] == {"value": pytest.approx(1.0), "ci95": pytest.approx([1.0] * 2)}
    # 2 x 1.7 s of log-probabilities and training over 1.7 s
    assert summarise(beside(NINE, FOUR, control=2.0))["control"]["value"] == pytest.approx(2.0)
    metrics = result_metrics(beside(NINE, FOUR, control=1.04), hours=0.0, gpu_hours=0.0)
    assert [metrics[f"result/control_ratio{end}"] for end in ("", "_low", "_high")] == pytest.approx([1.04] * 3)
    assert "control (training, the same work in both arms)" in terminal_table(record)
    assert "control (training, the same work in both arms)" in page_text(record)
    found = summarise(with_steps(record, lambda s: replace(s, times=replace(s.times, train_s=0.0, logprob_s=0.0))))
    assert found["control"] == {"value": None, "ci95": None}
    assert found["verdict"]["step"]["kind"] == "not measured"


@pytest.mark.parametrize(
    ("turns", "last", "paired"),
    [((1, 1), 0, True), ((4, 4), 0, True), ((0, 0), 0, False), ((1, 4), 0, False), ((1, 1), -1, False)],
)
def test_arms_are_paired_if_they_took_the_same_steps_in_turn(turns: tuple[int, int], last: int, paired: bool) -> None:
    record = beside(NINE, FOUR)
    base, spec = (replace(arm, steps_a_turn=size) for arm, size in zip(record.arms, turns, strict=True))
    made = replace(record, arms=(base, replace(spec, steps=spec.steps[: last or None])))
    assert summarise(made)["paired"] is paired
    assert result_metrics(made, hours=0.0, gpu_hours=0.0)["result/paired"] == float(paired)
    assert (UNPAIRED in terminal_table(made).replace("\n", " ")) is not paired
    assert ("The arms are unpaired" in page_text(made)) is not paired


def test_arms_that_took_several_steps_a_turn_are_compared_by_turns() -> None:
    """The steps 1 to 7 in turns of two: 1 alone after the warm-up, then 2 and 3, 4 and 5, 6 and 7."""
    record = beside((2.0, 6.0, 2.0, 6.0, 2.0, 6.0, 2.0), (1.0,) * 7, steps_a_turn=2)
    comparison = summarise_arms(record.arms).comparison
    assert comparison is not None
    assert comparison.generation.value == pytest.approx(128**0.25)  # turns of 2, 4, 4 and 4 s


@pytest.mark.parametrize(("resumed_at", "paired"), [(7, True), (0, False)])
def test_turns_that_a_resumed_arm_repeated_alone_are_of_no_pair(resumed_at: int, paired: bool) -> None:
    """The speculative arm resumes behind the other, on a machine that has become ten times as slow."""

    def ended(step: StepRecord, arm: int) -> StepRecord:
        is_late = arm == 1 and step.step >= resumed_at
        factor, since_s = (10.0, 1e6) if is_late else (1.0, 0.0)
        times = replace(step.times, generation_s=factor * step.times.generation_s)
        return replace(step, times=times, ended_at_s=since_s + 10.0 * step.step + arm)

    base, spec = beside((2.0,) * 9, (1.0,) * 9).arms
    made = [replace(arm, steps=tuple(ended(step, i) for step in arm.steps)) for i, arm in enumerate((base, spec))]
    comparison = summarise_arms(made).comparison
    assert comparison is not None and comparison.paired is paired
    assert comparison.generation.value == pytest.approx(2.0 if paired else 0.2)


@pytest.mark.parametrize("slowed", [1.0, 1.08])
def test_the_control_holds_where_one_arm_had_fewer_tokens_to_train_on(slowed: float) -> None:
    """The tokens of one arm are a fifth fewer: training, half of it the cost of tokens, takes a tenth less."""
    rng, of_prompts, arms = np.random.default_rng(0), np.linspace(800, 1200, 9), []
    for arm, share, factor in zip(beside(NINE, FOUR).arms, (1.0, 0.8), (slowed, 1.0), strict=True):
        steps = []
        for each, mean in zip(arm.steps, of_prompts, strict=True):
            tokens = int(share * mean * rng.uniform(0.9, 1.1))
            times = replace(each.times, logprob_s=0.0, train_s=factor * (0.1 + 1e-4 * tokens))
            steps.append(replace(each, times=times, train=replace(each.train, num_computed_tokens=tokens)))
        arms.append(replace(arm, steps=tuple(steps)))

    def control(*arms: ArmRecord) -> float:
        comparison = summarise_arms(arms).comparison
        assert comparison is not None and comparison.control is not None
        study = rank(Study.BAKE_OFF, {variant(2): Trained(arm=arms[1], baseline=arms[0])}, execution="b", recipe="tiny")
        assert study.rows[0].control == comparison.control
        return comparison.control.value

    assert control(*arms) == pytest.approx(slowed, abs=0.015)
    uncounted = [replace(step, train=replace(step.train, num_computed_tokens=None)) for step in arms[0].steps]
    assert control(replace(arms[0], steps=tuple(uncounted)), arms[1]) > slowed + 0.06
