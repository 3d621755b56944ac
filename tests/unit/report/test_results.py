"""Metrics, tags and description of an execution's MLflow run, worked by hand from the small record."""

from dataclasses import replace

import pytest
from scipy.special import stdtrit

from slipstream.records.run import RunRecord
from slipstream.records.steps import ArmRecord
from slipstream.report.page import report_json
from slipstream.report.results import curve_metrics, description, result_metrics, terminal_table
from slipstream.report.summary import summarise_arms
from slipstream.statistics import Estimate
from tests.unit.report.handmade import CERTIFICATE, CURVES, LOST, ONE_ARM, RECORD, TWO_STEPS, page_text


def with_spec_rewards(*rewards: float) -> RunRecord:
    """Twenty steps an arm, the baseline's rewards all 0.5: a quarter is five steps. These rewards are the last."""
    base, spec = RECORD.arms
    steps = [replace(base.steps[0], step=index, reward_mean=0.5) for index in range(20)]
    last = enumerate(rewards, start=20 - len(rewards))
    other = [replace(spec.steps[0], step=index, reward_mean=reward) for index, reward in last]
    return replace(RECORD, arms=(replace(base, steps=tuple(steps)), replace(spec, steps=tuple(other))))


def test_rewards_have_the_interval_of_their_prompts_in_every_rendering() -> None:
    """Eight steps of ten prompts: 20 of a quarter, none solved at first and all at the end, t(19) = 2.093024."""
    rates = [(0.0,) * 10] * 2 + [(0.5,) * 10] * 4 + [(1.0,) * 10] * 2

    def solved(arm: ArmRecord) -> ArmRecord:
        steps = (replace(arm.steps[0], step=i, rewards_by_prompt=r, reward_mean=r[0]) for i, r in enumerate(rates))
        return replace(arm, steps=tuple(steps))

    record, width = replace(RECORD, arms=tuple(map(solved, RECORD.arms))), 2.093024**2 / (20 + 2.093024**2)
    metrics = result_metrics(record, hours=0.0, gpu_hours=0.0)
    assert metrics["result/reward_gain_speculative"] == 1.0  # alike within each quarter: no interval
    assert "result/reward_gain_speculative_low" not in metrics
    ends = [metrics[f"result/reward_speculative{end}"] for end in ("", "_low", "_high")]
    assert ends == pytest.approx([1, 1 - width, 1])
    made = report_json(record)
    assert made["reward_first"]["speculative"] == {"value": 0.0, "ci95": pytest.approx([0.0, width])}
    assert made["reward_last"]["speculative"] == {"value": 1.0, "ci95": pytest.approx([1 - width, 1.0])}
    shown = "reward, speculative                            1.000  [0.820, 1.000]  at first 0.000 [0.000, 0.180]"
    assert shown in terminal_table(record).splitlines()
    assert '<dd class="note">95 %: 0.820 to 1.000; at first 0.000 [0.000, 0.180]</dd>' in page_text(record)
    row = "| reward, speculative | 1.000 | 0.820 to 1.000, at first 0.000 [0.000, 0.180] |"
    assert row in description(record).splitlines()


def test_the_gain_of_reward_has_the_interval_of_two_samples_of_prompts() -> None:
    """Four steps of five prompts, so a quarter is one step: variances 0.075 and 0.05, Welch's degrees of freedom."""
    rates = [(0.0, 0.0, 0.5, 0.5, 0.0), *[(0.5,) * 5] * 2, (1.0, 1.0, 1.0, 1.0, 0.5)]
    steps = [
        replace(step, rewards_by_prompt=each, reward_mean=sum(each) / 5)
        for step, each in zip(RECORD.arms[1].steps, rates, strict=False)
    ]
    run = summarise_arms([replace(RECORD.arms[1], steps=tuple(steps))])
    assert run.alone is not None
    gain, error = run.alone.reward_gain, ((0.075 + 0.05) / 5) ** 0.5
    freedom = 4 * 0.125**2 / (0.075**2 + 0.05**2)
    half = stdtrit(freedom, 0.975) * error
    assert gain.value == pytest.approx(0.7)
    assert gain.ci95 == pytest.approx((0.7 - half, 0.7 + half))


def test_steps_without_a_record_of_their_prompts_count_as_one_prompt_each() -> None:
    metrics = result_metrics(with_spec_rewards(*[0.5] * 20), hours=0.0, gpu_hours=0.0)
    half = 2.776445 / (2 * (5 + 2.776445**2) ** 0.5)  # Wilson's for five steps of 0.5, t(4) = 2.776445
    ends = [metrics[f"result/reward_autoregressive_{end}"] for end in ("low", "high")]
    assert ends == pytest.approx([0.5 - half, 0.5 + half])


def test_the_metrics_are_those_worked_by_hand() -> None:
    # Geometric means 6 / 3 and (8 * 8 * 6.5 * 10 * 8) ** 0.2 / 5. Logarithms of 1, 1, 3 / 4, 4 / 3 and 1 have the
    # standard error log(4 / 3) / sqrt(10); t(4) = 2.7764, wider by 1.05.
    generation, low, high = 1.05 * 2.776445 / 10**0.5, *(pytest.approx(end, abs=1e-5) for end in (1.31582, 1.95766))
    intervals = {
        "control_ratio": (1.0, 1.0, 1.0),  # 0.5 s of log-probabilities and 1.2 of training in both arms
        "generation_speedup": (2.0, 2 * (3 / 4) ** generation, 2 * (4 / 3) ** generation),
        "step_speedup": (33280**0.2 / 5, low, high),  # of 8, 8, 6.5, 10 and 8 s
        "validation_start": (0.1, 0.05, 0.15),
        "validation_autoregressive": (0.3, 0.25, 0.35),
        "validation_speculative": (0.31, 0.26, 0.36),
    }
    figures = {
        **{"hours": 1.5, "gpu_hours": 6.0, "mean_acceptance_length": 2.2, "num_speculative_tokens": 2},
        "tokens_per_s_autoregressive": 500 / 30.5,  # 100 tokens in each of 6, 6, 4.5, 8 and 6 s
        "tokens_per_s_speculative": 500 / 15,
        **{"reward_autoregressive": 0.5, "reward_speculative": 0.5, "paired": 0.0, "lossless": 1.0},
        # A quarter of six steps is one: there is no interval.
        **{"reward_gain_autoregressive": 0.4, "reward_gain_speculative": 0.4, "reward_difference": 0.0},
    }
    for name, ends in intervals.items():
        figures |= {f"{name}{end}": value for end, value in zip(("", "_low", "_high"), ends, strict=True)}
    found = result_metrics(RECORD, hours=1.5, gpu_hours=6.0)
    assert found == pytest.approx({f"result/{name}": value for name, value in figures.items()})


def test_the_accuracy_curves_are_metrics_by_step() -> None:
    def point(name: str, value: float) -> dict[str, object]:
        ends = {f"validation/{name}_low": value - 0.05, f"validation/{name}_high": value + 0.05}
        return {f"validation/{name}": value, **{end: pytest.approx(each) for end, each in ends.items()}}

    assert curve_metrics(CURVES) == [
        *((step, point("autoregressive", value)) for step, value in ((0, 0.1), (2, 0.5), (6, 0.3))),
        *((step, point("speculative", value)) for step, value in ((0, 0.1), (1, 0.125), (2, 0.5), (6, 0.31))),
    ]


def reward_difference_of(record: RunRecord) -> Estimate:
    comparison = summarise_arms(record.arms).comparison
    assert comparison is not None
    return comparison.reward_difference


def test_the_reward_difference_is_of_the_last_quarter_with_its_interval_and_of_steps_that_both_arms_have() -> None:
    estimate = reward_difference_of(with_spec_rewards(*[9] * 15, 0.6, 0.7, 0.8, 0.9, 1.0))
    # Differences 0.1 to 0.5: variance 0.025, t(4) = 2.7764.
    assert estimate.value == pytest.approx(0.3)
    assert estimate.ci95 == pytest.approx((0.3 - 2.776445 * 0.005**0.5, 0.3 + 2.776445 * 0.005**0.5))
    assert reward_difference_of(with_spec_rewards(9, 9, 0.4, 0.6)).value == pytest.approx(0.1)


@pytest.mark.parametrize("verdict", ["biased", "too weak"])
def test_what_a_run_lacks_is_left_out_and_any_verdict_but_lossless_is_zero(verdict: str) -> None:
    record = replace(RECORD, certificate=replace(CERTIFICATE, verdict=verdict))
    assert result_metrics(record, hours=0.0, gpu_hours=0.0)["result/lossless"] == 0.0
    alone = result_metrics(ONE_ARM, hours=0.0, gpu_hours=0.0)
    assert not [name for name in alone if "speedup" in name or "difference" in name or "aime" in name]
    assert "result/reward_speculative" not in alone
    assert "result/generation_speedup_low" not in result_metrics(TWO_STEPS, hours=0.0, gpu_hours=0.0)
    assert result_metrics(LOST, hours=0.0, gpu_hours=0.0)["result/num_speculative_tokens"] == 0


def test_the_description_is_the_verdict_a_table_and_the_link() -> None:
    text = description(RECORD, execution_url="https://flyte/console/x")
    assert {
        "| generation speedup | 2.00x | 1.53 to 2.61 |",
        "| reward, speculative - autoregressive | +0.000 | no interval: few steps, or all alike |",
        "| validation accuracy, before RL | 0.100 | 0.050 to 0.150, avg@4 of 30 problems |",
        "| losslessness | lossless |  |",
    } <= {*text.splitlines()}
    assert text.endswith("[The execution in Flyte](https://flyte/console/x)")
    assert "Flyte" not in description(RECORD)
