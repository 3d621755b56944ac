"""The layer of a MiMo that predicts the token after the next, of Megatron's parts.

Megatron's own block for it (`MultiTokenPredictionBlock`) computes something else: it reads the states after the final
norm where MiMo reads those before it, joins embedding and state in the other order, and lets the first position see its
token. So the layer between input and output is Megatron's `TransformerLayer`, and the rest is written here.

Legend: `T` tokens, `B` sequences, `H` hidden size, `V` this rank's part of the vocabulary, `N` chosen tokens.

Source: vLLM's `mimo_mtp.py`, which follows XiaomiMiMo/MiMo-7B-RL.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slipstream.learner import collectives


class MtpLayer(MegatronModule):
    """A state and the token that followed it, to the state that predicts the token after that one."""

    def __init__(self, config: TransformerConfig, *, norm: Any, layer: ModuleSpec) -> None:
        """Without defined weights; `norm` and `layer` are made as those of the model are."""
        super().__init__(config=config)
        sizes = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.token_layernorm = build_module(norm, **sizes)
        self.hidden_layernorm = build_module(norm, **sizes)
        # Whole on every rank, as in vLLM: the states are.
        hidden = config.hidden_size
        self.input_proj = torch.nn.Linear(2 * hidden, hidden, bias=False, dtype=config.params_dtype)
        self.layer = build_module(layer, config=config)
        self.final_layernorm = build_module(norm, **sizes)

    def forward(
        self,
        states_TBH: Tensor,
        embeddings_TBH: Tensor,
        *,
        positions_BT: Tensor,
        angles_S11D: Tensor,
        packed: PackedSeqParams | None = None,
    ) -> Tensor:
        """[T, B, H], after a norm of its own: the output layer follows.

        Args:
            states_TBH: the residual stream after the last layer, before the final norm, of each position; or what this
                function gave for the position before, to draft further.
            embeddings_TBH: of the token that follows each position; position 0 does not see it.
            positions_BT: of the states; each sequence's 0, 1, …
            angles_S11D: of the rotary embedding, of each token, or of positions 0, 1, … if all sequences start there.
        """
        is_first_TB1 = (positions_BT == 0).t().unsqueeze(-1)
        tokens_TBH = self.token_layernorm(embeddings_TBH.masked_fill(is_first_TB1, 0.0))
        joined = torch.cat([self.hidden_layernorm(states_TBH), tokens_TBH], dim=-1)
        mixed_TBH, _ = self.layer(
            self.input_proj(joined), attention_mask=None, rotary_pos_emb=angles_S11D, packed_seq_params=packed
        )
        return self.final_layernorm(mixed_TBH)


def soft_cross_entropy(logits_NV: Tensor, targets_NV: Tensor) -> Tensor:
    """[N], with gradient to the logits: -sum over the whole vocabulary of p log q, in nats.

    Args:
        logits_NV: of q, this rank's part of the vocabulary, float32.
        targets_NV: p, the same part.
    """
    normalizer_N = _log_normalizer(logits_NV)
    dot_N = cast(Tensor, reduce_from_tensor_model_parallel_region((targets_NV * logits_NV).sum(-1)))
    return normalizer_N - dot_N


def probabilities(logits_NV: Tensor) -> Tensor:
    """[N, V], this rank's part of softmax over the whole vocabulary."""
    return (logits_NV - _log_normalizer(logits_NV)[:, None]).exp()


def logits_of(hidden_NH: Tensor, weight_VH: Tensor, temperature: float) -> Tensor:
    """[N, V] float32, this rank's part; the gradient of the states is that of all ranks' parts, the weight has none."""
    whole_NH = cast(Tensor, copy_to_tensor_model_parallel_region(hidden_NH))
    return (whole_NH @ weight_VH.detach().t()).float() / temperature


def _log_normalizer(logits_NV: Tensor) -> Tensor:
    """[N], of the whole vocabulary."""
    largest_N = logits_NV.detach().amax(-1)
    group = collectives.tensor_group()
    if group.size() > 1:
        torch.distributed.all_reduce(largest_N, op=torch.distributed.ReduceOp.MAX, group=group)
    mass_N = (logits_NV - largest_N[:, None]).exp().sum(-1)
    return largest_N + cast(Tensor, reduce_from_tensor_model_parallel_region(mass_N)).log()
