"""What vLLM loads in each of its processes (entry point `vllm.general_plugins`).

On a CPU, vLLM 0.32 as shipped biases every sampled speculative rollout and says nothing: the stand-in of one Triton
kernel fills a temporary copy, so temperature, top-k and top-p of the rejection sampler are uninitialised memory
(upstream issue #55005). `register` replaces that one function; `EngineProbe.check_sampler` proves at engine start
that the replacement reached the process that samples.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler

from slipstream.refit import engine_transfer, engine_weights
from slipstream.refit.fingerprint import WeightPart, part_fingerprints

SHIPPED_EXPAND = rejection_sampler.expand_batch_to_tokens
"""vLLM's own function: what the fault suite puts back to show that the certificate sees it."""


def register() -> None:
    """Install the sampler's fix (CPU only) and the weight transfer. Safe to call again."""
    engine_transfer.register()
    if current_platform.is_cpu():
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Repeat each request's value for each of its draft tokens.

    Args:
        x: [batch], one value a request; entries equal to `replace_from` become `replace_to`.
        cu_num_tokens: [batch], cumulative number of draft tokens.
    Returns:
        [num_tokens].
    """
    if replace_from != replace_to:
        x = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return torch.repeat_interleave(x, counts.long(), output_size=num_tokens)


class EngineProbe:
    """Methods added to vLLM's worker (`worker_extension_cls`), called in every worker process by name."""

    def check_sampler(self) -> str:
        """Empty if the rejection sampler of this process hands sampling parameters on, else what it does.

        The answer is known by hand: x = [7, 0, 9] with 2, 3 and 1 draft tokens and 0 -> 1 is [7, 7, 1, 1, 1, 9].
        """
        device = torch.device(current_platform.device_type)
        x = torch.tensor([7.0, 0.0, 9.0], device=device)
        ends = torch.tensor([2, 5, 6], dtype=torch.int32, device=device)
        got = rejection_sampler.expand_batch_to_tokens(x, ends, 6, replace_from=0, replace_to=1).tolist()
        return "" if got == [7.0, 7.0, 1.0, 1.0, 1.0, 9.0] else f"expand_batch_to_tokens gave {got}"

    def received_digest(self) -> str:
        """Digest of the bytes that the last weight update of this rank read."""
        return self.weight_transfer_engine.received_digest  # type: ignore[attr-defined]  # of the worker

    def weight_dtypes(self, is_draft: bool) -> dict[str, str]:
        """The tensors of the policy, or of the draft, that this rank holds parts of, and their types."""
        return {part.name: part.dtype for slot in self._slots(is_draft) for part in slot.parts}

    def weight_fingerprints(self, is_draft: bool) -> dict[WeightPart, int]:
        """Fingerprints of the parts that this rank computes with."""
        return part_fingerprints(slot.read() for slot in self._slots(is_draft))

    def _slots(self, is_draft: bool) -> tuple[engine_weights.Slot, ...]:
        # Both of vLLM's model runners have these two; the attributes behind them differ.
        runner: Any = self.model_runner  # type: ignore[attr-defined]  # of the worker that this class extends
        policy = runner.get_model()
        if not is_draft:
            return engine_weights.slots(policy)
        draft = runner.get_draft_model()
        if draft is None:
            raise LookupError("the engine drafts without a model")
        return engine_weights.slots(draft, rename=("model.", ""), without=policy)

    def reseed(self, seed: int) -> None:
        """Seed every generator of this process: drafts are sampled from torch's global one, whatever requests say."""
        torch.manual_seed(seed)
