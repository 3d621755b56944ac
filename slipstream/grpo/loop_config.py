"""Config of the training loop: whether generation and training take turns or run at the same time, and how far apart.

Legend: version `v` of the policy is its weights after `v` steps; step `t` trains version `t` into `t + 1` on batch `t`.
"""

from __future__ import annotations

from enum import StrEnum

from slipstream.config import Checked, NonNegativeInt
from slipstream.types import LoopMode


class KvCache(StrEnum):
    """Treatment of a running sequence's keys and values when new weights enter; for `in_flight`."""

    KEEP = "keep"  # those of the old weights stay: no work, and a small bias in every later token of the sequence
    RECOMPUTE = "recompute"  # they are computed anew: one slow iteration, and tokens exactly of the version they carry


class TooOld(StrEnum):
    """Treatment of a group whose version would fall behind the bound before it is complete; for `in_flight`."""

    FINISH = "finish"  # training waits for it
    RESTART = "restart"  # its unfinished rollouts start anew under the newest weights: shorter ones gain a little


class LoopConfig(Checked, path="loop"):
    """Which loop trains, and by how many steps at most rollouts may lag behind the weights that learn from them."""

    mode: LoopMode = LoopMode.SYNCHRONOUS
    """Generation and training in turn, on batches of older policies at once, or with refits in mid-generation."""
    max_off_policy_steps: NonNegativeInt = 0
    """Steps by which rollouts may lag behind the policy that learns from them; 0 with `synchronous` alone."""
    kv_cache: KvCache = KvCache.RECOMPUTE
    """Use of a running sequence's keys and values when new weights enter. Set it with `mode: in_flight`."""
    too_old: TooOld = TooOld.FINISH
    """Treatment of a group that would fall behind the bound. Set it with `mode: in_flight`."""

    def _check(self) -> None:
        lag, is_in_flight = self.max_off_policy_steps, self.mode is LoopMode.IN_FLIGHT
        rule = f"must be 0 with loop.mode {LoopMode.SYNCHRONOUS.value}"
        fix = f"set loop.mode {LoopMode.ONE_STEP_OFF.value} or {LoopMode.IN_FLIGHT.value}"
        self._require(lag == 0 or not self.is_synchronous, "max_off_policy_steps", rule, fix)
        rule = f"must be >= 1 with loop.mode {LoopMode.IN_FLIGHT.value}"
        fix = "engines that run on while the policy learns are behind it"
        self._require(lag >= 1 or not is_in_flight, "max_off_policy_steps", rule, fix)
        fix = "no weights enter there while a rollout runs: leave it out, or set loop.mode in_flight"
        for name, default in (("kv_cache", KvCache.RECOMPUTE), ("too_old", TooOld.FINISH)):
            rule = f"must be {default.value} with loop.mode {self.mode.value}"
            self._require(getattr(self, name) is default or is_in_flight, name, rule, fix)

    @property
    def in_flight_kv_cache(self) -> KvCache | None:
        """Treatment that an engine refitted in flight is told; None where engines rest while new weights enter."""
        return self.kv_cache if self.mode is LoopMode.IN_FLIGHT else None

    @property
    def is_synchronous(self) -> bool:
        """True if generation and training take turns."""
        return self.mode is LoopMode.SYNCHRONOUS
