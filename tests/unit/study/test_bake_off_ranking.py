"""Drafters are ranked by the step beside the arm that took turns with them; losers and dropouts are shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.drafts.config import DraftInit, DraftMethod, DraftOnline
from slipstream.records.files import read_record
from slipstream.records.steps import ArmRecord, DraftUpdate
from slipstream.report.reference import read_reference
from slipstream.study.bake_off_field import entrants
from slipstream.study.bake_off_page import write_bake_off
from slipstream.study.bake_off_ranking import (
    COST_HEADINGS,
    answer,
    bake_off_table,
    cells,
    cost_cells,
    judge,
    label,
    ranked,
    result_metrics,
    verdict,
)
from slipstream.study.bake_off_records import BakeOffRecord, Dropout, Entrant, Result
from slipstream.types import Arm
from tests.unit.report.handmade import accepted, step

ONLINE = Entrant(method=DraftMethod.EAGLE3, init=DraftInit.GENERAL, online=DraftOnline.ALWAYS)
NGRAM = Entrant(method=DraftMethod.NGRAM, init=None, online=DraftOnline.OFF)
SMALL = Entrant(method=DraftMethod.DRAFT_MODEL, init=DraftInit.IN_DOMAIN, online=DraftOnline.OFF)
DROPOUT = Dropout(entrant=SMALL, reason="RuntimeError: no <memory>")


def arm(generation_s: Sequence[float], *, accepted_tokens: Sequence[int] = (), training_s: float = 0.0) -> ArmRecord:
    """A warm-up step and then these; every step takes 2 s beside generation."""
    k = 2 if accepted_tokens else 0
    steps = []
    for i, seconds in enumerate((50.0, *generation_s)):
        drafted = accepted(10, accepted_tokens[min(i, len(accepted_tokens) - 1)], 0) if k else None
        made = step(i, generation_s=seconds, reward=0.5, acceptance=drafted)
        update = DraftUpdate(loss=1.0, num_updates=1, elapsed_s=training_s) if training_s else None
        steps.append(replace(made, draft_update=update))
    kind = Arm.SPECULATIVE if k else Arm.AUTOREGRESSIVE
    return ArmRecord(arm=kind, num_speculative_tokens=k, steps=tuple(steps), machine="2 cores")


BASE = arm([6, 14, 6])


def online() -> Result:
    """Autoregressive steps of 8, 16 and 8 s, its own of 4, 8 and 4: twice as fast in each."""
    own = arm([2, 6, 2], accepted_tokens=[2, 4, 6, 8], training_s=0.25)
    return judge(ONLINE, own, BASE, pretraining_s=120.0)


def ngram() -> Result:
    """Steps of 10, 20 and 10 s: it loses in each."""
    return judge(NGRAM, arm([8, 18, 8], accepted_tokens=[1]), BASE, pretraining_s=0.0)


def record(*results: Result) -> BakeOffRecord:
    return BakeOffRecord(
        execution="bake",
        recipe="tiny",
        workload="rl_zero",
        dtype="float32",
        results=ranked(results),
        dropouts=(DROPOUT,),
    )


def test_speedups_are_paired_by_step_and_leave_out_the_warm_up() -> None:
    result = online()
    assert result.step.value == pytest.approx(2.0)
    assert result.step.ci95 == pytest.approx((2.0, 2.0))  # without pairing 16 / 4 would be in it
    assert result.generation.value == pytest.approx(3.0)  # medians 6 and 2
    assert (result.first_acceptance_length, result.last_acceptance_length) == (1.2, 1.8)
    assert result.mean_acceptance_length == pytest.approx(1.5)


def test_pretraining_is_repaid_by_what_a_step_saves() -> None:
    assert online().saved_s == pytest.approx(4.0)  # medians 8 and 4
    shown = dict(zip(COST_HEADINGS, cost_cells(online()), strict=True))
    assert [shown[name] for name in ("pretraining", "repaid after", "training a step")] == [
        "120 s",
        "30 steps",
        "0.25 s",
    ]
    assert cost_cells(ngram())[1:4] == ["-", "-", "-"]
    assert cost_cells(replace(ngram(), pretraining_s=1.0))[2] == "never"


def test_the_loser_is_last_and_called_one() -> None:
    found = record(ngram(), online())
    assert [result.entrant for result in found.results] == [ONLINE, NGRAM]
    assert [verdict(result) for result in found.results] == ["faster", "LOSES to autoregressive"]
    assert answer(found).startswith("EAGLE-3, general prompts, trained every step has the shortest step: 2.00x")
    assert answer(record(ngram())).startswith("No drafter makes a step faster")
    assert answer(record()) == "No drafter came to a result."


def test_published_figures_stand_in_columns_of_their_own() -> None:
    text = bake_off_table(record(ngram(), online()), read_reference())
    *_, beside, dropped = text.split("\n\n")
    header, _, first, last = beside.splitlines()
    assert header.split("paper: ")[1:] == ["acceptance length  ", "generation speedup"]
    assert first.split()[-2:] == ["3.04", "1.63x"]  # EAGLE-3, UltraChat + Magpie, online
    assert last.split()[-2:] == ["2.47", "0.70x"]
    assert dropped == "draft_model-in_domain-off DROPPED OUT: RuntimeError: no <memory>"


def test_the_printed_tables_fit_a_terminal() -> None:
    field = entrants([DraftMethod.EAGLE3], [DraftInit.IN_DOMAIN], [DraftOnline.WHEN_STALE])
    text = bake_off_table(record(replace(online(), entrant=field[0])), read_reference())
    assert max(map(len, text.splitlines())) <= 120


def test_the_page_shows_the_loser_and_who_dropped_out(tmp_path: Path) -> None:
    html, figure, json = write_bake_off(record(ngram(), online()), tmp_path)
    page = html.read_text()
    assert page.count('<tr class="loses">') == 2  # in the table of speeds, and in that of dropouts
    assert "RuntimeError: no &lt;memory&gt;" in page
    assert "arXiv 2604.26779" in page
    assert figure.read_text().startswith("<svg")
    assert read_record(BakeOffRecord, json) == record(ngram(), online())


@pytest.mark.parametrize("entrant", entrants(list(DraftMethod), list(DraftInit), list(DraftOnline)), ids=str)
def test_every_drafter_can_be_shown(entrant: Entrant) -> None:
    shown = cells(replace(online(), entrant=entrant))
    assert label(entrant).startswith(shown[0])


def test_metrics_have_every_drafter_and_the_best() -> None:
    metrics = result_metrics(record(ngram(), online()))
    assert metrics["result/step_speedup"] == metrics["result/step_speedup_eagle3_general_always"] == pytest.approx(2.0)
    assert metrics["result/generation_speedup_ngram_off"] == pytest.approx(0.75)
    assert (metrics["result/num_drafters"], metrics["result/num_dropouts"]) == (2.0, 1.0)
