"""Passes over the micro-batches of one update, by Megatron's schedule for the layout, and the hidden states in them.

Legend: `T` tokens, `B` sequences, `H` hidden size, `A` layers read.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from slipstream.learner import parallel
from slipstream.learner.batches import MicroBatch, forward
from slipstream.learner.cpu import host

_CPU = torch.device("cpu")
_LAST = -1  # stands for what the output layer sees

Result = dict[str, Tensor]
LossOf = Callable[[Tensor, MicroBatch], tuple[Tensor, Result]]
"""From the hidden states [T, B, H] of a micro-batch to its loss and to named scalars."""


class Capture:
    """Collects the hidden states of the forward passes of one update, for a draft to learn from.

    The states are detached copies: no gradient of what is computed from them reaches the policy. Labels are the inputs
    shifted by one, so a sequence of T tokens has states for its first T - 1.

    Attributes:
        by_sequence: after `finish`, a pair by the sequence's index: [T, A H], and after the final norm [T, H].
    """

    def __init__(self, layer_ids: Sequence[int], *, device: torch.device = _CPU) -> None:
        """Keep the states on `device`."""
        self._layer_ids, self._device = layer_ids, device
        self._parts: dict[int, Tensor] = {}
        self.by_sequence: dict[int, tuple[Tensor, Tensor]] = {}

    @contextlib.contextmanager
    def of(self, gpt: GPTModel, batch: MicroBatch) -> Iterator[None]:
        """Capture the forward pass of the block, which reads `batch`, of this pipeline stage."""
        by_id: dict[int, Tensor] = {}  # [T, B, H]

        def keep(layer_id: int, module: torch.nn.Module, args: Any, output: Any) -> None:
            # A Megatron layer returns (hidden states, cross-attention context), embedding and norm their output alone.
            hidden: Tensor = (output[0] if isinstance(output, tuple) else output).detach()
            if gpt.config.sequence_parallel:  # this rank has computed a part of the tokens
                hidden = torch.cat(parallel.tensor_parallel_shards(hidden))
            by_id[layer_id] = hidden

        decoder: Any = gpt.decoder  # whose layers are declared as modules of any kind
        modules: dict[int, Any] = {layer.layer_number: layer for layer in decoder.layers}
        if gpt.pre_process:
            modules[0] = gpt.embedding
        if gpt.post_process:
            modules[_LAST] = decoder.final_layernorm
        with contextlib.ExitStack() as hooks:
            for layer_id in {*self._layer_ids, _LAST} & modules.keys():
                hook = modules[layer_id].register_forward_hook(functools.partial(keep, layer_id))
                hooks.callback(hook.remove)
            yield
        device, config = next(gpt.parameters()).device, gpt.config
        for index, (row, columns) in zip(batch.indices, batch.inputs.places, strict=True):
            # Zeros where another stage has the states.
            none_TH = torch.zeros(columns.stop - columns.start, config.hidden_size, dtype=config.params_dtype)
            found = (by_id.get(layer_id) for layer_id in (*self._layer_ids, _LAST))
            whole = [none_TH.to(device) if each is None else each[columns, row] for each in found]
            part = torch.cat(whole, dim=-1)  # [T, (A + 1) H], those after the final norm last
            self._parts[index] = part if parallel.num_pipeline_stages() > 1 else part.to(self._device)

    def finish(self) -> None:
        """Bring together what the stages of the pipeline have; all of them call it, after the last forward pass."""
        num_layers = len(self._layer_ids)
        for index in sorted(self._parts):
            states = parallel.sum_over_stages(self._parts.pop(index)).to(self._device)
            size = states.shape[-1] // (num_layers + 1)
            self.by_sequence[index] = states[:, : num_layers * size].contiguous(), states[:, -size:].contiguous()


def device_with_room(num_bytes: int, device: torch.device) -> torch.device:
    """Choose where states are kept: on the rank's device if they fill at most half of its free memory."""
    if device.type == "cpu":
        return device
    free, _ = torch.cuda.mem_get_info(device)
    return device if 2 * num_bytes <= free else _CPU


def hooked_layers(gpt: GPTModel, call: Callable[[], None]) -> list[RemovableHandle]:
    """Have `call` made after the forward and before the backward pass of each of this rank's layers.

    Until the handles are removed. It changes nothing in what the layers compute.
    """

    def backward(gradient: Tensor) -> None:
        del gradient
        call()

    def forward(module: torch.nn.Module, args: Any, output: Any) -> None:
        del module, args
        call()
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(backward)

    decoder: Any = gpt.decoder
    return [layer.register_forward_hook(forward) for layer in decoder.layers]


def run(
    module: torch.nn.Module,
    gpt: GPTModel,
    batches: list[MicroBatch],
    loss_of: LossOf,
    *,
    forward_only: bool,
    capture: Capture | None = None,
) -> list[Result]:
    """Forward, and backward unless `forward_only`; the ranks of one model pass the same micro-batches.

    Args:
        module: `gpt`, or what wraps it to accumulate gradients.
    Returns:
        What `loss_of` named, by micro-batch that is not idle; empty except on the last pipeline stage.
    """
    if not batches:
        return []

    def forward_step(data: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Any]:
        batch = next(data)
        with host.model_arithmetic(), capture.of(gpt, batch) if capture else contextlib.nullcontext():
            output = forward(model, batch.inputs)

        def loss_func(hidden_TBH: Tensor) -> tuple[Tensor, Tensor, Result]:
            with host.model_arithmetic():
                loss, result = loss_of(hidden_TBH, batch) if batch.indices else _idle(hidden_TBH)
            return loss, torch.zeros((), dtype=torch.int), result

        return output, loss_func

    with host.cuda_as_cpu(), torch.set_grad_enabled(not forward_only):
        results = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=[module],
            num_microbatches=len(batches),
            seq_length=max(batch.labels_BT.shape[1] for batch in batches),
            micro_batch_size=max(len(batch.labels_BT) for batch in batches),
            forward_only=forward_only,
        )
    return [result for result, batch in zip(results, batches, strict=False) if batch.indices]


def _idle(hidden_TBH: Tensor) -> tuple[Tensor, Result]:
    """No loss, yet one that goes backward: gradients of other ranks' tokens pass through this rank's experts."""
    return hidden_TBH.sum() * 0.0, {}
