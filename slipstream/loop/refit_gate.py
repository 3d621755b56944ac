"""The gate that every refit passes: the engines hold what the learner holds, and say so, or the run stops."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from slipstream.fingerprint import WeightPart, differences, file_fingerprints
from slipstream.records import RefitCheck
from slipstream.refit import RefitError, Snapshot
from slipstream.rollout.engine import EngineState

_NAMED = 5  # of the tensors that differ


class GatedEngine(Protocol):
    """Engines that take weights and show which they have."""

    def refit(
        self, policy: Path, *, policy_version: int, draft: Path | None = None, draft_version: int = 0
    ) -> list[EngineState]:
        """See `VllmEngine.refit`; one state an engine."""
        ...

    def weight_parts(self, *, is_draft: bool) -> list[WeightPart]:
        """See `VllmEngine.weight_parts`."""
        ...

    def weight_fingerprints(self, *, is_draft: bool) -> list[dict[str, str]]:
        """See `VllmEngine.weight_fingerprints`; one dict an engine."""
        ...

    def states(self) -> list[EngineState]:
        """See `VllmEngine.state`; one an engine."""
        ...


class Publisher(Protocol):
    """The learner, as far as a refit needs it."""

    def publish(self, directory: Path, version: int) -> Snapshot:
        """Write the weights where engines find them."""
        ...

    def weight_fingerprints(self, parts: Sequence[WeightPart]) -> dict[str, str]:
        """What the engine's parts must look like."""
        ...


class RefitGate:
    """Moves the learner's weights into the engines and checks that they arrived.

    After every refit the engines must have read the bytes that the learner wrote, hold the new version, and have reset
    their prefix caches, which they count. Every `check_every_steps`-th refit, and the first after a start or resume,
    also compares fingerprints of all tensors of policy and draft that the engines compute with to the learner's own.
    """

    def __init__(
        self,
        engine: GatedEngine,
        learner: Publisher,
        *,
        transfer: Path,
        draft: Path | None,
        check_every_steps: int = 1,
    ) -> None:
        """Ask the engines what they hold.

        Args:
            transfer: directory that learner and engines see.
            draft: directory of the draft that the engines must hold; None without one.
        """
        self._engine = engine
        self._learner = learner
        self._transfer = transfer
        self._check_every = check_every_steps
        self._states = engine.states()
        self._parts = engine.weight_parts(is_draft=False)
        self._draft_expected = None if draft is None else file_fingerprints(draft, engine.weight_parts(is_draft=True))
        self._num_refits = 0

    def refit(self, version: int) -> RefitCheck:
        """Bring the engines to the learner's present weights, as `version`.

        Raises:
            RefitError: an engine kept another version, did not reset its prefix cache, or holds other weights.
        """
        snapshot = self._learner.publish(self._transfer, version)
        states = self._engine.refit(Path(snapshot.path), policy_version=version)
        self._check_states(self._states, states, snapshot)
        self._states = states
        due = self._num_refits % self._check_every == 0
        self._num_refits += 1
        if not due:
            return RefitCheck(num_tensors=0, elapsed_s=0.0)
        start = time.perf_counter()
        num_tensors = self._check_weights(version)
        return RefitCheck(num_tensors=num_tensors, elapsed_s=time.perf_counter() - start)

    def _check_states(self, before: Sequence[EngineState], after: Sequence[EngineState], snapshot: Snapshot) -> None:
        version = snapshot.version
        for index, (old, new) in enumerate(zip(before, after, strict=True)):
            if new.policy_version != version:
                raise RefitError(f"engine {index} must hold policy version {version}, got {new.policy_version}")
            if new.policy_digest != snapshot.digest:
                raise RefitError(
                    f"engine {index} must read policy version {version} as the learner wrote it, got other bytes from "
                    f"{snapshot.path}"
                )
            if new.num_prefix_cache_resets != old.num_prefix_cache_resets + 1:
                raise RefitError(
                    f"engine {index} must reset its prefix cache with every refit, got {old.num_prefix_cache_resets} "
                    f"resets before policy version {version} and {new.num_prefix_cache_resets} after: cached prefixes "
                    "are stale"
                )
            if new.draft_version != old.draft_version:
                raise RefitError(
                    f"engine {index} changed its draft from version {old.draft_version} to {new.draft_version} "
                    f"while the policy alone was refitted to version {version}"
                )

    def _check_weights(self, version: int) -> int:
        # One after the other: on few cores the two slow each other many times over.
        expected = self._learner.weight_fingerprints(self._parts)
        for index, fingerprints in enumerate(self._engine.weight_fingerprints(is_draft=False)):
            _compare(expected, fingerprints, f"engine {index}", f"policy version {version}")
        if self._draft_expected is None:
            return len(expected)
        for index, fingerprints in enumerate(self._engine.weight_fingerprints(is_draft=True)):
            _compare(self._draft_expected, fingerprints, f"engine {index}", "the draft")
        return len(expected) + len(self._draft_expected)


def _compare(expected: Mapping[str, str], found: Mapping[str, str], engine: str, what: str) -> None:
    wrong = differences(expected, found)
    if wrong:
        more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise RefitError(
            f"{engine} must hold {what} to the last bit: {len(wrong)} of {len(expected)} tensors differ: "
            f"{', '.join(wrong[:_NAMED])}{more}"
        )
