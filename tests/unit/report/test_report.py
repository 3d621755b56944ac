"""Figures of a report worked by hand from a small record, and pages that render whatever the run lacks."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.config import ConfigError
from slipstream.records import (
    AcceptanceStats,
    ArmRecord,
    CertificateRecord,
    DataSetRecord,
    DraftRecord,
    EvaluationRecord,
    Finding,
    GreedyRecord,
    Mismatch,
    PolicyRecord,
    Power,
    RefitCheck,
    RunRecord,
    ScheduleEntry,
    StepRecord,
    SweepPoint,
    TrainStats,
    TuningRecord,
)
from slipstream.report import read_reference, render, speedup_table, summarise, write_report
from slipstream.report.page import verdict
from slipstream.report.summary import pooled_acceptance, summarise_run
from slipstream.statistics import amdahl
from slipstream.types import STAGES, Arm, StageTimes

REFERENCE = read_reference()


def step(index: int, *, generation_s: float, reward: float, acceptance: AcceptanceStats | None = None) -> StepRecord:
    """A step whose other stages take exactly 2 s: 0.1 data, 0.2 prepare, 0.5 logprob, 1.2 train."""
    times = StageTimes(
        data_s=0.1, prepare_s=0.2, generation_s=generation_s, logprob_s=0.5, train_s=1.2, step_s=generation_s + 2.0
    )
    return StepRecord(
        step=index,
        times=times,
        reward_mean=reward,
        num_rollouts=10,
        num_response_tokens=100,
        num_truncated=1,
        num_reward_timeouts=2,
        num_reward_crashes=0,
        num_zero_signal_groups=3,
        train=TrainStats(loss=0.0, grad_norm=1.0, kl=0.0, clip_fraction=0.0, num_tokens=0, learning_rate=1e-4),
        mismatch=Mismatch(k1=1e-4, k3=1e-4, mean=1e-3, largest=1e-2, outside_fraction=0.0),
        acceptance=acceptance,
        policy_version=index,
        draft_version=None,
        refit=RefitCheck(num_tensors=0, elapsed_s=0.0),
    )


def accepted(num_drafts: int, *by_position: int) -> AcceptanceStats:
    total = sum(by_position)
    return AcceptanceStats(
        num_drafts=num_drafts,
        num_draft_tokens=num_drafts * len(by_position),
        num_accepted_tokens=total,
        accepted_by_position=by_position,
        mean_acceptance_length=1 + total / num_drafts,
        acceptance_rate=total / (num_drafts * len(by_position)),
        rate_by_position=tuple(count / num_drafts for count in by_position),
    )


def point(k: int, speedup: float) -> SweepPoint:
    return SweepPoint(
        k=k,
        batch=16,
        generation_s=6.0 / speedup,
        generation_p10_s=5.9 / speedup,
        generation_p90_s=6.2 / speedup,
        num_repeats=3,
        autoregressive_s=6.0,
        speedup=speedup,
        mean_acceptance_length=1 + 0.5 * k,
        rate_by_position=(0.5,) * k,
    )


def evaluation(policy: str, value: float) -> EvaluationRecord:
    return EvaluationRecord(
        policy=policy,
        num_problems=30,
        k=4,
        avg_at_k=value,
        maj_at_k=value,
        ci95=(value - 0.05, value + 0.05),
        truncated_fraction=0.25,
        num_timeouts=1,
        prompt_hash="abc123",
        correct_by_problem=(1,) * 30,
    )


def arms() -> tuple[ArmRecord, ArmRecord]:
    """Generation after the warm-up: 6, 6, 9 s against 3, 3, 3 s; the warm-up steps would change every figure."""
    rewards = (0.1, 0.2, 0.3, 0.5)
    base = [
        step(i, generation_s=s, reward=r) for i, (s, r) in enumerate(zip((50.0, 6.0, 6.0, 9.0), rewards, strict=True))
    ]
    drafted = (accepted(10, 9, 5), accepted(10, 8, 4), accepted(20, 14, 6), accepted(10, 9, 5))
    spec = [
        step(i, generation_s=s, reward=r, acceptance=a)
        for i, (s, r, a) in enumerate(zip((50.0, 3.0, 3.0, 3.0), rewards, drafted, strict=True))
    ]
    return (
        ArmRecord(arm=Arm.AUTOREGRESSIVE, num_speculative_tokens=0, steps=tuple(base)),
        ArmRecord(arm=Arm.SPECULATIVE, num_speculative_tokens=2, steps=tuple(spec)),
    )


CERTIFICATE = CertificateRecord(
    verdict="lossless",
    reason="none of 2 tests rejects",
    claim="Tokens follow the policy.",
    family_level=0.01,
    power=0.9,
    max_detectable_bias=0.1,
    num_speculative_tokens=2,
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    seed=0,
    num_tokens=20_000,
    num_baseline_tokens=20_001,
    findings=(
        Finding(
            name="pit, bonus token",
            num_observations=900,
            statistic=0.01,
            p_value=0.4,
            p_value_corrected=0.8,
            reject=False,
        ),
        Finding(
            name="first token",
            num_observations=512,
            statistic=99.0,
            p_value=1e-5,
            p_value_corrected=2e-5,
            reject=True,
        ),
    ),
    control=(),
    detectable=(Power(alternative="sharper", detectable_total_variation=0.012, detectable_fraction=0.1),),
    greedy=GreedyRecord(num_responses=32, num_equal=31, num_near_ties=1, largest_gap_nats=0.1, near_tie_nats=0.25),
    pit_histograms={"no draft": (10, 12), "bonus token": (11, 9)},
    policy_fingerprint="aaaa",
    draft_fingerprint="bbbb",
    versions={},
    elapsed_s=60.0,
)
RECORD = RunRecord(
    recipe="tiny",
    workload="rl_zero",
    execution="exec-1",
    tracking_uri="sqlite:////runs/mlflow.db",
    versions={"torch": "2.13.0"},
    machine="2 cores <no GPU>",
    policy=PolicyRecord(
        model="from scratch",
        architecture="Qwen3ForCausalLM",
        num_parameters=3_600_000,
        vocab_size=64,
        max_position_embeddings=512,
        eos_token_id=1,
        pretrain_steps=3,
        pretrain_loss=0.2,
        pretrain_losses=(3.0, 1.0, 0.2),
        elapsed_s=12.0,
    ),
    data=(
        DataSetRecord(
            name="train",
            source="synthetic",
            num_read=100,
            num_kept=90,
            num_duplicates=4,
            num_conflicting=3,
            num_unparseable=2,
            num_too_long=1,
            num_held_out=0,
        ),
    ),
    draft=DraftRecord(
        method="eagle3",
        init="in_domain",
        num_parameters=500_000,
        num_training_tokens=10_000,
        num_steps=3,
        losses=(2.0, 1.0, 0.5),
        heldout_rate_by_position=(0.8, 0.5),
        heldout_mean_acceptance_length=2.2,
        elapsed_s=30.0,
    ),
    tuning=TuningRecord(
        chosen_k=2,
        reason="k=2 was fastest",
        points=(point(0, 1.0), point(2, 2.0), point(5, 0.75), point(7, 0.5)),
        schedule=(ScheduleEntry(batch_from=1, batch_to=16, num_speculative_tokens=2),),
    ),
    arms=arms(),
    evaluations=(evaluation("start", 0.1), evaluation("autoregressive", 0.3), evaluation("speculative", 0.31)),
    certificate=CERTIFICATE,
)
LOST = replace(
    RECORD,
    tuning=TuningRecord(chosen_k=0, reason="no k beat k=0", points=(point(0, 1.0), point(2, 0.9)), schedule=()),
    arms=(
        RECORD.arms[0],
        replace(
            RECORD.arms[1],
            num_speculative_tokens=0,
            steps=tuple(replace(s, acceptance=None) for s in RECORD.arms[1].steps),
        ),
    ),
)
ONE_STEP = replace(RECORD, arms=tuple(replace(arm, steps=arm.steps[:1]) for arm in RECORD.arms))
TWO_STEPS = replace(RECORD, arms=tuple(replace(arm, steps=arm.steps[:2]) for arm in RECORD.arms))
ONE_ARM = replace(RECORD, arms=RECORD.arms[:1], evaluations=())
BARE = replace(
    RECORD,
    workload="other",
    arms=(),
    data=(),
    evaluations=(),
    tuning=TuningRecord(chosen_k=0, reason="not swept", points=(), schedule=()),
    policy=replace(RECORD.policy, pretrain_steps=0, pretrain_losses=()),
    draft=replace(RECORD.draft, losses=(), heldout_rate_by_position=()),
)


def test_json_holds_the_figures_worked_by_hand() -> None:
    got = summarise(RECORD)
    assert list(got) == [
        "recipe",
        "workload",
        "versions",
        "numerics",
        "steps",
        "stages",
        "stages_left_out",
        "step_wall_s",
        "speedup",
        "acceptance",
        "sweep",
        "reward",
        "aime24",
    ]
    assert (got["recipe"], got["workload"], got["versions"], got["steps"]) == (
        "tiny",
        "rl_zero",
        {"torch": "2.13.0"},
        4,
    )
    assert list(got["stages"]) == ["autoregressive", "speculative"]
    assert list(got["stages"]["autoregressive"]) == list(STAGES)
    # Of 6, 6, 9: the 90th percentile lies at rank 1.8, 6 + 0.8 * 3.
    assert got["stages"]["autoregressive"]["generation"] == pytest.approx({"median_s": 6, "p10_s": 6, "p90_s": 8.4})
    assert got["stages"]["speculative"]["train"] == pytest.approx({"median_s": 1.2, "p10_s": 1.2, "p90_s": 1.2})
    assert got["step_wall_s"]["autoregressive"] == pytest.approx({"median_s": 8, "p10_s": 8, "p90_s": 10.4})
    # Medians 6 / 3 and 8 / 5. A resampled median of (6, 6, 9) is 6 or 9: intervals [2, 3] and, of steps, [1.6, 2.2].
    assert got["speedup"]["generation"] == {"value": 2.0, "ci95": [2.0, 3.0]}
    assert got["speedup"]["step"]["value"] == pytest.approx(1.6)
    assert got["speedup"]["step"]["ci95"] == pytest.approx([1.6, 2.2])
    # 40 and 20 of 50 drafts were accepted at positions 1 and 2: 1 + 60 / 50.
    assert got["acceptance"] == {"k": 2, "mean_acceptance_length": 2.2, "rate_by_position": [0.8, 0.4]}
    assert got["sweep"][2] == {
        "k": 5,
        "batch": 16,
        "generation_s": 8.0,
        "mean_acceptance_length": 3.5,
        "speedup": 0.75,
    }
    assert got["reward"] == {"autoregressive": [0.1, 0.2, 0.3, 0.5], "speculative": [0.1, 0.2, 0.3, 0.5]}
    assert list(got["aime24"]) == ["start", "autoregressive", "speculative"]
    start = got["aime24"]["start"]
    assert start == {
        "avg_at_k": 0.1,
        "k": 4,
        "ci95": [pytest.approx(0.05), pytest.approx(0.15)],
        "truncated_fraction": 0.25,
    }


def test_json_of_a_run_that_does_not_speculate() -> None:
    assert summarise(LOST)["acceptance"] == {"k": 0, "mean_acceptance_length": 1.0, "rate_by_position": []}


def test_json_of_one_timed_step_has_no_interval() -> None:
    # Of two steps the first warms up; of one step it is all there is.
    assert summarise(TWO_STEPS)["speedup"]["generation"] == {"value": 2.0, "ci95": None}
    assert summarise(ONE_STEP)["speedup"]["generation"] == {"value": 1.0, "ci95": None}


def test_json_of_one_arm_has_no_speedup() -> None:
    assert summarise(ONE_ARM)["speedup"]["step"] == {"value": None, "ci95": None}


def test_the_bound_is_amdahls_law() -> None:
    # The reference's own: g = 100 / 151.2 and AL = 3.32 bound the 1.41 that was measured.
    assert amdahl(0.5, 2.0) == pytest.approx(4 / 3)
    assert amdahl(1.0, 3.0) == pytest.approx(3.0)
    assert amdahl(100 / 151.2, 3.32) == pytest.approx(1.859, abs=1e-3)
    comparison = summarise_run(RECORD).comparison
    assert comparison is not None
    assert comparison.step_bound == pytest.approx(1 / (0.75 / 2.2 + 0.25))


def test_speedup_per_token_accounts_for_longer_responses() -> None:
    base, spec = RECORD.arms
    longer = replace(spec, steps=tuple(replace(s, num_response_tokens=150) for s in spec.steps))
    comparison = summarise_run(replace(RECORD, arms=(base, longer))).comparison
    assert comparison is not None
    assert (comparison.generation.value, comparison.generation_per_token.value) == (2.0, pytest.approx(3.0))


def test_acceptance_pools_counters_not_rates() -> None:
    steps = [step(0, generation_s=1, reward=0, acceptance=a) for a in (accepted(30, 30), accepted(10, 0, 0))]
    pooled = pooled_acceptance(steps)
    assert pooled is not None
    assert (pooled.mean_acceptance_length, pooled.acceptance_rate) == (1.75, 0.6)
    assert pooled.rate_by_position == (0.75, 0.0)
    assert pooled_acceptance([step(0, generation_s=1, reward=0)]) is None


def test_page_has_every_section_and_each_losing_configuration() -> None:
    page = render(RECORD, REFERENCE)
    sections = re.findall(r'<section id="([a-z-]+)">', page)
    assert sections == [
        "step-time",
        "speedup",
        "acceptance",
        "draft-length",
        "losslessness",
        "learning",
        "counts",
        "policy-and-draft",
        "data",
        "reproduce",
    ]
    assert page.count("<svg") == 9
    losing = re.findall(r'<tr class="loses"><th>(\d+)</th>.*?>(\d\.\d\dx)<.*?loses</td></tr>', page)
    assert losing == [("5", "0.75x"), ("7", "0.50x")]
    assert "sped rollout generation up 2.00x (95 % interval 2.00 to 3.00) and the whole GRPO step 1.60x" in page
    assert "2 cores &lt;no GPU&gt;" in page


def test_page_needs_nothing_from_elsewhere_and_is_small() -> None:
    page = render(RECORD, REFERENCE)
    assert not re.search(r"<script|<link|<img|@import|url\(http|src=", page)
    assert len(page.encode()) < 2_000_000
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', page)) <= set(ids)
    assert len(ids) == len(set(ids))


def test_a_column_is_measured_or_quoted_never_both() -> None:
    page = render(RECORD, REFERENCE)
    label = "paper, measured (arXiv 2604.26779), 32 GB200"
    for heading in re.findall(r'<th colspan="\d+" class="group quoted">([^<]*)</th>', page):
        assert heading == label
    generation = re.search(r"<tr class=\"\"><th>generation</th>(.*?)</tr>", page)
    assert generation is not None
    measured = re.findall(r'<td class="">([^<]*)</td>', generation.group(1))
    quoted = re.findall(r'<td class="quoted">([^<]*)</td>', generation.group(1))
    assert measured == ["6.00", "6.00 to 8.40", "75 %", "3.00", "3.00 to 3.00", "60 %", "2.00x"]
    assert quoted == ["100.0", "56.6", "1.77x"]


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        (LOST, "Speculation lost, so both arms ran without it (no k beat k=0)"),
        (ONE_STEP, "an arm with one timed step tells nothing about the noise"),
        (TWO_STEPS, "an arm with one timed step tells nothing about the noise"),
        (ONE_ARM, "Only one arm ran"),
        (BARE, "No GRPO step ran"),
    ],
)
def test_a_page_says_what_the_run_lacks(record: RunRecord, sentence: str) -> None:
    assert sentence in render(record, REFERENCE)
    speedup_table(record)
    json.dumps(summarise(record), allow_nan=False)


def test_a_slower_arm_is_called_slower() -> None:
    base, spec = RECORD.arms
    swapped = (replace(base, steps=spec.steps), replace(spec, steps=base.steps))
    assert "lost: it slowed rollout generation down to 0.50x" in render(replace(RECORD, arms=swapped), REFERENCE)


def test_terminal_table_is_aligned_and_complete() -> None:
    table = speedup_table(RECORD).splitlines()
    assert max(map(len, table)) <= 100
    assert table[0].split() == ["median", "seconds", "a", "step", "autoregressive", "speculative", "ratio"]
    assert table[4].split() == ["generation", "6.00", "3.00", "2.00x"]
    assert table[7].split() == ["step", "(wall", "time)", "8.00", "5.00", "1.60x"]
    assert [line.index("x") for line in table[2:8]] == [table[4].index("x")] * 6
    text = "\n".join(table)
    assert "generation speedup                             2.00x  95 % interval 2.00 to 3.00" in text
    assert "k = 2); by position 80 % 40 %" in text
    assert "last quarter; first quarter 0.100" in text
    assert "avg@4 of 30 problems" in text


def test_a_stage_that_the_arms_left_out_is_said_to_be_and_not_timed_as_zero() -> None:
    arms = tuple(
        replace(
            arm,
            steps=tuple(
                replace(step, has_logprob_pass=False, times=replace(step.times, logprob_s=0.0)) for step in arm.steps
            ),
        )
        for arm in RECORD.arms
    )
    record = replace(RECORD, arms=arms)
    (line,) = [line for line in speedup_table(record).splitlines() if line.startswith("logprob")]
    assert line.split() == ["logprob", "left", "out", "left", "out"]
    assert summarise(record)["stages_left_out"] == {"autoregressive": ["logprob"], "speculative": ["logprob"]}
    page = render(record, REFERENCE)
    assert page.count(">left out<") == 2
    assert "the training pass gives the same log-probabilities" in page
    assert "the training pass gives the same log-probabilities" not in render(RECORD, REFERENCE)


def test_report_is_written_as_page_and_json(tmp_path: Path) -> None:
    paths = write_report(RECORD, tmp_path / "report")
    assert json.loads(paths.json.read_text()) == summarise(RECORD)
    assert paths.html.read_text() == render(RECORD, REFERENCE)
    assert sorted(path.name for path in paths.html.parent.iterdir()) == ["report.html", "report.json"]


def test_quoted_speedups_agree_with_the_quoted_times() -> None:
    for workload in REFERENCE.workloads.values():
        base, spec = workload.autoregressive, workload.speculative
        assert base.generation_s / spec.generation_s == pytest.approx(workload.generation_speedup, abs=0.006)
        assert base.step_s / spec.step_s == pytest.approx(workload.step_speedup, abs=0.006)
        assert sum(base.by_stage().values()) == pytest.approx(base.step_s, abs=0.2)
        assert sum(spec.by_stage().values()) == pytest.approx(spec.step_s, abs=0.2)


def test_a_missing_reference_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"report\.reference must be a file, got '.*absent\.yaml'"):
        read_reference(tmp_path / "absent.yaml")


def test_the_page_says_what_the_certificate_says() -> None:
    page = render(RECORD, REFERENCE)

    assert "Verdict: <b>lossless</b>" in page
    assert "None of 2 tests rejects" in page
    assert re.search(r"first token</th>.*?>rejects<", page, re.DOTALL)
    assert "sharper by 0.012" in page
    assert "losslessness" in speedup_table(RECORD)


def test_arms_on_different_hardware_are_marked() -> None:
    base, spec = RECORD.arms
    apart = replace(RECORD, arms=(replace(base, machine="x86_64, 2 cores"), replace(spec, machine="aarch64, 72 cores")))
    alike = replace(RECORD, arms=tuple(replace(arm, machine="x86_64, 2 cores") for arm in RECORD.arms))

    marked = verdict(apart, summarise_run(apart))

    assert "autoregressive on x86_64, 2 cores, speculative on aarch64, 72 cores" in marked
    assert "different hardware" not in verdict(alike, summarise_run(alike))
