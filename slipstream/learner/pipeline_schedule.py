"""Forward and backward passes over the micro-batches of one update, by Megatron's schedule for the layout.

Legend: `T` tokens, `B` sequences, `H` hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from slipstream.learner.batches import MicroBatch, forward
from slipstream.learner.capture import Capture
from slipstream.learner.cpu import host

Result = dict[str, Tensor]
LossOf = Callable[[Tensor, MicroBatch], tuple[Tensor, Result]]
"""From the hidden states [T, B, H] of a micro-batch to its loss and to named scalars."""


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
