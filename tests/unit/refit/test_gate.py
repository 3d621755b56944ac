"""The gate between a learner and engines that may lie about each thing the gate asks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

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

    def __init__(self) -> None:
        self.version, self.draft_version = 0, 0
        self.asked: list[object] = []

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
    """Two engines with one answer, the last one's changed by `lie`."""

    def __init__(self, *, num_wrong: int = 0, **lie: Any) -> None:
        self.lie, self.num_wrong = lie, num_wrong
        self.state = EngineState(policy_version=9, policy_digest="", draft_version=3, num_prefix_cache_resets=5)
        self.draft = weight_totals([part_fingerprints([held_whole("fc", DRAFT_TENSOR)])])
        self.hidden: LookupError | None = None
        self.hidden_draft: LookupError | None = None
        self.offsets = (0.0, 0.0)
        self.asked: list[object] = []

    def take(self, version: int, digest: str, draft_version: int | None) -> list[EngineState]:
        if draft_version is not None:
            digest_of_draft = f"draft {draft_version}"
            self.state = replace(self.state, draft_version=draft_version, draft_digest=digest_of_draft)
            self.draft = {"fc": 200 + draft_version}
        self.state = replace(
            self.state,
            policy_version=version,
            policy_digest=digest,
            num_prefix_cache_resets=self.state.num_prefix_cache_resets + 1,
        )
        return [self.state, replace(self.state, **self.lie)]

    def states(self) -> list[EngineState]:
        return [self.state] * 2

    def weight_dtypes(self, *, is_draft: bool) -> dict[str, str]:
        self.asked.append(("dtypes", is_draft))
        error = self.hidden_draft if is_draft else self.hidden
        if error is not None:
            raise error
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


class Channel:
    """Brings version after version; `counts` the bytes of each and keeps them, or not."""

    def __init__(self, engine: Engines, learner: Learner, *, counts: bool = True) -> None:
        self.engine, self.learner = engine, learner
        self.keeps_weights = self.takes_digest = counts
        self.kept_draft: int | None = None

    def start_export(self, policy_version: int, *, draft_version: int | None = None) -> Callable[[], Exported]:
        self.engine.asked.append(("export", policy_version, draft_version))
        self.learner.version = policy_version
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
    engine: Engines,
    *,
    learner: Learner | None = None,
    draft: Path | None = None,
    trains_draft: bool = False,
    config: RefitConfig | None = None,
    probes: Sequence[Sequence[int]] = (),
    counts: bool = True,
) -> RefitGate:
    learner = learner or Learner()
    return RefitGate(
        cast(Any, engine),  # neither is asked for what channels need
        cast(Any, learner),
        channel=Channel(engine, learner, counts=counts),
        draft=draft,
        trains_draft=trains_draft,
        config=config or RefitConfig(),
        probes=probes,
    )


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    save_file({"fc": DRAFT_TENSOR, "lm_head": DRAFT_TENSOR + 1}, tmp_path / "model.safetensors")
    return tmp_path


def test_the_channel_is_asked_to_bring_the_weights_and_all_tensors_are_compared(draft: Path) -> None:
    engine, learner = Engines(), Learner()
    check = gate(engine, learner=learner, draft=draft).refit(4)
    assert engine.asked == [
        ("dtypes", False),
        ("dtypes", True),
        ("export", 4, None),
        ("deliver", 4, None),
        ("fingerprints", False),
        ("fingerprints", True),
        "delivered",
    ]
    assert (check.num_tensors, check.probe_difference) == (8, None)  # seven of the policy, one of the draft
    assert 0 < check.elapsed_s < 60


def test_both_sides_are_asked_for_fingerprints_before_anybody_answers_and_the_learner_first() -> None:
    engine, learner = Engines(), Learner()
    learner.asked = engine.asked
    gate(engine, learner=learner).refit(4)
    assert engine.asked[1:] == [
        ("export", 4, None),
        "start",
        ("deliver", 4, None),
        ("fingerprints", False),
        "delivered",
        "wait",
    ]


def test_an_export_has_all_that_the_learner_knows_so_that_it_may_train_before_the_engines_have_it(draft: Path) -> None:
    engine, learner = Engines(), Learner()
    learner.asked = engine.asked
    parts = gate(engine, learner=learner, draft=draft, trains_draft=True)
    learner.draft_version = 6
    export = parts.export(4, draft_version=6)
    assert (export.version, export.draft_version, export.frees_learner) == (4, 6, True)
    assert engine.asked[2:] == [("export", 4, 6), "start", "start draft", "wait"]
    learner.version, learner.draft_version = 5, 7  # it has trained
    assert parts.deliver(export).num_tensors == 8
    assert engine.asked[6:] == [("deliver", 4, 6), ("fingerprints", False), ("fingerprints", True), "delivered"]


def test_an_export_is_delivered_again_to_an_engine_that_takes_a_lost_ones_place() -> None:
    engine, learner = Engines(), Learner()
    parts = gate(engine, learner=learner, config=RefitConfig(check_every_steps=2))
    parts.refit(3)
    export = parts.export(4)
    parts.deliver(export)
    learner.version = 5
    parts.engines_changed()
    assert parts.deliver(export).num_tensors == 1  # what the learner's fingerprints are known of
    assert parts.refit(5).num_tensors == 7


@pytest.mark.parametrize("hides", [False, True])
def test_the_learner_is_not_free_where_the_check_or_the_channel_needs_it_again(hides: bool) -> None:
    engine = Engines()
    engine.hidden = LookupError("packed") if hides else None
    parts = gate(engine, counts=hides, probes=PROBES)
    export = parts.export(4)
    assert not export.frees_learner
    assert (export.policy is None) == hides


def test_a_learner_that_fails_while_the_engines_answer_stops_the_run() -> None:
    class Lost(Learner):
        def start_fingerprints(
            self, dtypes: Mapping[str, str], turn: Turn, *, is_draft: bool = False
        ) -> Callable[[], dict[str, int]]:
            def wait() -> dict[str, int]:
                raise RuntimeError("learner rank 0 died")

            return wait

    engine = Engines()
    with pytest.raises(RuntimeError, match="learner rank 0 died"):
        gate(engine, learner=Lost()).refit(4)
    assert engine.asked[-1] == "delivered"


def test_after_an_engine_was_replaced_the_channel_takes_the_new_one_in_and_the_next_refit_is_checked_in_full() -> None:
    engine = Engines()
    checked = gate(engine, config=RefitConfig(check_every_steps=5))
    assert [checked.refit(version).num_tensors for version in (0, 1)] == [7, 1]
    checked.engines_changed()
    assert engine.asked[-1] == ("engines changed",)
    assert checked.refit(1).num_tensors == 7


def test_the_first_refit_compares_all_and_each_later_one_the_layers_whose_turn_it_is() -> None:
    checked = gate(Engines(), config=RefitConfig(check_every_steps=3))
    assert [checked.refit(version).num_tensors for version in range(7)] == [7, 1, 1, 5, 1, 1, 5]
    every_time = gate(Engines(), config=RefitConfig(check_every_steps=1))
    assert [every_time.refit(version).num_tensors for version in range(3)] == [7, 7, 7]


def test_a_draft_is_compared_when_it_is_its_layers_turn(draft: Path) -> None:
    engine = Engines()
    checked = gate(engine, draft=draft, config=RefitConfig(check_every_steps=2))
    assert [checked.refit(version).num_tensors for version in range(3)] == [8, 1, 7]
    assert engine.asked.count(("fingerprints", True)) == 2


def test_a_fault_in_a_layer_is_found_when_its_turn_comes() -> None:
    engine = Engines()
    checked = gate(engine, config=RefitConfig(check_every_steps=2))
    checked.refit(0)
    engine.num_wrong = 2
    assert checked.refit(1).num_tensors == 1
    with pytest.raises(RefitError, match="2 of 6 tensors differ: w0, w1"):
        checked.refit(2)


def test_an_engine_that_hides_its_tensors_is_probed_once_in_as_many_refits() -> None:
    engine = Engines()
    engine.hidden = LookupError("packed")
    checked = gate(engine, probes=PROBES, config=RefitConfig(check_every_steps=2))
    assert [checked.refit(version).probe_difference is None for version in range(4)] == [False, True, False, True]


def test_every_refit_over_a_channel_that_counts_no_bytes_is_checked_in_full() -> None:
    checked = gate(Engines(), config=RefitConfig(check_every_steps=3), counts=False)
    assert [checked.refit(version).num_tensors for version in range(4)] == [7, 7, 7, 7]


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
    checked = gate(Engines(**yaml.safe_load(given)))
    with pytest.raises(RefitError) as caught:
        checked.refit(4)
    assert str(caught.value) == expected


def test_an_engine_that_does_not_answer_a_refit_stops_the_run() -> None:
    class Lost(Engines):
        def take(self, version: int, digest: str, draft_version: int | None) -> list[EngineState]:
            return super().take(version, digest, draft_version)[:1]

    checked = gate(Lost())
    with pytest.raises(ValueError, match="zip"):
        checked.refit(4)


def test_the_state_is_checked_where_the_tensors_are_not() -> None:
    engine = Engines()
    checked = gate(engine, config=RefitConfig(check_every_steps=9))
    checked.refit(0)
    engine.lie = {"policy_version": 0}
    with pytest.raises(RefitError, match="engine 1 must hold policy version 1, got 0"):
        checked.refit(1)


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
    engine, learner = Engines(), Learner()
    engine.draft, learner.draft_version = {"fc": 203}, 3
    checked = gate(engine, learner=learner, draft=draft, trains_draft=True, config=RefitConfig(check_every_steps=9))
    checked.refit(4, draft_version=3)
    assert ("deliver", 4, None) in engine.asked  # the engines hold version 3
    learner.draft_version = 4
    assert checked.refit(5, draft_version=4).num_tensors == 2  # one layer of the policy, and all of the draft
    assert checked.refit(6, draft_version=4).num_tensors == 1  # it is not the draft's turn
    sent = [call for call in engine.asked if isinstance(call, tuple) and call[0] == "deliver"]
    assert sent == [("deliver", 4, None), ("deliver", 5, 4), ("deliver", 6, None)]
    assert learner.asked.count("start draft") == 2


def test_an_engine_that_starts_anew_gets_the_present_draft(draft: Path) -> None:
    engine, learner = Engines(), Learner()
    learner.draft_version = 7
    checked = gate(engine, learner=learner, draft=draft, trains_draft=True)
    checked.refit(4, draft_version=7)
    engine.state = replace(engine.state, draft_version=0)
    checked.engines_changed()
    checked.refit(4, draft_version=7)
    assert engine.asked.count(("deliver", 4, 7)) == 2


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        ({"draft_version": 3}, "engine 1 must hold draft version 7, got 3"),
        ({"draft_digest": "x"}, "engine 1 must read draft version 7 as the learner sent it, got other bytes"),
    ],
)
def test_a_trained_draft_that_did_not_arrive_stops_the_run(draft: Path, lie: dict[str, Any], message: str) -> None:
    with pytest.raises(RefitError, match=message):
        gate(Engines(**lie), draft=draft, trains_draft=True).refit(4, draft_version=7)


def test_an_engine_with_another_draft_than_the_learners_stops_the_run(draft: Path) -> None:
    learner = Learner()
    learner.draft_version = 8
    with pytest.raises(RefitError, match=r"^engine 0 must hold the draft to the last bit: 1 of 1 tensors differ: fc$"):
        gate(Engines(), learner=learner, draft=draft, trains_draft=True).refit(4, draft_version=7)


def test_a_draft_whose_tensors_are_hidden_is_left_to_acceptance(draft: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engines()
    engine.hidden_draft = LookupError("Traceback\n  in a worker\nLookupError: quantised\n")
    assert gate(engine, draft=draft).refit(4).num_tensors == 7
    assert caplog.messages == [
        "refit: the draft's tensors cannot be read (LookupError: quantised); acceptance alone guards it"
    ]


def test_hidden_tensors_without_probes_are_an_error() -> None:
    engine = Engines()
    engine.hidden = LookupError("quantised")
    with pytest.raises(LookupError, match="quantised"):
        gate(engine)


def test_hidden_tensors_are_compared_by_the_logprobs_of_probes(caplog: pytest.LogCaptureFixture) -> None:
    engine, learner = Engines(), Learner()
    engine.hidden = LookupError("Traceback\nLookupError: quantised")
    engine.offsets = (0.05, -0.02)  # one up, one down: their mean would cancel, their size must not
    with caplog.at_level(logging.WARNING):
        check = gate(engine, learner=learner, probes=PROBES).refit(4)
    assert (check.num_tensors, check.probe_difference) == (0, pytest.approx(0.05))
    assert engine.asked[-1] == learner.asked[-1] == ("token_logprobs", PROBES)
    assert ("fingerprints", False) not in engine.asked
    assert caplog.messages == [
        "refit: the engine's tensors cannot be read (LookupError: quantised); logprobs on 2 fixed prompts are compared "
        "instead"
    ]


@pytest.mark.parametrize(("offset", "shown"), [(0.2, "0.200"), (float("nan"), "nan")])
def test_probes_that_differ_stop_the_run(offset: float, shown: str) -> None:
    engine = Engines()
    engine.hidden = LookupError("quantised")
    engine.offsets = (0.0, offset)
    with pytest.raises(RefitError) as caught:
        gate(engine, probes=PROBES).refit(4)
    assert str(caught.value) == (
        "engine 1 must hold policy version 4: the logprobs of 3 probe tokens must lie within 0.1 of the learner's on "
        f"average, got {shown}"
    )


def test_probes_on_the_bound_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.refit.gate.MAX_PROBE_DIFFERENCE", 0.5)
    engine = Engines()
    engine.hidden = LookupError("quantised")
    engine.offsets = (0.0, 0.5)  # a half is exact in binary
    checked = gate(engine, probes=PROBES)
    assert checked.refit(4).probe_difference == 0.5


def test_new_engines_get_what_was_sent_last_though_the_learner_has_moved_on_and_no_tensor_is_compared(
    draft: Path,
) -> None:
    engine, learner = Engines(), Learner()
    passed = gate(engine, learner=learner, draft=draft, trains_draft=True)
    learner.draft_version = 1
    passed.refit(4, draft_version=1)
    learner.version = 5
    engine.state = replace(engine.state, policy_version=0, draft_version=0, num_prefix_cache_resets=0)
    passed.engines_changed()
    engine.asked.clear()

    assert passed.deliver_again(4)
    assert engine.asked == [("deliver", 4, 1), "delivered"]
    assert (engine.state.policy_version, engine.state.draft_version) == (4, 1)


def test_a_new_engine_gets_the_draft_that_the_others_hold_from_an_earlier_channel(draft: Path) -> None:
    """A learner that restarted at a checkpoint has the draft of that step, and so have the engines that it finds."""
    engine, learner = Engines(), Learner()
    engine.draft, learner.draft_version = {"fc": 203}, 3
    passed = gate(engine, learner=learner, draft=draft, trains_draft=True)
    passed.refit(4, draft_version=3)
    assert engine.asked[-5:-3] == [("export", 4, 3), ("deliver", 4, None)]
    engine.state = replace(engine.state, policy_version=0, draft_version=0, num_prefix_cache_resets=0)
    passed.engines_changed()
    assert passed.deliver_again(4)
    assert engine.state.draft_version == 3
    passed.refit(5, draft_version=3)
    assert ("export", 5, None) in engine.asked


def test_engines_that_have_the_draft_are_not_sent_it_again(draft: Path) -> None:
    engine, learner = Engines(), Learner()
    passed = gate(engine, learner=learner, draft=draft, trains_draft=True)
    learner.draft_version = 1
    passed.refit(4, draft_version=1)
    engine.asked.clear()
    assert passed.deliver_again(4)
    assert engine.asked == [("deliver", 4, None), "delivered"]


def test_nothing_can_be_delivered_again_before_something_was() -> None:
    assert not gate(Engines()).deliver_again(0)


def test_new_engines_that_took_other_bytes_are_refused() -> None:
    engine = Engines(policy_digest="other")
    passed = gate(engine)
    engine.lie = {}
    passed.refit(4)
    engine.lie = {"policy_digest": "other"}
    with pytest.raises(RefitError, match="engine 1 must read policy version 4 as the learner wrote it"):
        passed.deliver_again(4)


def test_a_channel_that_keeps_nothing_can_deliver_nothing_again() -> None:
    passed = gate(Engines(), counts=False)
    passed.refit(4)
    assert not passed.deliver_again(4)
