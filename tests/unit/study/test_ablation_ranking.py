"""Variants are ranked by step time beside the baseline of their own seed; losers and failures are shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.drafts.config import DraftInit, DraftMethod
from slipstream.records.files import read_record
from slipstream.records.steps import ArmRecord
from slipstream.study.ablation_page import write_ablation
from slipstream.study.ablation_ranking import (
    answer,
    outcome_metrics,
    rank,
    ranked_table,
    result_metrics,
    unequal_machines,
    verdict,
)
from slipstream.study.ablation_records import AblationRecord, Failure, Setting, Variant
from slipstream.types import Arm, Workload
from tests.unit.report.handmade import accepted, step


def setting(k: int, init: DraftInit = DraftInit.IN_DOMAIN, workload: Workload = Workload.RL_ZERO) -> Setting:
    return Setting(workload=workload, init=init, method=DraftMethod.EAGLE3, loss="kl_div", num_speculative_tokens=k)


def arm(generation_s: Sequence[float], *, k: int = 0, reward: float = 0.5, machine: str = "") -> ArmRecord:
    """A warm-up step and then these; every step takes 2 s beside generation."""
    drafted = accepted(10, *([8] * k)) if k else None
    steps = [step(i, generation_s=s, reward=reward, acceptance=drafted) for i, s in enumerate((50.0, *generation_s))]
    kind = Arm.SPECULATIVE if k else Arm.AUTOREGRESSIVE
    return ArmRecord(arm=kind, num_speculative_tokens=k, steps=tuple(steps), machine=machine)


BASE = {(Workload.RL_ZERO, 0): arm([6, 6, 6]), (Workload.RL_ZERO, 1): arm([14, 14, 14])}
FAILED = Failure(variant=Variant(setting=setting(9), seed=0), reason="draft-9 failed: no prompts")


def ranked(failures: Sequence[Failure] = ()) -> AblationRecord:
    """Steps of 8 and 16 s autoregressive. k=2: 4 and 8 s, twice as fast. k=5: 10 and 20 s, it loses."""
    arms = {
        Variant(setting=setting(5), seed=0): arm([8, 8, 8], k=5),
        Variant(setting=setting(5), seed=1): arm([18, 18, 18], k=5),
        Variant(setting=setting(2), seed=0): arm([2, 2, 2], k=2, reward=0.75),
        Variant(setting=setting(2), seed=1): arm([6, 6, 6], k=2, reward=0.25),
    }
    return rank("abl", "tiny", arms=arms, baselines=BASE, failures=failures)


def test_rows_are_ranked_by_the_step_and_paired_by_seed() -> None:
    first, last = ranked().rows
    assert (first.rank, first.setting.num_speculative_tokens, first.seeds, first.lengths) == (1, 2, (0, 1), (2, 2))
    assert first.step.value == pytest.approx(2.0)
    assert first.step.ci95 == pytest.approx((2.0, 2.0))  # 8 / 4 and 16 / 8: without pairing 16 / 4 would be in it
    assert first.generation.value == pytest.approx((3 * 14 / 6) ** 0.5)  # geometric mean of 6 / 2 and 14 / 6
    assert first.generation.ci95 == pytest.approx((14 / 6, 3.0))  # the two seeds: each is drawn twice now and then
    assert first.behind is None
    assert first.reward_difference.value == pytest.approx(0.0)  # +0.25 and -0.25
    assert first.mean_acceptance_length == pytest.approx(2.6)  # 1 + 2 x 0.8
    assert last.step.value == pytest.approx(0.8)
    assert last.behind is not None and last.behind.value == pytest.approx(2.5)


def test_a_loser_stays_in_the_table_and_is_called_one() -> None:
    record = ranked()
    assert [verdict(row) for row in record.rows] == ["faster", "LOSES to autoregressive"]
    assert "LOSES to autoregressive" in ranked_table(record)


@pytest.mark.parametrize(
    ("generation_s", "words"),
    [
        ([5.5, 6.5, 6.0, 6.1], "no gain beyond the noise"),
        ([2.0, 2.1, 1.9, 2.0], "faster, as the first"),
        ([3.0, 3.1, 2.9, 3.0], "faster, behind the first"),
    ],
)
def test_a_row_is_told_apart_from_the_first_only_beyond_the_noise(generation_s: list[float], words: str) -> None:
    arms = {
        Variant(setting=setting(2), seed=0): arm([2.0, 1.9, 2.1, 1.8], k=2),
        Variant(setting=setting(5), seed=0): arm(generation_s, k=5),
    }
    record = rank("abl", "tiny", arms=arms, baselines={(Workload.RL_ZERO, 0): arm([6, 6, 6, 6])}, failures=())
    assert verdict(record.rows[1]) == words
    assert ("Not told apart from it by these steps: k 5." in answer(record)[0]) == (words == "faster, as the first")


def test_one_timed_step_gives_no_interval_and_no_verdict() -> None:
    arms = {Variant(setting=setting(2), seed=0): arm([2.0], k=2)}
    record = rank("abl", "tiny", arms=arms, baselines={(Workload.RL_ZERO, 0): arm([6.0])}, failures=())
    assert verdict(record.rows[0]) == "one timed step, no interval"


def test_a_tuned_length_that_lost_is_named() -> None:
    arms = {Variant(setting=setting(0), seed=0): replace(arm([6, 6, 6]), arm=Arm.SPECULATIVE)}
    record = rank("abl", "tiny", arms=arms, baselines=BASE, failures=())
    assert verdict(record.rows[0]) == "speculation lost in tuning"
    assert record.rows[0].mean_acceptance_length == 1.0


def test_failures_are_shown_with_their_reason_and_an_arm_without_baseline_is_one() -> None:
    arms = {
        Variant(setting=setting(2), seed=0): arm([2, 2, 2], k=2),
        Variant(setting=setting(2), seed=7): arm([2, 2, 2], k=2),
    }
    record = rank("abl", "tiny", arms=arms, baselines=BASE, failures=(FAILED,))
    assert [failure.reason for failure in record.failures] == [FAILED.reason, "its baseline is missing"]
    assert "rl_zero-in_domain-eagle3-kl_div-k9-seed0 FAILED: draft-9 failed: no prompts" in ranked_table(record)
    assert "1 of 2" in ranked_table(record)


def test_with_nothing_ranked_the_failures_are_what_is_shown() -> None:
    record = rank("abl", "tiny", arms={}, baselines=BASE, failures=(FAILED,))
    assert ranked_table(record) == "rl_zero-in_domain-eagle3-kl_div-k9-seed0 FAILED: draft-9 failed: no prompts"
    assert answer(record) == []
    assert result_metrics(record) == {"result/num_settings": 0.0, "result/num_failed": 1.0}


def test_workloads_are_ranked_apart() -> None:
    base = {**BASE, (Workload.RL_THINK, 0): arm([6, 6, 6])}
    arms = {
        Variant(setting=setting(2), seed=0): arm([2, 2, 2], k=2),
        Variant(setting=setting(2, workload=Workload.RL_THINK), seed=0): arm([4, 4, 4], k=2),
    }
    record = rank("abl", "tiny", arms=arms, baselines=base, failures=())
    assert [(row.rank, row.setting.workload) for row in record.rows] == [(1, Workload.RL_ZERO), (1, Workload.RL_THINK)]
    assert [words.partition(",")[0] for words in answer(record)] == ["RL-Zero: RL-Zero", "RL-Think: RL-Think"]


def test_a_label_says_only_what_differs() -> None:
    arms = {
        Variant(setting=setting(2, init), seed=0): arm([2, 2, 2], k=2)
        for init in (DraftInit.IN_DOMAIN, DraftInit.GENERAL)
    }
    text = ranked_table(rank("abl", "tiny", arms=arms, baselines=BASE, failures=()))
    assert "in_domain, k 2" in text and "general, k 2" in text and "kl_div" not in text


def test_arms_of_different_machines_are_named() -> None:
    arms = {Variant(setting=setting(2), seed=0): arm([2, 2, 2], k=2, machine="b")}
    record = rank("abl", "tiny", arms=arms, baselines={(Workload.RL_ZERO, 0): arm([6, 6], machine="a")}, failures=())
    assert unequal_machines(record) == ["rl_zero-in_domain-eagle3-kl_div-k2-seed0"]
    assert unequal_machines(ranked()) == []


def test_metrics_carry_every_setting_and_the_best(tmp_path: Path) -> None:
    from slipstream.tracking.config import check_metrics

    record = ranked((FAILED,))
    metrics = result_metrics(record)
    check_metrics(metrics, 0)
    assert metrics["result/step_speedup"] == metrics["result/step_speedup_rl_zero_in_domain_eagle3_kl_div_k2"]
    assert metrics["result/step_speedup_rl_zero_in_domain_eagle3_kl_div_k5_high"] == pytest.approx(0.8)
    assert metrics["result/num_failed"] == 1.0
    own = outcome_metrics(record.outcomes[0])
    check_metrics(own, 0)
    assert own["result/num_speculative_tokens"] == 5.0
    assert own["result/step_speedup_low"] == pytest.approx(0.8)


def test_the_page_holds_table_figure_and_failures_and_the_record_is_read_back(tmp_path: Path) -> None:
    wrong = replace(FAILED, reason="<b>no prompts</b>")
    record = ranked((wrong,))
    paths = write_ablation(record, tmp_path)
    page = paths.html.read_text()
    assert paths.figure is not None and paths.figure.read_text().startswith("<svg")
    assert '<tr class="loses"><th>2</th>' in page
    assert "&lt;b&gt;no prompts&lt;/b&gt;" in page and "<b>no prompts" not in page
    assert "Step speedup over autoregressive" in page
    assert read_record(AblationRecord, paths.json) == record


def test_a_page_without_a_result_says_so(tmp_path: Path) -> None:
    paths = write_ablation(rank("abl", "tiny", arms={}, baselines={}, failures=(FAILED,)), tmp_path)
    assert paths.figure is None
    assert "No variant came to a result." in paths.html.read_text()
