"""Gate of every refit: the run stops unless all engines prove that they hold the learner's weights."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from slipstream.records.steps import RefitCheck
from slipstream.refit.channel import Delivery, Exported, ReceivingEngines, SendingLearner, WeightChannel
from slipstream.refit.config import EngineState, RefitConfig, RefitError
from slipstream.refit.fingerprint import ALL, Turn, differences, file_fingerprints

logger = logging.getLogger(__name__)

MAX_PROBE_DIFFERENCE = 0.1
"""Mean difference in nats a token between an engine and the learner over which the probes stop a run."""

_NAMED = 5  # differing tensors that an error names


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """A version of the learner's weights for the engines, with the fingerprints that the engines must report.

    Attributes:
        turn: selection of the policy's tensors that are compared.
        policy: waits for the learner's fingerprints of the policy; None if the engines hide their tensors.
        draft: waits for the fingerprints of the draft, from the learner or a file; None if no tensor is compared.
        frees_learner: True if the learner may change its weights before the delivery.
    """

    version: int
    draft_version: int | None
    weights: Exported
    turn: Turn
    draft_turn: Turn
    policy: Callable[[], dict[str, int]] | None
    draft: Callable[[], dict[str, int]] | None
    frees_learner: bool


class RefitGate:
    """Sends the learner's weights to the engines over a channel, and checks their arrival.

    After every refit each engine must have read the bytes that the learner sent, hold the new version, and have reset
    its prefix cache. The fingerprints of the engine's tensors, of policy and draft, must equal the learner's. Anything
    else is a RefitError. All tensors are compared at the first refit after a start or resume, and at every refit over a
    channel without digests. At other refits a selection of layers is compared, each layer once in `check_every_steps`.
    A draft that the learner trains is sent if an engine holds another version, and is then compared in full.

    An engine that hides the policy's tensors is compared by its logprobs on fixed prompts. Rounding limits that check:
    a failed refit is found, a lost step is not. Hidden tensors of a draft are left to the acceptance guard.

    A refit has two parts: `export` on the learner, and `deliver` on the engines. One thread may export while another
    calls `deliver_again`. Fingerprints are requested right behind the calls that change the weights, so no side waits
    for an answer in between.
    """

    def __init__(
        self,
        engine: ReceivingEngines,
        learner: SendingLearner,
        *,
        channel: WeightChannel,
        draft: Path | None,
        trains_draft: bool,
        config: RefitConfig,
        probes: Sequence[Sequence[int]] = (),
    ) -> None:
        """Read the engines' versions and tensor types.

        Args:
            draft: directory of the draft that the engines start with; None without a draft.
            probes: token sequences for engines that hide their tensors; without them such an engine is a LookupError.
        """
        self._engine = engine
        self._learner = learner
        self._channel = channel
        self._config = config
        self._probes = probes
        self._states: Sequence[EngineState] = engine.states()
        self._dtypes = self._readable_dtypes(is_draft=False)
        self._draft_dtypes: dict[str, str] = {}  # empty without a draft, and where its tensors are hidden
        self._draft_expected: dict[str, int] | None = None  # fingerprints of a fixed draft; None: the learner's
        if draft is not None:
            self._draft_dtypes = self._readable_dtypes(is_draft=True) or {}
            self._draft_expected = None if trains_draft else file_fingerprints(draft, self._draft_dtypes)
        self._trains_draft = trains_draft
        self._kept_draft: int | None = 0  # draft version that a new engine can be given: the start's, or as exported
        self._num_exports = 0  # since the last comparison of all tensors
        self._delivered: Export | None = None  # the version that all engines hold

    def engines_changed(self) -> None:
        """Read the versions of replaced engines, and compare all tensors at the next refit."""
        self._channel.engines_changed()
        self._states = self._engine.states()
        self._num_exports = 0

    def refit(self, version: int, *, draft_version: int | None = None) -> RefitCheck:
        """Send the learner's present weights to the engines as `version`, and a trained draft as `draft_version`."""
        return self.deliver(self._start(version, draft_version))

    def export(self, version: int, *, draft_version: int | None = None) -> Export:
        """Do the learner's part of `refit` and wait for it; the version before must be delivered."""
        started = self._start(version, draft_version)
        return replace(started, policy=_awaited(started.policy), draft=_awaited(started.draft))

    def deliver(self, export: Export) -> RefitCheck:
        """Do the engines' part of `refit`, again if an engine was lost in it."""
        finish = self._start_delivery(export)
        policy = export.policy and self._engine.start_fingerprints(is_draft=False, turn=export.turn)
        draft = export.draft and self._engine.start_fingerprints(is_draft=True, turn=export.draft_turn)
        finish()
        start = time.perf_counter()
        num_tensors = 0
        if policy is not None and export.policy is not None:
            num_tensors += _compare(export.policy(), policy(), f"policy version {export.version}")
        if draft is not None and export.draft is not None:
            num_tensors += _compare(export.draft(), draft(), "the draft")
        difference = self._check_probes(export.version) if self._dtypes is None and export.turn.index == 0 else None
        return RefitCheck(num_tensors=num_tensors, elapsed_s=time.perf_counter() - start, probe_difference=difference)

    def deliver_again(self, version: int) -> bool:
        """Load the last delivered version into all engines again, without the learner; False if that is impossible.

        Versions and digests are checked. Fingerprints are not, as the learner may hold newer weights.
        """
        export = self._delivered
        if export is None or not self._channel.keeps_weights:
            return False
        assert export.version == version, f"version {export.version} was delivered last, not {version}"
        self._start_delivery(export)()
        return True

    def _start(self, version: int, draft_version: int | None) -> Export:
        """Export the weights and begin the learner's fingerprints."""
        count = self._config.check_every_steps
        is_first = self._num_exports == 0 or not self._channel.takes_digest
        turn = ALL if is_first else Turn(index=self._num_exports % count, count=count)
        self._num_exports += 1
        exported_draft = None
        # An engine may hold this version from an earlier channel, and the one that replaces it does not.
        if self._needs_draft(draft_version) or (self._trains_draft and draft_version != self._kept_draft):
            exported_draft = self._kept_draft = draft_version
        draft_turn = turn if exported_draft is None else ALL
        exporting = self._channel.start_export(version, draft_version=exported_draft)
        policy = None if self._dtypes is None else self._learner.start_fingerprints(self._dtypes, turn)
        draft = self._start_draft_fingerprints(draft_turn)
        return Export(
            version=version,
            draft_version=draft_version,
            weights=exporting(),
            turn=turn,
            draft_turn=draft_turn,
            policy=policy,
            draft=draft,
            frees_learner=self._channel.keeps_weights and self._dtypes is not None,
        )

    def _start_delivery(self, export: Export) -> Callable[[], None]:
        """Begin to load an export into the engines; returns a function that waits, and checks what each engine says."""
        draft_version = export.draft_version if self._needs_draft(export.draft_version) else None
        delivering = self._channel.start_delivery(export.weights, draft_version=draft_version)

        def finish() -> None:
            delivery = delivering()
            for index, (old, new) in enumerate(zip(self._states, delivery.states, strict=True)):
                if fault := _fault(old, new, delivery, export.version, draft_version):
                    raise RefitError(f"engine {index} {fault}")
            self._states, self._delivered = delivery.states, export

        return finish

    def _needs_draft(self, draft_version: int | None) -> bool:
        return self._trains_draft and any(state.draft_version != draft_version for state in self._states)

    def _readable_dtypes(self, *, is_draft: bool) -> dict[str, str] | None:
        try:
            return self._engine.weight_dtypes(is_draft=is_draft)
        except LookupError as error:
            if not is_draft and not self._probes:
                raise
            whose = "draft" if is_draft else "engine"
            probed = f"logprobs on {len(self._probes)} fixed prompts are compared instead"
            instead = "acceptance alone guards it" if is_draft else probed
            reason = str(error).strip().splitlines()[-1]  # an error of another process contains a traceback
            logger.warning("refit: the %s's tensors cannot be read (%s); %s", whose, reason, instead)
            return None

    def _start_draft_fingerprints(self, turn: Turn) -> Callable[[], dict[str, int]] | None:
        """Begin the fingerprints of the draft, from its file or the learner; None if no tensor is selected."""
        if not any(map(turn.takes, self._draft_dtypes)):
            return None
        fixed = self._draft_expected
        if fixed is not None:
            return lambda: {name: value for name, value in fixed.items() if turn.takes(name)}
        return self._learner.start_fingerprints(self._draft_dtypes, turn, is_draft=True)

    def _check_probes(self, version: int) -> float:
        """Compute each engine's mean absolute logprob difference to the learner in nats; return the largest."""
        expected = np.concatenate(self._learner.token_logprobs(self._probes))
        worst = 0.0
        for index, answers in enumerate(self._engine.token_logprobs(self._probes)):
            difference = float(np.abs(np.concatenate(answers) - expected).mean())
            if not difference <= MAX_PROBE_DIFFERENCE:  # true for NaN too
                raise RefitError(
                    f"engine {index} must hold policy version {version}: the logprobs of {len(expected)} probe tokens "
                    f"must lie within {MAX_PROBE_DIFFERENCE} of the learner's on average, got {difference:.3f}"
                )
            worst = max(worst, difference)
        return worst


def _awaited(fingerprints: Callable[[], dict[str, int]] | None) -> Callable[[], dict[str, int]] | None:
    """Wait for fingerprints; returns a function that has them at hand."""
    if fingerprints is None:
        return None
    found = fingerprints()
    return lambda: found


def _fault(old: EngineState, new: EngineState, delivery: Delivery, version: int, draft_version: int | None) -> str:
    """Describe what is wrong with an engine's state after a delivery of these versions; empty if nothing is."""
    if new.policy_version != version:
        return f"must hold policy version {version}, got {new.policy_version}"
    if delivery.digest is not None and new.policy_digest != delivery.digest:
        return f"must read policy version {version} as the learner wrote it, got other bytes from {delivery.origin}"
    if new.num_prefix_cache_resets != old.num_prefix_cache_resets + 1:
        return (
            f"must reset its prefix cache with every refit, got {old.num_prefix_cache_resets} resets before policy "
            f"version {version} and {new.num_prefix_cache_resets} after: cached prefixes are stale"
        )
    if draft_version is None and new.draft_version != old.draft_version:
        return (
            f"changed its draft from version {old.draft_version} to {new.draft_version} while the policy alone was "
            f"refitted to version {version}"
        )
    if draft_version is not None and new.draft_version != draft_version:
        return f"must hold draft version {draft_version}, got {new.draft_version}"
    if delivery.draft_digest is not None and new.draft_digest != delivery.draft_digest:
        return f"must read draft version {draft_version} as the learner sent it, got other bytes"
    return ""


def _compare(expected: Mapping[str, int], engines: Sequence[Mapping[str, int]], what: str) -> int:
    """Refuse fingerprints that differ on an engine; returns the number of compared tensors."""
    for index, found in enumerate(engines):
        wrong = differences(expected, found)
        if wrong:
            more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
            raise RefitError(
                f"engine {index} must hold {what} to the last bit: {len(wrong)} of {len(expected)} tensors differ: "
                f"{', '.join(wrong[:_NAMED])}{more}"
            )
    return len(expected)
