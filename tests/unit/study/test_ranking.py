"""Variants are ranked by step time beside the autoregressive arm of their own; losers and failures are shown."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.drafts.config import DraftInit, DraftMethod, DraftOnline
from slipstream.records.files import read_record
from slipstream.records.steps import ArmRecord, DraftUpdate
from slipstream.study.ranking import Failure, StudyRecord, Trained, outcome_metrics, rank, result_metrics, verdict
from slipstream.study.study_page import COLUMNS, answers, label, study_text, write_study
from slipstream.study.variants import Setting, Study, Variant
from slipstream.tracking.config import check_metrics
from slipstream.types import Arm, Workload
from tests.unit.report.handmade import step
from tests.unit.sampled import accepted


def variant(k: int, seed: int = 0, **changes: Any) -> Variant:
    own = {"workload": Workload.RL_ZERO, "init": DraftInit.IN_DOMAIN, "method": DraftMethod.EAGLE3, "loss": "kl_div"}
    return Variant(setting=Setting(num_speculative_tokens=k, **{**own, **changes}), seed=seed)


def arm(generation_s: Sequence[float], *, k: int = 0, reward: float = 0.5, **more: Any) -> ArmRecord:
    """A warm-up step and then these; every step takes 2 s beside generation, and `training_s` of the draft.

    Of 10 drafts 8 are accepted at each position; with `accepted_tokens` so many at the first position of each step.
    """
    accepted_tokens, training_s = more.pop("accepted_tokens", ()), more.pop("training_s", 0.0)
    steps = []
    for i, seconds in enumerate((50.0, *generation_s)):
        counts = [accepted_tokens[min(i, len(accepted_tokens) - 1)], 0] if accepted_tokens else [8] * k
        made = step(i, generation_s=seconds, reward=reward, acceptance=accepted(10, *counts) if counts else None)
        update = DraftUpdate(loss=1.0, num_updates=1, elapsed_s=training_s) if training_s else None
        train_s, step_s = made.times.train_s + training_s, made.times.step_s + training_s
        steps.append(replace(made, draft_update=update, times=replace(made.times, train_s=train_s, step_s=step_s)))
    k = 2 if accepted_tokens else k
    kind = Arm.SPECULATIVE if k else Arm.AUTOREGRESSIVE
    return ArmRecord(arm=kind, num_speculative_tokens=k, steps=tuple(steps), **{"machine": "", **more})


BASE = {0: arm([6] * 5), 1: arm([14] * 5)}
FAILED = Failure(variant=variant(9), reason="draft-9 failed: no prompts")


def ablation(
    arms: dict[Variant, ArmRecord], base: dict[int, ArmRecord] | None = None, failures: Sequence[Failure] = ()
) -> StudyRecord:
    ended: dict[Variant, Trained | str] = {failure.variant: failure.reason for failure in failures}
    ended |= {each: Trained(arm=own, baseline=(base or BASE)[each.seed]) for each, own in arms.items()}
    return rank(Study.ABLATION, ended, execution="abl", recipe="tiny")


def ranked(failures: Sequence[Failure] = ()) -> StudyRecord:
    """Steps of 8 and 16 s autoregressive. k=2: 4 and 8 s, twice as fast. k=5: 10 and 20 s, it loses."""
    arms = {
        variant(5): arm([8] * 5, k=5),
        variant(5, 1): arm([18] * 5, k=5),
        variant(2): arm([2] * 5, k=2, reward=0.75),
        variant(2, 1): arm([6] * 5, k=2, reward=0.25),
    }
    return ablation(arms, failures=failures)


def test_all_arms_of_a_study_leave_out_as_many_first_steps() -> None:
    """The baseline's second step takes 30 s; without it half of the others take 8 s and half 11, the variant's 4 s."""
    base = arm([28.0, *[6.0, 9.0] * 7])
    (row,) = ablation({variant(2): arm([2.0] * 15, k=2)}, {0: base}).rows
    assert row.outcomes[0].saved_s == pytest.approx(9.5 - 4.0)


def test_rows_are_ranked_by_the_step_and_paired_by_seed() -> None:
    first, last = ranked().rows
    assert (first.rank, first.setting.num_speculative_tokens, first.lengths) == (1, 2, (2, 2))
    assert [outcome.variant.seed for outcome in first.outcomes] == [0, 1]
    assert first.step.value == pytest.approx(2.0)
    assert first.step.ci95 == pytest.approx((2.0, 2.0))  # 8 / 4 and 16 / 8: without pairing 16 / 4 would be in it
    assert first.generation.value == pytest.approx((3 * 14 / 6) ** 0.5)  # geometric mean of 6 / 2 and 14 / 6
    reach = (9 / 7) ** (12.7062047 / 2)  # half of log(3) - log(14 / 6) is the standard error; t(1) = 12.706
    assert first.generation.ci95 == pytest.approx((7**0.5 / reach, 7**0.5 * reach))
    assert first.behind is None
    assert first.reward_difference.value == pytest.approx(0.0)  # +0.25 and -0.25
    assert first.mean_acceptance_length == pytest.approx(2.6)  # 1 + 2 x 0.8
    assert last.step.value == pytest.approx(0.8)
    assert last.behind is not None and last.behind.value == pytest.approx(2.5)
    assert [verdict(row) for row in (first, last)] == ["faster", "slower"]


@pytest.mark.parametrize(
    ("generation_s", "words"),
    [
        ([5.5, 6.5, 6.0, 6.1, 6.0], "no difference seen"),
        ([2.0, 2.1, 1.9, 2.0, 2.0], "faster, as the first"),
        ([3.0, 3.1, 2.9, 3.0, 3.0], "faster, behind the first"),
    ],
)
def test_a_row_is_told_apart_from_the_first_by_an_interval_of_its_own(generation_s: list[float], words: str) -> None:
    arms = {variant(2): arm([2.0, 1.9, 2.1, 1.8, 2.0], k=2), variant(5): arm(generation_s, k=5)}
    record = ablation(arms, {0: arm([6] * 5)})
    assert verdict(record.rows[1]) == words
    assert ("Not told apart from it by these steps: k 5." in answers(record)[0]) == (words == "faster, as the first")


@pytest.mark.parametrize(
    ("k", "own", "words"), [(2, arm([2.0], k=2), "not measured"), (0, arm([6.0]), "speculation lost in tuning")]
)
def test_a_single_step_and_a_length_that_lost_have_verdicts_of_their_own(k: int, own: ArmRecord, words: str) -> None:
    (row,) = ablation({variant(k): own}, {0: arm([6.0])}).rows
    assert (verdict(row), row.mean_acceptance_length) == (words, 2.6 if k else 1.0)


def test_failures_are_shown_with_their_reason_a_row_with_how_many_seeds_finished_and_only_what_differs() -> None:
    arms = {variant(2, init=init): arm([2] * 5, k=2) for init in (DraftInit.IN_DOMAIN, DraftInit.GENERAL)}
    failed = replace(FAILED, variant=variant(2, 7))
    text = study_text(ablation(arms, failures=[failed]))
    assert "rl_zero-in_domain-eagle3-kl_div-k2-seed7 FAILED: draft-9 failed: no prompts" in text
    assert "1 of 2" in text
    assert "in_domain, k 2" in text and "general, k 2" in text and "kl_div" not in text.replace(failed.variant.name, "")


def test_what_was_not_measured_stands_last_with_the_reason_and_is_no_best(tmp_path: Path) -> None:
    busy = arm([1] * 5, k=5)
    steps = tuple(replace(each, times=replace(each.times, train_s=2.5)) for each in busy.steps)  # 1.7 s over 3.0 s
    record = ablation({variant(2): arm([2] * 5, k=2), variant(5): replace(busy, steps=steps)}, {0: BASE[0]})
    first, last = record.rows
    assert [row.setting.num_speculative_tokens for row in (first, last)] == [2, 5]
    assert [verdict(row) for row in (first, last)] == ["faster", "not measured"]
    assert last.step.value > first.step.value
    reason = "k 5: The control, the same work in both arms, was 0.57x (95 % interval 0.57 to 0.57), outside 0.9 to 1.1:"
    assert reason in study_text(record).replace("\n", " ")
    assert "all: Unpaired: the arms ran one after the other." in study_text(record)
    html, *_ = write_study(record, tmp_path)
    assert reason in html.read_text() and "1.00x [1.00, 1.00]" in html.read_text()
    metrics = result_metrics(record)
    assert metrics["result/step_speedup"] == first.step.value
    assert metrics["result/control_ratio_rl_zero_in_domain_eagle3_kl_div_k5"] == pytest.approx(1.7 / 3.0)
    alone = ablation({variant(5): replace(busy, steps=steps)}, {0: BASE[0]})
    assert answers(alone)[0].startswith("RL-Zero: no draft was measured; the best is rl_zero-in_domain-eagle3-kl_div")


def test_each_workload_has_a_ranking_of_its_own() -> None:
    arms = {variant(2): arm([2] * 5, k=2), variant(2, workload=Workload.RL_THINK): arm([4] * 5, k=2)}
    record = ablation(arms)
    assert [(row.rank, row.setting.workload) for row in record.rows] == [(1, Workload.RL_ZERO), (1, Workload.RL_THINK)]
    assert [words.partition(",")[0] for words in answers(record)] == ["RL-Zero: RL-Zero", "RL-Think: RL-Think"]


@pytest.mark.parametrize(("machine", "is_unequal"), [("a", False), ("", False), ("b", True)])
def test_a_variant_on_another_machine_than_its_base_is_named(tmp_path: Path, machine: str, is_unequal: bool) -> None:
    record = ablation({variant(2): arm([2] * 5, k=2, machine=machine)}, {0: arm([6] * 5, machine="a")})
    html, *_ = write_study(record, tmp_path)
    said = "on another machine than their baseline" in html.read_text()
    assert (record.outcomes[0].is_unequal, said) == (is_unequal, is_unequal)


def drafter(method: DraftMethod, init: DraftInit | None, online: DraftOnline) -> Variant:
    return variant(2, method=method, init=init, online=online)


ONLINE = drafter(DraftMethod.EAGLE3, DraftInit.GENERAL, DraftOnline.ALWAYS)
NGRAM = drafter(DraftMethod.NGRAM, None, DraftOnline.OFF)
DROPOUT = Failure(
    variant=drafter(DraftMethod.DRAFT_MODEL, DraftInit.IN_DOMAIN, DraftOnline.OFF), reason="RuntimeError: no <memory>"
)
ALONE = arm([6, 14, 6, 6, 6], steps_a_turn=1)
TWICE = Trained(  # autoregressive steps of 8, 16 and 8 s, its own of 4, 8 and 4: twice as fast in each
    arm=arm([1.75, 5.75, 1.75, 1.75, 1.75], accepted_tokens=[2, 4, 6, 8], training_s=0.25, steps_a_turn=1),
    baseline=ALONE,
    pretraining_s=120.0,
)
LOSER = Trained(arm=arm([8, 18, 8, 8, 8], accepted_tokens=[1], steps_a_turn=1), baseline=ALONE)  # 10, 20 and 10 s


def bake_off(trained: dict[Variant, Trained]) -> StudyRecord:
    ended = {**trained, DROPOUT.variant: DROPOUT.reason}
    return rank(Study.BAKE_OFF, ended, execution="bake", recipe="tiny", dtype="float32")


BAKE_OFF = bake_off({NGRAM: LOSER, ONLINE: TWICE})


def test_steps_in_turn_are_paired_and_leave_out_the_warm_up() -> None:
    first, last = BAKE_OFF.rows
    (outcome,) = first.outcomes
    assert first.step.value == pytest.approx(2.0)
    assert first.step.ci95 == pytest.approx((2.0, 2.0))  # without pairing 16 / 4 would be in it
    assert first.generation.value == pytest.approx((6 / 1.75) ** 0.8 * (14 / 5.75) ** 0.2)
    assert outcome.ends == (1.2, 1.8)
    assert first.mean_acceptance_length == pytest.approx(1.6)
    assert [row.setting for row in (first, last)] == [ONLINE.setting, NGRAM.setting]


def test_pretraining_is_repaid_by_what_a_step_saves() -> None:
    first, last = BAKE_OFF.rows
    assert first.outcomes[0].saved_s == pytest.approx(4.0)  # medians 8 and 4
    names = ("pretraining", "repaid after", "training a step")
    assert [COLUMNS[name](BAKE_OFF, first) for name in names] == ["120 s", "30 steps", "0.25 s"]
    assert [COLUMNS[name](BAKE_OFF, last) for name in names] == ["-", "-", "-"]
    slower = bake_off({NGRAM: replace(LOSER, pretraining_s=1.0)}).rows[0]
    assert COLUMNS["repaid after"](BAKE_OFF, slower) == "never"


def test_the_answer_names_the_winner_if_there_is_one() -> None:
    (won,) = answers(BAKE_OFF)
    assert won == (
        "RL-Zero: EAGLE-3, general prompts, trained every step has the shortest step. "
        "Faster (2.00x, 95 % interval 2.00 to 2.00)."
    )
    assert answers(bake_off({NGRAM: LOSER})) == [
        "RL-Zero: no measured draft makes a step faster; the best is n-gram. "
        "Slower (0.80x, 95 % interval 0.80 to 0.80)."
    ]
    equal = drafter(DraftMethod.EAGLE3, DraftInit.IN_DOMAIN, DraftOnline.OFF)  # ranked second, by its name
    (tied,) = answers(bake_off({ONLINE: TWICE, equal: TWICE}))
    assert "Not told apart from it by these steps: EAGLE-3, the task's prompts." in tied


def test_published_figures_stand_in_columns_of_their_own_what_failed_below_and_all_fits_a_terminal() -> None:
    *_, beside, dropped = study_text(BAKE_OFF).split("\n\n")
    header, _, first, last = beside.splitlines()
    assert header.split("paper: ")[1:] == ["acceptance length  ", "generation speedup"]
    assert first.split()[-2:] == ["3.04", "1.63x"]  # EAGLE-3, UltraChat + Magpie, online
    assert last.split()[-2:] == ["2.47", "0.70x"]
    assert dropped == "draft_model-in_domain-off FAILED: RuntimeError: no <memory>"
    longest = drafter(DraftMethod.EAGLE3, DraftInit.IN_DOMAIN, DraftOnline.WHEN_STALE)
    assert max(map(len, study_text(bake_off({longest: TWICE})).splitlines())) <= 120


@pytest.mark.parametrize(
    ("record", "name", "num_losers", "shown"),
    [
        (ranked((replace(FAILED, reason="<b>no prompts"),)), "ablation", 2, ["<th>2</th>", "&lt;b&gt;no prompts"]),
        (BAKE_OFF, "bake_off", 5, ["<th>n-gram</th>", "RuntimeError: no &lt;memory&gt;", "arXiv 2604.26779"]),
    ],
)
def test_the_page_holds_tables_figure_losers_and_failures_and_the_record_is_read_back(
    tmp_path: Path, record: StudyRecord, name: str, num_losers: int, shown: list[str]
) -> None:
    html, figure, json = write_study(record, tmp_path)
    page = html.read_text()
    assert (html.name, json.name) == (f"{name}.html", f"{name}.json")
    assert figure.read_text().startswith("<svg") and "Step speedup over autoregressive" in page
    assert page.count('<tr class="loses">') == num_losers  # in each table, and in that of failures
    assert all(words in page for words in shown)
    assert read_record(StudyRecord, json) == record


@pytest.mark.parametrize("method", DraftMethod)
@pytest.mark.parametrize("init", DraftInit)
@pytest.mark.parametrize("online", DraftOnline)
def test_every_drafter_can_be_shown(method: DraftMethod, init: DraftInit, online: DraftOnline) -> None:
    words = label(BAKE_OFF, drafter(method, init, online).setting)
    assert words.count("prompts") == 1 and ("trained" in words) == (online is not DraftOnline.OFF)
    assert method.value not in words or method is DraftMethod.SUFFIX


def test_metrics_carry_every_setting_and_the_best() -> None:
    metrics = result_metrics(ranked((FAILED,)))
    check_metrics(metrics, 0)
    assert metrics["result/step_speedup"] == metrics["result/step_speedup_rl_zero_in_domain_eagle3_kl_div_k2"]
    assert metrics["result/step_speedup_rl_zero_in_domain_eagle3_kl_div_k5_high"] == pytest.approx(0.8)
    assert (metrics["result/num_settings"], metrics["result/num_failed"]) == (2.0, 1.0)
    own = next(each for each in ranked().outcomes if each.num_speculative_tokens == 5)
    check_metrics(outcome_metrics(own), 0)
    assert outcome_metrics(own)["result/step_speedup_low"] == pytest.approx(0.8)
    drafters = result_metrics(BAKE_OFF)
    check_metrics(drafters, 0)
    assert drafters["result/step_speedup"] == drafters["result/step_speedup_eagle3_general_always"] == pytest.approx(2)
    assert drafters["result/generation_speedup_ngram_off"] == pytest.approx(0.75**0.8 * (14 / 18) ** 0.2)
    assert (drafters["result/num_drafters"], drafters["result/num_dropouts"]) == (2.0, 1.0)
