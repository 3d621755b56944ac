"""Megatron's mixture of experts on a CPU: its dispatcher waits for no stream, and its splits are lists."""

from __future__ import annotations

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor


def use_cpu_dispatchers(model: torch.nn.Module) -> None:
    """Give the layers of experts the dispatcher below."""
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            layer.token_dispatcher = _CpuDispatcher(
                layer.num_local_experts,
                layer.local_expert_indices,
                config=layer.config,
                pg_collection=get_default_pg_collection(),
            )


class _CpuDispatcher(MoEAlltoAllTokenDispatcher):
    """Where Megatron copies counts of tokens from the device, they become what gloo's all-to-all takes."""

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Tensor | None = None) -> Tensor | None:  # type: ignore[override]  # declared to return a tensor always
        if point == self.cuda_dtoh_point:
            for name in ("input_splits", "output_splits", "output_splits_tp"):
                splits: Tensor | None = getattr(self, name)
                if splits is not None:
                    setattr(self, name, splits.tolist())
        return tokens_per_expert
