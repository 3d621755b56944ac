"""Results against those of earlier executions: bands worked by hand, and what makes two executions comparable."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.records.run import DriftRecord
from slipstream.report.drift import comparable, drift_metrics, drift_tags, find_drift, prediction_interval, setting_tags
from slipstream.tracking.config import DriftConfig
from slipstream.tracking.mlflow_store import Execution
from tests.unit.report.handmade import RECORD, page_text

CONFIG = DriftConfig(num_executions=20)
PARAMS = {"grpo.group_size": "8", "grpo.seed": "0", "tuning.candidate_ks": "[0, 3]", "engine.max_restarts": "1"}
TAGS = {"workload": "rl_zero", "hardware": "2 cores", "dtype": "float32"}


def subject(**results: float) -> Execution:
    metrics = {f"result/{name}": value for name, value in measured(results).items()}
    return Execution(name="now", metrics=metrics, params=PARAMS, tags=TAGS)


def measured(results: Mapping[str, float]) -> dict[str, float]:
    """The results with an interval of each speedup and a control, without which a speedup is not judged."""
    ends = {f"{name}_{end}": value for name, value in results.items() if "speedup" in name for end in ("low", "high")}
    return {**results, **ends, "control_ratio": 1.0}


def execution(name: str, *, seed: int = 0, **results: float) -> Execution:
    return with_results(name, results, seed=seed)


def with_results(name: str, results: Mapping[str, float], *, seed: int = 0) -> Execution:
    metrics = {"result/lossless": 1.0, **{f"result/{key}": value for key, value in measured(results).items()}}
    params = {**PARAMS, "grpo.seed": str(seed), "k": "3"}
    return Execution(name=name, status="FINISHED", start_ms=0, metrics=metrics, params=params, tags=TAGS)


def before(values: list[float], name: str = "step_speedup") -> list[Execution]:
    return [with_results(f"e{index}", {name: value}) for index, value in enumerate(values)]


def judged(value: float, earlier: list[float], *, config: DriftConfig = CONFIG, name: str = "step_speedup") -> Any:
    (finding,) = find_drift(subject(**{name: value}), before(earlier, name), config).findings
    return finding


def test_a_prediction_interval_is_as_wide_as_students_table_says() -> None:
    # [1, 2, 3]: mean 2, s 1, t of 2 degrees of freedom 4.3027 at 95 %: 2 -+ 4.3027 sqrt(4 / 3) = 2 -+ 4.9683.
    assert prediction_interval([1.0, 2.0, 3.0], level=0.95) == pytest.approx((-2.9683, 6.9683), abs=1e-4)
    # [0, 2]: mean 1, s sqrt(2), t of 1 degree 1 at 50 %: 1 -+ sqrt(2) sqrt(3 / 2) = 1 -+ sqrt(3).
    assert prediction_interval([0.0, 2.0], level=0.5) == pytest.approx((1 - 3**0.5, 1 + 3**0.5))
    assert prediction_interval([0.25] * 4, level=0.99) == (0.25, 0.25)  # no width


@given(
    st.lists(st.floats(-100.0, 100.0), min_size=2, max_size=12),
    st.floats(0.01, 100.0),
    st.floats(-50.0, 50.0),
    st.floats(0.05, 0.98),
)
def test_a_prediction_interval_moves_and_scales(values: list[float], factor: float, shift: float, level: float) -> None:
    low, high = prediction_interval(values, level=level)
    moved = prediction_interval([factor * value + shift for value in reversed(values)], level=level)
    assert moved == pytest.approx((factor * low + shift, factor * high + shift), rel=1e-6, abs=1e-6)
    assert low <= np.mean(values) + 1e-9 and np.mean(values) - 1e-9 <= high
    wider = prediction_interval(values, level=level + 0.01)
    assert wider[0] <= low + 1e-9 and high <= wider[1] + 1e-9


def test_a_band_is_the_prediction_interval_of_five_executions_before_or_more() -> None:
    # Mean 3, s = sqrt(10 / 4), t of 4 degrees of freedom 2.7764: 3 -+ 2.7764 * 1.5811 * sqrt(1 + 1/5) = 3 -+ 4.8089.
    finding = judged(7.8, [1.0, 2.0, 3.0, 4.0, 5.0])
    assert finding.band == pytest.approx((-1.8089, 7.8089), abs=1e-3)
    assert (finding.verdict, finding.num_executions) == ("within", 5)
    assert judged(7.82, [1.0, 2.0, 3.0, 4.0, 5.0]).verdict == "above"
    assert judged(-1.82, [1.0, 2.0, 3.0, 4.0, 5.0]).verdict == "below"
    # Fewer say nothing.
    finding = judged(100.0, [1.0, 1.1, 1.2, 1.3])
    assert (finding.band, finding.verdict, finding.num_executions) == (None, "too few to say", 4)
    drift = find_drift(subject(step_speedup=1.0), before([1.0, 1.1, 1.2, 1.3]), CONFIG)
    assert drift.summary == "Comparable executions before this one: 4. Fewer than 5 say nothing."
    assert drift_tags(drift)["drift.verdict"] == "too few to say"
    assert drift_metrics(drift) == {"drift/num_executions": 4.0, "drift/num_outside": 0.0}


def test_the_false_alarm_rate_is_shared_by_all_results_that_are_judged() -> None:
    # Two results: each at 97.5 %, where t of 4 degrees of freedom is 3.4954: 3 -+ 3.4954 * 1.5811 * 1.0954.
    earlier = [execution(str(v), step_speedup=v, generation_speedup=v) for v in (1.0, 2.0, 3.0, 4.0, 5.0)]
    drift = find_drift(subject(step_speedup=3.0, generation_speedup=3.0), earlier, CONFIG)
    for finding in drift.findings:
        assert finding.band == pytest.approx((3 - 6.0541, 3 + 6.0541), abs=1e-3)
    # One that only four have is not judged, and takes no part of the rate.
    fewer = [replace(each, metrics={**each.metrics, "result/generation_speedup": float("nan")}) for each in earlier[:1]]
    drift = find_drift(subject(step_speedup=3.0, generation_speedup=3.0), fewer + earlier[1:], CONFIG)
    verdicts = {finding.name: finding.verdict for finding in drift.findings}
    assert verdicts == {"generation_speedup": "too few to say", "step_speedup": "within"}
    assert drift.findings[1].band == pytest.approx((-1.8089, 7.8089), abs=1e-3)


OLD_AND_NEW = [1.0, 1.01, 1.02, 1.01, 1.0, 9.0, 0.1]  # the newest come first


@pytest.mark.parametrize(
    ("value", "earlier", "changed", "name", "verdict"),
    [
        (2.019, [2.0] * 6, {}, "step_speedup", "within"),  # 1 % of the mean, 2, is the smallest that counts
        (2.021, [2.0] * 6, {}, "step_speedup", "above"),
        (0.209, [0.2] * 6, {}, "reward_speculative", "within"),  # 0.01 of a reward, of any mean
        (0.189, [0.2] * 6, {}, "reward_speculative", "below"),
        (2.0, OLD_AND_NEW, {"num_executions": 5}, "step_speedup", "above"),  # only the last ones count
        (2.0, OLD_AND_NEW, {"num_executions": 7}, "step_speedup", "within"),
    ],
)
def test_a_verdict_follows_the_last_executions_and_the_smallest_change_that_counts(
    value: float, earlier: list[float], changed: dict[str, Any], name: str, verdict: str
) -> None:
    assert judged(value, earlier, config=replace(CONFIG, **changed), name=name).verdict == verdict


@pytest.mark.parametrize(
    ("change", "counts"),
    [
        ({}, True),
        ({"status": "FAILED"}, True),  # by an alert, after its results were written
        ({"name": "now"}, False),
        *(({"metrics": metrics}, False) for metrics in ({}, {"result/lossless": 0.0, "result/hours": 1.0})),
        ({"metrics": {"result/hours": 1.0}}, True),  # the autoregressive arm alone, which has no certificate
        ({"tags": {**TAGS, "workload": "rl_think"}}, False),
        ({"tags": {**TAGS, "hardware": "4 x NVIDIA GB200"}}, False),
        ({"tags": {**TAGS, "dtype": "bfloat16"}}, False),
        ({"params": {**PARAMS, "grpo.group_size": "16"}}, False),
        ({"params": {**PARAMS, "tuning.candidate_ks": "[0, 5]"}}, False),
        ({"params": {**PARAMS, "engine.max_restarts": "9"}}, True),
        ({"params": {"grpo.seed": "0", "a.field_that_went": "1"}}, True),
    ],
)
def test_an_execution_counts_if_its_settings_are_the_same(change: dict[str, Any], counts: bool) -> None:
    other = replace(execution("other"), **change)
    assert (comparable(subject(), [other], CONFIG) == [other]) is counts


def test_repetitions_with_other_seeds_count_once_and_with_the_same_seed_each() -> None:
    others = [execution(f"one-{i}", seed=1) for i in range(6)] + [execution("two", seed=2)]
    own = [execution(f"own-{i}") for i in range(5)]
    assert [e.name for e in comparable(subject(), others + own[:2], CONFIG)] == ["one-0", "two", "own-0"]
    assert comparable(subject(), others + own[:3], CONFIG) == own[:3]  # too few either way: those are more
    assert comparable(subject(), others + own, CONFIG) == own
    many = [execution(f"seed-{i}", seed=i) for i in range(1, 9)]
    assert comparable(subject(), many + own[:4], CONFIG) == [*many, own[0]]
    assert comparable(subject(), many + own, CONFIG) == own


@pytest.mark.parametrize(("control", "is_judged"), [(0.89, False), (0.91, True)])
def test_a_speedup_without_a_verdict_is_not_judged_and_judges_none(control: float, is_judged: bool) -> None:
    own = subject(step_speedup=9.0, reward_speculative=0.5)
    earlier = [execution(str(i), step_speedup=1.5 + i / 100, reward_speculative=0.5) for i in range(5)]
    changed = {"result/control_ratio": control}
    drift = find_drift(replace(own, metrics={**own.metrics, **changed}), earlier, CONFIG)
    kinds = {finding.name: finding.verdict for finding in drift.findings}
    assert kinds == {"step_speedup": "above" if is_judged else "not measured", "reward_speculative": "within"}
    assert ("Not measured: step speedup." in drift.summary) is not is_judged
    bad = [replace(each, metrics={**each.metrics, **changed}) for each in earlier]
    assert [each.num_executions for each in find_drift(own, bad, CONFIG).findings] == [5 if is_judged else 0, 5]


def test_what_drifted_is_named_with_its_value_and_band_and_has_a_row_on_the_page() -> None:
    earlier = [execution(str(i), step_speedup=1.5 + i / 100, reward_speculative=0.5) for i in range(5)]
    drift = find_drift(subject(step_speedup=1.0, reward_speculative=0.5), earlier, CONFIG)
    # Mean 1.52, s 0.015811, t 3.4954: half a band of 0.0605.
    assert drift.summary == "Drift against the 5 executions before: step speedup 1 lies below 1.459 to 1.581."
    assert drift.executions == ("0", "1", "2", "3", "4")
    assert [finding.name for finding in drift.outside] == ["step_speedup"]
    assert drift_tags(drift) == {"drift.verdict": "step_speedup below", "drift.summary": drift.summary}
    metrics = {"num_executions": 5.0, "num_outside": 1.0, "step_speedup": -1.0, "reward_speculative": 0.0}
    metrics |= {"step_speedup_low": 1.45946, "step_speedup_high": 1.58054}
    metrics |= {"reward_speculative_low": 0.49, "reward_speculative_high": 0.51}
    assert drift_metrics(drift) == pytest.approx({f"drift/{name}": each for name, each in metrics.items()}, abs=1e-4)
    page = page_text(RECORD, drift=drift)
    assert (
        '<tr class="loses"><th>step speedup</th><td class="">1.000</td><td class="">1.459 to 1.581</td>'
        '<td class="">5</td><td class="">below</td></tr>'
    ) in page
    assert '<tr class=""><th>reward, speculative</th><td class="">0.500</td><td class="">0.490 to 0.510</td>' in page
    assert "At most 5.0 % of executions" in page
    assert "Compared with 0, 1, 2, 3, 4." in page


def test_where_nothing_drifts_there_are_no_more_alarms_than_promised() -> None:
    random = np.random.default_rng(3)
    names = ("step_speedup", "generation_speedup", "mean_acceptance_length", "reward_speculative")
    alarms = 0
    for _ in range(400):
        drawn = [dict[str, float](zip(names, random.normal(3.0, 0.5, 4).tolist(), strict=True)) for _ in range(7)]
        earlier = [with_results(str(i), values) for i, values in enumerate(drawn[1:])]
        alarms += bool(find_drift(subject(**drawn[0]), earlier, CONFIG).outside)
    # 1 - (1 - 0.05 / 4)^4 = 0.049 of 400 are 19.6, with a standard deviation of 4.3.
    assert 7 <= alarms <= 33


def test_a_page_without_a_comparison_says_why_or_nothing() -> None:
    unknown = page_text(RECORD, drift=DriftRecord(summary="Unknown, for the server was away"))
    assert '<section id="drift"><h2>Drift</h2>\n<p>Unknown, for the server was away</p>\n</section>' in unknown
    assert 'id="drift"' not in page_text(RECORD)


def test_the_hardware_is_that_of_the_arms() -> None:
    base, spec = RECORD.arms
    assert setting_tags(RECORD)["hardware"] == "2 cores <no GPU>"
    arms = (replace(base, machine="a"), replace(spec, machine="a"))
    assert setting_tags(replace(RECORD, arms=arms))["hardware"] == "a"
    assert setting_tags(replace(RECORD, arms=(arms[0], replace(spec, machine="b"))))["hardware"] == "a; b"
