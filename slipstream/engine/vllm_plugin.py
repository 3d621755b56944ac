"""What vLLM loads in each of its processes (entry point `vllm.general_plugins`).

`register` installs the fixes of vLLM's sampling; `EngineProbe.check_sampler` proves at engine start that they reached
the process that samples.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms import current_platform

from slipstream.engine import model_weights, mtp_names, vllm_sampler, weight_transfer
from slipstream.refit.channel import Location, here
from slipstream.refit.fingerprint import Turn, WeightPart, part_fingerprints

_EAGLE3 = "eagle3"  # in vLLM's words


def register() -> None:
    """Install the sampler's fixes and the weight transfer. Safe to call again."""
    weight_transfer.register()
    vllm_sampler.install()


class EngineProbe:
    """Methods added to vLLM's worker (`worker_extension_cls`), called in every worker process by name."""

    def check_sampler(self) -> str:
        """Empty if this process samples with the requests' parameters and seeds, else what it does instead."""
        device = torch.device(current_platform.device_type)
        uses_v2: bool = self.use_v2_model_runner  # type: ignore[attr-defined]  # of the worker
        return vllm_sampler.broken_v2(device) if uses_v2 else vllm_sampler.broken_v1(device)

    def location(self) -> Location:
        """Where this rank computes."""
        device: torch.device = self.device  # type: ignore[attr-defined]  # of the worker
        return here(str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None)

    def received_digest(self) -> str:
        """Digest of the bytes that the last weight update of this rank read."""
        return self.weight_transfer_engine.received_digest  # type: ignore[attr-defined]  # of the worker

    def abandon_update(self) -> None:
        """End a weight update that began and was never finished, or no other could begin; the next brings all."""
        if self._weight_update_active:  # type: ignore[attr-defined]  # of the worker
            self.finish_weight_update()  # type: ignore[attr-defined]

    def weight_dtypes(self, is_draft: bool) -> dict[str, str]:
        """The tensors of the policy, or of the draft, that this rank holds parts of, and their types."""
        return {part.name: part.dtype for slot in self._slots(is_draft) for part in slot.parts}

    def weight_fingerprints(self, is_draft: bool, turn: Turn) -> dict[WeightPart, int]:
        """Fingerprints of the parts that this rank computes with and whose turn it is."""
        return part_fingerprints(slot.read() for slot in self._slots(is_draft) if turn.takes(slot.parts[0].name))

    def _slots(self, is_draft: bool) -> tuple[model_weights.Slot, ...]:
        # Both of vLLM's model runners have these two; the attributes behind them differ.
        runner: Any = self.model_runner  # type: ignore[attr-defined]  # of the worker that this class extends
        policy = runner.get_model()
        if not is_draft:
            return model_weights.slots(policy)
        draft = runner.get_draft_model()
        if draft is None:
            raise LookupError("the engine drafts without a model")
        method = self.vllm_config.speculative_config.method  # type: ignore[attr-defined]  # of the worker
        # The layer of an EAGLE-3 draft has no prefix in its checkpoint; a model that drafts is a checkpoint as it is.
        rename = (("model.", ""),) if method == _EAGLE3 else mtp_names.draft_names(draft)
        return model_weights.slots(draft, rename=rename, without=policy)
