"""The gate between a learner and engines that may lie about each thing the gate asks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file

from slipstream.refit.channel import Delivery, Exported
from slipstream.refit.config import EngineState, RefitConfig, RefitError
from slipstream.refit.fingerprint import Turn, held_whole, part_fingerprints, weight_totals
from slipstream.refit.gate import RefitGate
from tests.unit.refusals import rows

DTYPES = {f"w{i}": "float32" for i in range(5)} | {"w5.2": "float32", "w6.1": "float32"}
DRAFT_TENSOR = torch.tensor([1.0, 2.0])
PROBES = ((1, 2, 3), (4, 5))
LEARNER_LOGPROBS = (-1.0, -2.0, -3.0)


class Learner:
    """Its logprobs are those above, cut at the probes' lengths."""

    def __init__(self, asked: list[Any]) -> None:
        self.version, self.draft_version, self.asked = 0, 0, asked

    def start_fingerprints(
        self, dtypes: Mapping[str, str], turn: Turn, *, is_draft: bool = False
    ) -> Callable[[], dict[str, int]]:
        assert dtypes == ({"fc": "float32"} if is_draft else DTYPES)
        if is_draft:
            self.asked.append("start draft")
            return lambda: {name: 200 + self.draft_version for name in dtypes if turn.takes(name)}
        self.asked.append("start")

        def wait() -> dict[str, int]:
            self.asked.append("wait")
            return {name: 100 + self.version for name in dtypes if turn.takes(name)}

        return wait

    def token_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[Any]:
        self.asked.append(("token_logprobs", tuple(sequences)))
        return [np.array(LEARNER_LOGPROBS[:2], dtype=np.float32), np.array(LEARNER_LOGPROBS[2:], dtype=np.float32)]


class Engines:
    """Two engines with one answer, the last one's changed by `lie`, beside a learner; the list of calls is of both."""

    def __init__(
        self, *, num_wrong: int = 0, hidden: str = "", offsets: tuple[float, float] = (0.0, 0.0), **lie: Any
    ) -> None:
        self.lie, self.num_wrong, self.hidden, self.offsets = lie, num_wrong, hidden, offsets
        self.hidden_draft = ""
        self.state = EngineState(policy_version=9, policy_digest="", draft_version=3, num_prefix_cache_resets=5)
        self.draft = weight_totals([part_fingerprints([held_whole("fc", DRAFT_TENSOR)])])
        self.asked: list[Any] = []
        self.learner = Learner(self.asked)

    def take(self, version: int, digest: str, draft_version: int | None) -> list[EngineState]:
        if draft_version is not None:
            self.state = replace(self.state, draft_version=draft_version, draft_digest=f"draft {draft_version}")
            self.draft = {"fc": 200 + draft_version}
        num_resets = self.state.num_prefix_cache_resets + 1
        self.state = replace(
            self.state, policy_version=version, policy_digest=digest, num_prefix_cache_resets=num_resets
        )
        return [self.state, replace(self.state, **self.lie)]

    def start_anew(self, **state: int) -> None:
        """As engines that took the place of lost ones."""
        self.state = replace(self.state, **state)

    def states(self) -> list[EngineState]:
        return [self.state] * 2

    def weight_dtypes(self, *, is_draft: bool) -> dict[str, str]:
        self.asked.append(("dtypes", is_draft))
        if reason := self.hidden_draft if is_draft else self.hidden:
            raise LookupError(f"Traceback\n  in a worker\nLookupError: {reason}\n")
        return {"fc": "float32"} if is_draft else DTYPES

    def start_fingerprints(self, *, is_draft: bool, turn: Turn) -> Callable[[], list[dict[str, int]]]:
        self.asked.append(("fingerprints", is_draft))
        if is_draft:
            return lambda: [{name: value for name, value in self.draft.items() if turn.takes(name)}] * 2

        def wait() -> list[dict[str, int]]:
            right = dict.fromkeys(DTYPES, 100 + self.state.policy_version)
            held = [right, right | dict.fromkeys(list(DTYPES)[: self.num_wrong], 7)]
            return [{name: value for name, value in each.items() if turn.takes(name)} for each in held]

        return wait

    def token_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        self.asked.append(("token_logprobs", tuple(sequences)))
        return [
            [[value + offset for value in LEARNER_LOGPROBS[:2]], [value - offset for value in LEARNER_LOGPROBS[2:]]]
            for offset in self.offsets
        ]

    @property
    def moved(self) -> list[Any]:
        """What was exported and delivered, in order."""
        return [call for call in self.asked if call[0] in ("export", "deliver")]


class Channel:
    """Brings version after version; `counts` the bytes of each and keeps them, or not."""

    def __init__(self, engine: Engines, *, counts: bool) -> None:
        self.engine = engine
        self.keeps_weights = self.takes_digest = counts
        self.kept_draft: int | None = None

    def start_export(self, policy_version: int, *, draft_version: int | None = None) -> Callable[[], Exported]:
        self.engine.asked.append(("export", policy_version, draft_version))
        self.engine.learner.version = policy_version
        self.kept_draft = self.kept_draft if draft_version is None else draft_version
        return lambda: Exported(policy_version=policy_version)

    def start_delivery(self, exported: Exported, *, draft_version: int | None = None) -> Callable[[], Delivery]:
        version = exported.policy_version
        assert draft_version in (None, self.kept_draft)
        self.engine.asked.append(("deliver", version, draft_version))
        digest = f"digest {version}" if self.takes_digest else ""

        def wait() -> Delivery:
            self.engine.asked.append("delivered")
            return Delivery(
                states=self.engine.take(version, digest, draft_version),
                digest=digest or None,
                draft_digest=f"draft {draft_version}" if self.takes_digest and draft_version is not None else None,
                origin=f"weights {version}",
            )

        return wait

    def engines_changed(self) -> None:
        self.engine.asked.append(("engines changed",))


def gate(
    engine: Engines, draft: Path | None = None, *, every: int | None = None, counts: bool = True, **how: Any
) -> RefitGate:
    """A gate that compares all tensors in `every` so many refits; engines and learner are asked for nothing else."""
    fakes: Any = engine
    config = RefitConfig() if every is None else RefitConfig(check_every_steps=every)
    how = {"trains_draft": False, "config": config, "draft": draft} | how
    return RefitGate(fakes, fakes.learner, channel=Channel(engine, counts=counts), **how)


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    save_file({"fc": DRAFT_TENSOR, "lm_head": DRAFT_TENSOR + 1}, tmp_path / "model.safetensors")
    return tmp_path


def test_both_sides_are_asked_for_fingerprints_before_anybody_answers_and_the_learner_first(draft: Path) -> None:
    """The channel brings the weights, and all tensors are compared: seven of the policy, one of the draft."""
    engine = Engines()
    check = gate(engine, draft).refit(4)
    assert engine.asked == [
        *[("dtypes", False), ("dtypes", True), ("export", 4, None), "start", ("deliver", 4, None)],
        *[("fingerprints", False), ("fingerprints", True), "delivered", "wait"],
    ]
    assert (check.num_tensors, check.probe_difference) == (8, None)
    assert 0 < check.elapsed_s < 60


def test_an_export_has_all_that_the_learner_knows_so_that_it_may_train_before_the_engines_have_it(draft: Path) -> None:
    engine = Engines()
    learner, parts = engine.learner, gate(engine, draft, trains_draft=True)
    learner.draft_version = 6
    export = parts.export(4, draft_version=6)
    assert (export.version, export.draft_version, export.frees_learner) == (4, 6, True)
    assert engine.asked[2:] == [("export", 4, 6), "start", "start draft", "wait"]
    learner.version, learner.draft_version = 5, 7  # it has trained
    assert parts.deliver(export).num_tensors == 8
    assert engine.asked[6:] == [("deliver", 4, 6), ("fingerprints", False), ("fingerprints", True), "delivered"]


def test_an_export_is_delivered_again_to_an_engine_that_takes_a_lost_ones_place() -> None:
    engine = Engines()
    parts = gate(engine, every=2)
    parts.refit(3)
    export = parts.export(4)
    parts.deliver(export)
    engine.learner.version = 5
    parts.engines_changed()
    assert engine.asked[-1] == ("engines changed",)  # the channel takes the new one in
    assert parts.deliver(export).num_tensors == 1  # what the learner's fingerprints are known of
    assert parts.refit(5).num_tensors == 7  # and the next refit is checked in full


@pytest.mark.parametrize("hides", [False, True])
def test_the_learner_is_not_free_where_the_check_or_the_channel_needs_it_again(hides: bool) -> None:
    engine = Engines(hidden="packed" if hides else "")
    export = gate(engine, counts=hides, probes=PROBES).export(4)
    assert not export.frees_learner
    assert (export.policy is None) == hides


@pytest.mark.parametrize(
    ("every", "compared"), [(3, [7, 1, 1, 5, 1, 1, 5]), (1, [7, 7, 7])], ids=["every third", "all"]
)
def test_the_first_refit_compares_all_and_each_later_one_the_layers_whose_turn_it_is(
    every: int, compared: list[int]
) -> None:
    checked = gate(Engines(), every=every)
    assert [checked.refit(version).num_tensors for version in range(len(compared))] == compared


def test_every_refit_over_a_channel_that_counts_no_bytes_is_checked_in_full() -> None:
    checked = gate(Engines(), every=3, counts=False)
    assert [checked.refit(version).num_tensors for version in range(4)] == [7, 7, 7, 7]


def test_a_draft_is_compared_when_it_is_its_layers_turn(draft: Path) -> None:
    engine = Engines()
    checked = gate(engine, draft, every=2)
    assert [checked.refit(version).num_tensors for version in range(3)] == [8, 1, 7]
    assert engine.asked.count(("fingerprints", True)) == 2


@rows(
    """
policy_version: 3
    engine 1 must hold policy version 4, got 3
policy_digest: other
    engine 1 must read policy version 4 as the learner wrote it, got other bytes from weights 4
num_prefix_cache_resets: 5
    engine 1 must reset its prefix cache with every refit, got 5 resets before policy version 4 and 5 after: cached
    prefixes are stale
num_prefix_cache_resets: 7
    engine 1 must reset its prefix cache with every refit, got 5 resets before policy version 4 and 7 after: cached
    prefixes are stale
draft_version: 4
    engine 1 changed its draft from version 3 to 4 while the policy alone was refitted to version 4
"""
)
def test_an_engine_in_another_state_stops_the_run(given: str, expected: str) -> None:
    with pytest.raises(RefitError) as caught:
        gate(Engines(**yaml.safe_load(given))).refit(4)
    assert str(caught.value) == expected


def test_an_engine_that_does_not_answer_a_refit_stops_the_run() -> None:
    class Lost(Engines):
        def take(self, version: int, digest: str, draft_version: int | None) -> list[EngineState]:
            return super().take(version, digest, draft_version)[:1]

    with pytest.raises(ValueError, match="zip"):
        gate(Lost()).refit(4)


@pytest.mark.parametrize(
    ("num_wrong", "message"),
    [
        (1, "1 of 7 tensors differ: w0"),
        (5, "5 of 7 tensors differ: w0, w1, w2, w3, w4"),
        (6, "6 of 7 tensors differ: w0, w1, w2, w3, w4 and 1 more"),
    ],
)
def test_other_bits_stop_the_run_and_the_first_five_are_named(num_wrong: int, message: str) -> None:
    with pytest.raises(RefitError) as caught:
        gate(Engines(num_wrong=num_wrong)).refit(4)
    assert str(caught.value) == f"engine 1 must hold policy version 4 to the last bit: {message}"


def test_a_draft_that_the_learner_trains_is_sent_where_it_changed_and_compared_with_the_learners(draft: Path) -> None:
    engine = Engines()
    engine.draft, engine.learner.draft_version = {"fc": 203}, 3
    checked = gate(engine, draft, trains_draft=True, every=9)
    checked.refit(4, draft_version=3)  # the engines hold version 3
    engine.learner.draft_version = 4
    assert checked.refit(5, draft_version=4).num_tensors == 2  # one layer of the policy, and all of the draft
    assert checked.refit(6, draft_version=4).num_tensors == 1  # it is not the draft's turn
    assert engine.moved[1::2] == [("deliver", 4, None), ("deliver", 5, 4), ("deliver", 6, None)]
    assert engine.asked.count("start draft") == 2


def test_an_engine_that_starts_anew_gets_the_present_draft(draft: Path) -> None:
    engine = Engines()
    engine.learner.draft_version = 7
    checked = gate(engine, draft, trains_draft=True)
    checked.refit(4, draft_version=7)
    engine.start_anew(draft_version=0)
    checked.engines_changed()
    checked.refit(4, draft_version=7)
    assert engine.asked.count(("deliver", 4, 7)) == 2


@pytest.mark.parametrize(
    ("learners", "lie", "message"),
    [
        (7, {"draft_version": 3}, r"engine 1 must hold draft version 7, got 3"),
        (7, {"draft_digest": "x"}, r"engine 1 must read draft version 7 as the learner sent it, got other bytes"),
        (8, {}, r"^engine 0 must hold the draft to the last bit: 1 of 1 tensors differ: fc$"),
    ],
)
def test_a_trained_draft_that_did_not_arrive_as_the_learner_has_it_stops_the_run(
    draft: Path, learners: int, lie: dict[str, Any], message: str
) -> None:
    engine = Engines(**lie)
    engine.learner.draft_version = learners
    with pytest.raises(RefitError, match=message):
        gate(engine, draft, trains_draft=True).refit(4, draft_version=7)


def test_a_draft_whose_tensors_are_hidden_is_left_to_acceptance(draft: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engines()
    engine.hidden_draft = "quantised"
    assert gate(engine, draft).refit(4).num_tensors == 7
    assert caplog.messages == [
        "refit: the draft's tensors cannot be read (LookupError: quantised); acceptance alone guards it"
    ]


def test_hidden_tensors_are_compared_by_probes_in_their_turn(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(LookupError, match="quantised"):
        gate(Engines(hidden="quantised"))  # without probes
    engine = Engines(hidden="quantised", offsets=(0.05, -0.02))  # one up, one down: their mean cancels, not their size
    with caplog.at_level(logging.WARNING):
        checked = gate(engine, probes=PROBES, every=2)
        check = checked.refit(4)
    assert (check.num_tensors, check.probe_difference) == (0, pytest.approx(0.05))
    assert engine.asked[-2:] == [("token_logprobs", PROBES)] * 2
    assert ("fingerprints", False) not in engine.asked
    assert caplog.messages == [
        "refit: the engine's tensors cannot be read (LookupError: quantised); logprobs on 2 fixed prompts are compared "
        "instead"
    ]
    assert [checked.refit(version).probe_difference is None for version in (5, 6, 7)] == [True, False, True]


@pytest.mark.parametrize(("offset", "shown"), [(0.2, "0.200"), (float("nan"), "nan")])
def test_probes_that_differ_stop_the_run(offset: float, shown: str) -> None:
    with pytest.raises(RefitError) as caught:
        gate(Engines(hidden="quantised", offsets=(0.0, offset)), probes=PROBES).refit(4)
    assert str(caught.value) == (
        "engine 1 must hold policy version 4: the logprobs of 3 probe tokens must lie within 0.1 of the learner's on "
        f"average, got {shown}"
    )


def test_probes_on_the_bound_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.refit.gate.MAX_PROBE_DIFFERENCE", 0.5)
    checked = gate(Engines(hidden="quantised", offsets=(0.0, 0.5)), probes=PROBES)  # a half is exact in binary
    assert checked.refit(4).probe_difference == 0.5


def test_new_engines_get_what_was_sent_last_though_the_learner_has_moved_on(draft: Path) -> None:
    """And no tensor is compared."""
    engine = Engines()
    passed = gate(engine, draft, trains_draft=True)
    assert not passed.deliver_again(0)  # nothing was delivered
    engine.learner.draft_version = 1
    passed.refit(4, draft_version=1)
    engine.learner.version = 5
    engine.asked.clear()
    assert passed.deliver_again(4)
    assert engine.asked == [("deliver", 4, None), "delivered"]
    engine.start_anew(policy_version=0, draft_version=0, num_prefix_cache_resets=0)
    passed.engines_changed()
    engine.asked.clear()
    assert passed.deliver_again(4)
    assert engine.asked == [("deliver", 4, 1), "delivered"]
    assert (engine.state.policy_version, engine.state.draft_version) == (4, 1)


def test_a_new_engine_gets_the_draft_that_the_others_hold_from_an_earlier_channel(draft: Path) -> None:
    """A learner that restarted at a checkpoint has the draft of that step, and so have the engines that it finds."""
    engine = Engines()
    engine.draft, engine.learner.draft_version = {"fc": 203}, 3
    passed = gate(engine, draft, trains_draft=True)
    passed.refit(4, draft_version=3)
    assert engine.moved == [("export", 4, 3), ("deliver", 4, None)]
    engine.start_anew(policy_version=0, draft_version=0, num_prefix_cache_resets=0)
    passed.engines_changed()
    assert passed.deliver_again(4)
    assert engine.state.draft_version == 3
    passed.refit(5, draft_version=3)
    assert ("export", 5, None) in engine.asked


def test_a_channel_that_keeps_nothing_can_deliver_nothing_again() -> None:
    passed = gate(Engines(), counts=False)
    passed.refit(4)
    assert not passed.deliver_again(4)


def test_the_state_is_checked_where_the_tensors_are_not() -> None:
    engine = Engines()
    checked = gate(engine, every=9)
    checked.refit(0)
    engine.lie = {"policy_version": 0}
    with pytest.raises(RefitError, match="engine 1 must hold policy version 1, got 0"):
        checked.refit(1)


def test_new_engines_that_took_other_bytes_are_refused() -> None:
    engine = Engines()
    passed = gate(engine)
    passed.refit(4)
    engine.lie = {"policy_digest": "other"}
    with pytest.raises(RefitError, match="engine 1 must read policy version 4 as the learner wrote it"):
        passed.deliver_again(4)
