"""Reading hidden states out of a forward pass. Legend: `T` tokens, `B` sequences, `H` hidden size."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from slipstream.policy.batches import Batching, MicroBatch, Sequences, forward
from slipstream.policy.cpu import host


class CapturedStates:
    """Forward hooks, for the span of a `with`, on the residual stream and on the final norm."""

    def __init__(self, gpt: GPTModel, layer_ids: Sequence[int]) -> None:
        self._gpt, self._layer_ids = gpt, layer_ids
        self._by_id: dict[int, Tensor] = {}
        self._hooks: list[RemovableHandle] = []
        self._last: Tensor  # [T, B, H]

    def of(self, place: tuple[int, slice]) -> tuple[Tensor, Tensor]:
        """A sequence's states, [T, layer ids * H] and, after the final norm, [T, H]."""
        row, columns = place
        aux = torch.cat([self._by_id[layer_id][columns, row] for layer_id in self._layer_ids], dim=-1)
        return aux, self._last[columns, row]

    def __enter__(self) -> CapturedStates:
        """Attach the hooks."""
        decoder = self._gpt.decoder
        for layer_id in set(self._layer_ids):
            module = self._gpt.embedding if layer_id == 0 else decoder.layers[layer_id - 1]
            self._hooks.append(module.register_forward_hook(functools.partial(self._keep_layer, layer_id)))
        assert isinstance(decoder.final_layernorm, torch.nn.Module)
        self._hooks.append(decoder.final_layernorm.register_forward_hook(self._keep_last))
        return self

    def __exit__(self, *_: object) -> None:
        """Remove them."""
        for hook in self._hooks:
            hook.remove()

    def _keep_layer(self, layer_id: int, module: torch.nn.Module, args: Any, output: Any) -> None:
        # A Megatron layer returns (hidden states, cross-attention context), the embedding its output alone.
        self._by_id[layer_id] = output[0] if isinstance(output, tuple) else output

    def _keep_last(self, module: torch.nn.Module, args: Any, output: Tensor) -> None:
        self._last = output


class Capture:
    """Collects the hidden states of the forward passes of one update, for a draft to learn from.

    The states are detached copies: no gradient of what is computed from them reaches the policy. Labels are the inputs
    shifted by one, so a sequence of T tokens has states for its first T - 1.
    """

    def __init__(self, layer_ids: Sequence[int]) -> None:
        self._layer_ids = layer_ids
        self.by_sequence: dict[int, tuple[Tensor, Tensor]] = {}

    @contextlib.contextmanager
    def of(self, gpt: GPTModel, batch: MicroBatch) -> Iterator[None]:
        """Capture the forward pass of the block, which reads `batch`."""
        with CapturedStates(gpt, self._layer_ids) as captured:
            yield
        for index, place in zip(batch.indices, batch.inputs.places, strict=True):
            aux, last = captured.of(place)
            self.by_sequence[index] = aux.detach().cpu().clone(), last.detach().cpu().clone()


@torch.no_grad()
def hidden_states(
    gpt: GPTModel,
    token_ids: Sequences,
    layer_ids: Sequence[int],
    *,
    plan: Sequence[tuple[int, ...]],
    batching: Batching,
    device: torch.device,
) -> list[tuple[Tensor, Tensor]]:
    """For each sequence a pair of CPU tensors, ([T, len(layer_ids) * H], [T, H]), the second after the final norm.

    Args:
        plan: which sequences share a micro-batch, the longest of each first; none in one that only others need.
    """
    states: list[tuple[Tensor, Tensor] | None] = [None] * len(token_ids)
    for indices in plan:
        inputs = batching.inputs([token_ids[index] for index in indices] or [[0]], device)
        with host.cuda_as_cpu(), CapturedStates(gpt, layer_ids) as captured:
            forward(gpt, inputs)
        for index, place in zip(indices, inputs.places, strict=False):  # one that only others need has a place alone
            aux, last = captured.of(place)
            states[index] = aux.cpu(), last.cpu()
    return [pair for pair in states if pair is not None]
