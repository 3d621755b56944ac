"""What a vLLM engine holds, and how new weights get into it; `slipstream.refit` has the other side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slipstream.config import require
from slipstream.refit.channel import Location
from slipstream.refit.config import Channel, EngineState
from slipstream.refit.fingerprint import Turn, weight_totals


class VllmWeights:
    """The weights of one vLLM engine, and their versions."""

    def __init__(self, llm: Any, *, has_draft: bool) -> None:
        """Take an engine as it started.

        Args:
            llm: vLLM's `LLM`.
            has_draft: with weights of its own.
        """
        self._llm = llm
        self._has_draft = has_draft
        self._is_draft_updating = False
        self.policy_version = 0
        self.policy_digest = ""
        self.draft_version = 0
        self.draft_digest = ""
        self.num_prefix_cache_resets = 0

    def locations(self) -> list[Location]:
        """Where each of the engine's workers computes."""
        return self._llm.collective_rpc("location")

    def join_channel(self, channel: Channel, settings: dict[str, Any]) -> None:
        """Get ready to receive over `channel`; `settings` are what its sender says. Files can be read at any time."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        init = {"channel": channel, "settings": settings}
        self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init))

    def start_update(self, *, is_draft: bool) -> None:
        """What comes next is for the policy, or for the draft."""
        rule = "needs an engine whose draft has weights of its own"
        require(self._has_draft or not is_draft, "refit.draft", rule, is_draft)
        self._llm.collective_rpc("abandon_update")  # that of a refit in which another engine was lost
        (self._llm.start_draft_weight_update if is_draft else self._llm.start_weight_update)()
        self._is_draft_updating = is_draft

    def update(self, channel: Channel, settings: dict[str, Any]) -> None:
        """Receive some or all weights over `channel`."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        info = {"channel": channel, "settings": settings}
        self._llm.update_weights(WeightTransferUpdateRequest(update_info=info))

    def finish_update(self) -> None:
        """All weights have come.

        Raises:
            RuntimeError: the engine's ranks read different weights; the engine must not be used further.
        """
        self._llm.finish_weight_update()
        digests = set(self._llm.collective_rpc("received_digest"))
        if len(digests) > 1:
            raise RuntimeError("the engine's ranks read different weights in one update")
        if self._is_draft_updating:
            self.draft_digest = digests.pop()
        else:
            self.policy_digest = digests.pop()

    def weight_dtypes(self, *, is_draft: bool) -> dict[str, str]:
        """The tensors of the policy, or of the draft, that the engine's ranks hold, and their types.

        Raises:
            LookupError: a layer keeps its weights where nobody can read them.
        """
        return {
            name: dtype
            for rank in self._llm.collective_rpc("weight_dtypes", args=(is_draft,))
            for name, dtype in rank.items()
        }

    def weight_fingerprints(self, *, is_draft: bool, turn: Turn) -> dict[str, int]:
        """Fingerprints of the tensors that the engine computes with and whose turn it is, whatever each rank holds.

        Raises:
            RuntimeError: two ranks hold the same part with different values.
        """
        return weight_totals(self._llm.collective_rpc("weight_fingerprints", args=(is_draft, turn)))

    def state(self) -> EngineState:
        """Versions and counters that every refit must move."""
        return EngineState(
            policy_version=self.policy_version,
            policy_digest=self.policy_digest,
            draft_version=self.draft_version if self._has_draft else None,
            draft_digest=self.draft_digest,
            num_prefix_cache_resets=self.num_prefix_cache_resets,
        )

    def _read(self, path: Path, *, is_draft: bool) -> None:
        self.start_update(is_draft=is_draft)
        self.update(Channel.SHARED_MEMORY, {"path": str(path)})
        self.finish_update()
