"""Figures of a report worked by hand from a small record, and pages that render whatever the run lacks."""

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from slipstream.records.files import read_record
from slipstream.records.run import RunRecord
from slipstream.records.steps import DynamicSampling
from slipstream.report import figures
from slipstream.report.page import draw, render_page, report_json, write_report
from slipstream.report.results import description, terminal_table
from slipstream.report.sentences import accuracy_text, verdict
from slipstream.report.summary import accuracy_difference, summarise, summarise_arms
<<<<<<< HEAD
from slipstream.report.tables import accuracy_table, count_table, speedup_table
=======
from slipstream.report.tables import accuracy_table, count_table, data_table
>>>>>>> hunt-report
from slipstream.simulator.reference import read_reference
from slipstream.types import Arm
from tests.unit.report.handmade import (
    ASYNCHRONOUS,
    BARE,
    CERTIFICATE,
    CURVES,
    DRAFT,
    GOLDEN,
    LOST,
    ONE_ARM,
    ONE_STEP,
    RECORD,
    TWO_STEPS,
    alone,
    page_text,
    right,
    with_steps,
)


def test_the_json_and_the_terminal_table_of_a_kept_run_are_the_kept_ones() -> None:
    """Ten digits of every figure, for the last bits of a logarithm differ between processors."""

    def rounded(text: str) -> str:
        return json.dumps(json.loads(text, parse_float=lambda digits: f"{float(digits):.10g}"))

    made = json.dumps(report_json(read_record(RunRecord, GOLDEN / "run.json")), allow_nan=False)
    assert rounded(made) == rounded((GOLDEN / "report.json").read_text())
    kept = (GOLDEN / "terminal.txt").read_text()
    assert max(map(len, kept.splitlines())) <= 100
    assert terminal_table(ASYNCHRONOUS) + "\n" == kept
    plain = terminal_table(RECORD).splitlines()
    assert plain == kept.splitlines()[: len(plain)]


@pytest.mark.parametrize(
    ("model", "first"), [("scratch", "generation speedup"), ("org/name", "reward, autoregressive")]
)
def test_the_header_leads_with_what_a_given_policy_learned(model: str, first: str) -> None:
    page = page_text(replace(RECORD, policy=replace(RECORD.policy, model=model)))
    assert re.findall(r"<dt>([^<]*)</dt>", page)[0] == first


def test_json_holds_the_figures_worked_by_hand() -> None:
    got = summarise(RECORD)
    assert (got["recipe"], got["workload"], got["steps"]) == ("tiny", "rl_zero", 6)
    # Of 4.5, 6, 6, 6, 8: the percentiles lie at ranks 0.4 and 3.6.
    assert got["stages"]["autoregressive"]["generation"] == pytest.approx({"median_s": 6, "p10_s": 5.1, "p90_s": 7.2})
    assert got["stages"]["speculative"]["train"] == pytest.approx({"median_s": 1.2, "p10_s": 1.2, "p90_s": 1.2})
    assert got["step_wall_s"]["autoregressive"] == pytest.approx({"median_s": 8, "p10_s": 7.1, "p90_s": 9.2})
    # 56 and 28 of 70 drafts were accepted at positions 1 and 2: 1 + 84 / 70.
    assert got["acceptance"] == {"k": 2, "mean_acceptance_length": 2.2, "rate_by_position": [0.8, 0.4]}
    assert got["reward"] == {arm: [0.1, 0.2, 0.3, 0.3, 0.4, 0.5] for arm in ("autoregressive", "speculative")}


@pytest.mark.parametrize(("record", "value"), [(TWO_STEPS, 2.0), (ONE_STEP, 1.0), (ONE_ARM, None)])
def test_json_says_null_of_what_a_run_lacks(record: RunRecord, value: float | None) -> None:
    """The first of two steps warms up."""
    assert summarise(record)["speedup"]["generation"] == pytest.approx({"value": value, "ci95": None})
    assert summarise(LOST)["acceptance"] == {"k": 0, "mean_acceptance_length": 1.0, "rate_by_position": []}


def test_the_bound_is_amdahls_law_and_speedup_per_token_accounts_for_longer_responses() -> None:
    comparison = summarise_arms(RECORD.arms).comparison
    assert comparison is not None
    assert comparison.step_bound == pytest.approx(1 / (0.75 / 2.2 + 0.25))
    base, spec = RECORD.arms
    longer = replace(spec, steps=tuple(replace(s, num_response_tokens=150) for s in spec.steps))
    comparison = summarise_arms((base, longer)).comparison
    assert comparison is not None
    assert (comparison.generation.value, comparison.generation_per_token.value) == pytest.approx((2.0, 3.0))


@cache
def drawn() -> dict[str, str]:
    return draw(RECORD)


def test_page_has_every_section_and_each_losing_configuration_and_needs_nothing_from_elsewhere() -> None:
    page = render_page(RECORD, drawn=drawn())
    sections = re.findall(r'<section id="([a-z-]+)">', page)
    first = ["step-time", "speedup", "acceptance", "draft-length", "losslessness", "learning"]
    assert sections == [*first, "counts", "policy-and-draft", "data", "reproduce"]
    assert page.count("<svg") == 7
    losing = re.findall(r'<tr class="loses"><th>(\d+)</th>.*?>(\d\.\d\dx)<.*?</tr>', page)
    assert losing == [("5", "0.75x"), ("7", "0.50x")]
    assert "Step: faster (1.60x, 95 % interval 1.32 to 1.96). Generation: faster (2.00x, 95 % interval" in page
    assert "2 cores &lt;no GPU&gt;" in page
    assert not re.search(r"<script|<link|<img|@import|url\(http|src=", page)
    assert len(page.encode()) < 2_000_000
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', page)) <= set(ids)
    assert len(ids) == len(set(ids))


def test_a_column_is_measured_or_quoted_never_both() -> None:
    page = page_text(RECORD)
    label = "paper, measured (arXiv 2604.26779), 32 GB200"
    for heading in re.findall(r'<th colspan="\d+" class="group quoted">([^<]*)</th>', page):
        assert heading == label
    generation = re.search(r"<tr class=\"\"><th>generation</th>(.*?)</tr>", page)
    assert generation is not None
    measured = re.findall(r'<td class="">([^<]*)</td>', generation.group(1))
    quoted = re.findall(r'<td class="quoted">([^<]*)</td>', generation.group(1))
    assert measured == ["6.00", "5.10 to 7.20", "75 %", "3.00", "3.00 to 3.00", "60 %", "2.00x"]
    assert quoted == ["100.0", "56.6", "1.77x"]
    speedups = speedup_table(summarise_arms(RECORD.arms), read_reference().workloads["rl_zero"])
    assert [row.cells[-1] for row in speedups.rows] == ["1.77x", "", "1.41x", "", ""]


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        (LOST, "Speculation lost, so both arms ran without it (no k beat k=0)"),
        (ONE_STEP, "Step and generation: not measured. Too few timed steps for an interval: run more steps."),
        (ONE_ARM, "The autoregressive arm was trained alone. There is no speculative arm beside it, so no speedup is"),
        (BARE, "No GRPO step ran"),
    ],
)
def test_a_page_says_what_the_run_lacks(record: RunRecord, sentence: str) -> None:
    assert sentence in render_page(record)
    terminal_table(record)
    json.dumps(summarise(record), allow_nan=False)


@pytest.mark.parametrize("arm", Arm)
@pytest.mark.parametrize("record", [RECORD, ASYNCHRONOUS], ids=["synchronous", "asynchronous"])
def test_one_arm_alone_is_shown_without_any_ratio_to_another(record: RunRecord, arm: Arm) -> None:
    """Ratios that are left: of the sweep's draft lengths, and of the asynchronous loop to the same arm's other one."""
    other, run = next(each for each in Arm if each is not arm), alone(record, arm)
    page, table, told = page_text(run), terminal_table(run), description(run)
    of_this_arm = re.sub(r'<section id="(draft-length|asynchronous|losslessness)">.*?</section>', "", page, flags=re.S)
    assert not re.search(r"\d\.\d\dx", of_this_arm + table.partition("\nasynchronous")[0] + told)
    for text in (of_this_arm, table, told):
        assert "--arms both trains both" in text
        assert not re.search(r"\b(nan|inf|None|ratio)\b", text)
        assert "+0.400" in text  # the reward gained: 0.5 - 0.1
    assert table.splitlines()[0].split()[-1] == arm.value
    assert f"reward, {other.value}" not in page + table + told
    shown = re.findall(r'<section id="([a-z-]+)">', page)
    assert ("acceptance" in shown) == ("draft-length" in shown) == ("losslessness" in shown) == (arm is Arm.SPECULATIVE)
    assert "speedup" not in shown
    assert ("asynchronous" in shown) == bool(run.asynchronous)
    made = report_json(run)
    assert made["speedup"]["step"] == {"value": None, "ci95": None}
    assert (made["arms"], list(made["reward"]), made["verdict"]) == (arm.value, [arm.value], {})
    json.dumps(made, allow_nan=False)


_COUNTS = dict.fromkeys(("num_parameters", "num_training_tokens", "num_steps"), 0)
_NOTHING = {"losses": (), "heldout_rate_by_position": (), "heldout_mean_acceptance_length": None}
UNTRAINED = replace(DRAFT, method="ngram", init="none", **_COUNTS, **_NOTHING)


def test_a_page_of_lookups_shows_no_table_of_a_model_that_is_not_there_and_no_figure_of_acceptance_if_they_lost() -> (
    None
):
    text = page_text(replace(RECORD, draft=UNTRAINED))
    assert "Draft: ngram, without a model: drafts are looked up." in text
    assert "verifications without a draft are left out of the length" in text
    assert "accepted, given those before" in page_text(RECORD)
    assert "accepted, given those before" not in text
    given = replace(UNTRAINED, method="draft_model", num_parameters=7_000)
    used = "Draft: draft_model, 7\u00a0000 parameters, used without training."
    assert used in page_text(replace(RECORD, draft=given))
    text = render_page(replace(LOST, draft=UNTRAINED))
    assert "Nothing was drafted during RL: no k beat k=0.</p>" in text


def test_logical_gpus_and_different_hardware_are_said_and_no_others() -> None:
    logical = replace(RECORD, logical_gpus=True)
    (line,) = [line for line in terminal_table(logical).splitlines() if line.startswith("GPUs")]
    assert line.split(None, 2) == ["GPUs", "logical", "only counted; processes may have used CPUs"]
    assert len(line) <= 100
    assert "The GPUs were logical" in page_text(logical)
    assert summarise(logical)["logical_gpus"] is True
    assert "The GPUs were logical" not in page_text(RECORD)
    base, spec = RECORD.arms
    apart = replace(RECORD, arms=(replace(base, machine="x86_64, 2 cores"), replace(spec, machine="aarch64, 72 cores")))
    alike = replace(RECORD, arms=tuple(replace(arm, machine="x86_64, 2 cores") for arm in RECORD.arms))
    marked = verdict(apart)
    assert "autoregressive on x86_64, 2 cores, speculative on aarch64, 72 cores" in marked
    assert "different hardware" not in verdict(alike)


@pytest.mark.parametrize(
    ("counter", "label"),
    {
        "num_preemptions": "preempted rollouts (KV cache full)",
        "num_filtered": "rollouts left out of the loss (cut off)",
    }.items(),
)
def test_a_loss_of_rollouts_has_a_row_where_there_was_any(counter: str, label: str) -> None:
    assert label not in [row.label for row in count_table(summarise_arms(RECORD.arms)).rows]
    base, spec = RECORD.arms
    steps = tuple(replace(step, **{counter: 2}) for step in base.steps)
    rows = count_table(summarise_arms((replace(base, steps=steps), spec))).rows
    (row,) = [row for row in rows if row.label == label]
    assert row.cells == (str(2 * len(steps)), "0")


def test_what_was_sampled_in_place_of_groups_without_signal_is_summed_over_the_steps() -> None:
    """Of two steps one had too few groups with signal and the other too many: neither number hides the other."""
    few = {"num_batches": 3, "num_groups": 6, "num_with_signal": 1, "num_filled": 1, "num_surplus": 0}
    many = {"num_batches": 2, "num_groups": 4, "num_with_signal": 3, "num_filled": 0, "num_surplus": 1}
    sampled = {number: DynamicSampling(**each, extra_generation_s=1.5) for number, each in enumerate((few, many))}
    arms = with_steps(RECORD, lambda step: replace(step, dynamic_sampling=sampled.get(step.step))).arms
    plain, rows = (count_table(summarise_arms(each)).rows for each in (RECORD.arms, arms))
    assert {row.label: row.cells for row in rows[len(plain) :]} == {
        "batches of prompts sampled": ("5", "5"),
        "groups sampled": ("10", "10"),
        "groups with signal": ("4", "4"),
        "groups trained on": ("4", "4"),
        "groups without signal trained on": ("1", "1"),
        "groups with signal left out": ("1", "1"),
        "generation of further batches": ("3.0 s", "3.0 s"),
    }


def test_a_stage_that_the_arms_left_out_is_said_to_be_and_not_timed_as_zero() -> None:
    record = with_steps(
        RECORD, lambda step: replace(step, has_logprob_pass=False, times=replace(step.times, logprob_s=0.0))
    )
    (line,) = [line for line in terminal_table(record).splitlines() if line.startswith("logprob")]
    assert line.split() == ["logprob", "left", "out", "left", "out"]
    assert summarise(record)["stages_left_out"] == {"autoregressive": ["logprob"], "speculative": ["logprob"]}
    page = page_text(record)
    assert page.count(">left out<") == 2
    assert "the training pass gives the same log-probabilities" in page
    assert "the training pass gives the same log-probabilities" not in page_text(RECORD)


def test_report_is_written_as_page_and_json_without_figures_of_an_earlier_attempt(tmp_path: Path) -> None:
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "gone.svg").touch()
    write_report(RECORD, tmp_path)
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(json.dumps(report_json(RECORD)))
    assert (tmp_path / "report.html").read_text() == render_page(RECORD, drawn=drawn())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figures", "report.html", "report.json"]
    figures = {path.stem: path.read_text() for path in (tmp_path / "figures").iterdir()}
    assert figures == drawn()
    assert all(svg.startswith("<svg ") for svg in figures.values())


def test_quoted_speedups_agree_with_the_quoted_times() -> None:
    for workload in read_reference().workloads.values():
        base, spec = workload.autoregressive, workload.speculative
        assert base.generation_s / spec.generation_s == pytest.approx(workload.generation_speedup, abs=0.006)
        assert base.step_s / spec.step_s == pytest.approx(workload.step_speedup, abs=0.006)
        assert sum(base.by_stage().values()) == pytest.approx(base.step_s, abs=0.2)
        assert sum(spec.by_stage().values()) == pytest.approx(spec.step_s, abs=0.2)


def test_the_page_says_what_the_certificate_says() -> None:
    page = page_text(RECORD)
    assert "Verdict: <b>lossless</b>" in page
    assert "None of 2 tests rejects" in page
    assert re.search(r"first token</th>.*?>rejects<", page, re.DOTALL)
    assert "sharper by 0.012" in page
    assert "position in the sequence" not in page
    long = replace(CERTIFICATE, lengths_by_position={"0-63": 6.514, "64-127": 6.25})
    assert re.search(r"64-127</th>\s*<td[^>]*>6.25<", page_text(replace(RECORD, certificate=long)))
    unseen = replace(CERTIFICATE, detectable=(replace(CERTIFICATE.detectable[0], detectable_fraction=1.0),))
    assert re.search(r"variation a token:\s*none\.", page_text(replace(RECORD, certificate=unseen)))


def test_rows_that_a_data_sets_weight_left_out_are_in_its_table() -> None:
    data = replace(RECORD.data[0], num_read=RECORD.data[0].num_read + 7, num_left_out=7)
    _, read, *others = data_table(replace(RECORD, data=(data,))).rows[0].cells
    assert int(read.replace("\u00a0", "")) == sum(int(cell.replace("\u00a0", "")) for cell in others)


def test_accuracy_curves_go_from_the_start_over_the_points_of_training_to_the_end() -> None:
    def point(step: int, value: float) -> dict[str, object]:
        return {"step": step, "avg_at_k": value, "ci95": pytest.approx([value - 0.05, value + 0.05])}

    assert summarise(CURVES)["accuracy_by_step"] == {
        "autoregressive": [point(0, 0.1), point(2, 0.5), point(6, 0.3)],
        "speculative": [point(0, 0.1), point(1, 0.125), point(2, 0.5), point(6, 0.31)],
    }
    apart = summarise(ASYNCHRONOUS)["accuracy_by_step"]
    assert apart["speculative_asynchronous"] == [point(0, 0.1), point(6, 0.29)]
    assert summarise(ONE_ARM)["accuracy_by_step"] == {"autoregressive": []}


def test_the_page_shows_every_point_and_whether_the_arms_differ() -> None:
    assert [(row.label, row.cells[0]) for row in accuracy_table(CURVES).rows] == [
        *(("before RL", "0.100"), ("autoregressive, after step 2", "0.500"), ("autoregressive", "0.300")),
        *(("speculative, after step 1", "0.125"), ("speculative, after step 2", "0.500"), ("speculative", "0.310")),
    ]
    assert "After step 6 the accuracy of the speculative arm" in page_text(CURVES)
    assert figures.learning(CURVES) != figures.learning(RECORD)
    bare = replace(RECORD, evaluations=tuple(replace(each, avg_at_k=-1.5, ci95=None) for each in RECORD.evaluations))
    assert {row.cells[:2] for row in accuracy_table(bare).rows} == {("-1.500", "none")}
    assert summarise(bare)["accuracy_by_step"]["speculative"][0] == {"step": 0, "avg_at_k": -1.5, "ci95": None}
    assert figures.learning(bare) != figures.learning(RECORD)


@pytest.mark.parametrize(
    ("base", "spec", "said"),
    [
        ((0, 0, 0, 0, 0), (2, 2, 2, 2, 1), r"\+0\.450 \[.*\], paired .*: the arms differ"),
        ((0, 2, 1, 1, 1), (2, 0, 1, 1, 1), r"\+0\.000 \[.*: no difference beyond"),
        ((0,), (2,), r"\+0\.500, .*: too few problems for an interval"),
    ],
)
def test_accuracies_are_compared_where_both_have_one(base: tuple[int, ...], spec: tuple[int, ...], said: str) -> None:
    ends = right("autoregressive", *base), right("speculative", *spec)
    ended = replace(CURVES, evaluations=(*CURVES.evaluations[:1], *ends))
    assert re.match(f"After step 6 .* is {said}", accuracy_text(ended))
    assert "Asynchronous arms are evaluated" not in accuracy_text(ended)
    # Where the end is of other problems, or of one arm, the last common point is that of training.
    other = right("speculative", 4, 4, prompt_hash="other")
    found = accuracy_difference(replace(CURVES, evaluations=()))
    for left in ((ends[0],), (ends[0], other)):
        assert accuracy_difference(replace(ended, evaluations=left)) == found
    assert found is not None
    assert (found[0], found[1].value) == (2, 0.0)


def test_without_a_trained_policy_of_both_arms_no_accuracy_is_compared() -> None:
    assert accuracy_text(ONE_ARM) == accuracy_text(replace(RECORD, evaluations=RECORD.evaluations[:2])) == ""
    assert "evaluated only before and after RL" in accuracy_text(ASYNCHRONOUS)
