"""RMSNorm and an EAGLE-3 draft's passes in eager engines on CPUs, with fewer operations than vLLM's.

vLLM's CPU build has kernels for RMSNorm, alone and behind a residual. Its layers compute either from six to eight
operations of torch instead, for a compiler to fuse, and an eager engine pays for each of them. Here an engine is
offered the kernels as a provider of vLLM's operations (`vllm_engine.OWN_NORMS`). In bfloat16 they round once, and are
not offered where they cut off instead.

A small draft's pass takes vLLM longer around its products than in them. Here the passes call the same kernels, with
slots, noise and vocabulary worked out once for all of them. The first pass also fills the draft's cache for all tokens
of the step, and beyond that it computes the last token of each request alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, silu
from vllm.config import CompilationMode
from vllm.v1.spec_decode import llm_base_proposer

PROVIDER = "slipstream"

SHIPPED_PROPOSAL = llm_base_proposer.SpecDecodeBaseProposer.propose
"""vLLM's own method, which makes all passes."""

_VECTOR = 16  # elements; the kernels take whole vectors


def register() -> None:
    """Offer the kernels to the engines of this process; repeated calls change nothing."""
    from vllm import ir

    if PROVIDER in ir.ops.rms_norm.impls:
        return
    ir.ops.rms_norm.register_impl(PROVIDER, supports_args=_fits)(rms_norm)
    ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=_fits_residual, inplace=True)(add_rms_norm)


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    """Norm of each row."""
    del variance_size
    x = x.contiguous()  # the kernel takes rows that follow each other, and those of heads do not
    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, weight, epsilon)
    return out


def add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Norm of each row of the sum, and the sum; they overwrite both inputs."""
    del variance_size
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual


@cache
def rounds_bfloat16() -> bool:
    """Return True if the kernel rounds to the nearest number in bfloat16; on a processor with AVX2 alone it cuts off.

    The norm of ones is 1 less half of epsilon, of which a cut leaves 0.996.
    """
    ones = torch.ones(1, _VECTOR, dtype=torch.bfloat16)
    return bool((rms_norm(ones, ones[0], 1e-6) == 1.0).all())


def _fits(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    del epsilon
    is_known = weight is not None and x.dtype is weight.dtype
    is_known = is_known and (x.dtype is torch.float32 or (x.dtype is torch.bfloat16 and rounds_bfloat16()))
    return is_known and variance_size is None and x.shape[-1] % _VECTOR == 0


def _fits_residual(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return _fits(x, weight, epsilon, variance_size) and x.is_contiguous() and x_residual.is_contiguous()


def fill_with_noise(noise: Tensor, generators: Mapping[int, torch.Generator]) -> None:
    """Fill each request's row with exponential noise, from its own generator where it has one.

    A generator on a CPU gives the noise of several passes at once as it would one after another.
    """
    if len(generators) < len(noise):
        noise.exponential_()
    rows = noise.unbind()  # cheaper than an index for each request
    for row, generator in generators.items():
        rows[row].exponential_(generator=generator)


def propose(proposer: Any, **given: Any) -> Tensor:
    """Propose [batch, k] tokens as vLLM does; vLLM does it where `Passes` does not take the draft or the batch."""
    if not hasattr(proposer, "passes"):
        proposer.passes = Passes(proposer) if _is_taken(proposer) else None
    if proposer.passes is None or given["num_speculative_tokens"] < 1 or not given["sampling_metadata"].all_random:
        tokens: Tensor = SHIPPED_PROPOSAL(proposer, **given)
        return tokens
    return proposer.passes.propose(**given)


def _is_taken(proposer: Any) -> bool:
    """True for an EAGLE-3 draft of one layer that samples, in an eager engine of one rank, if the kernels fit."""
    config, model = proposer.vllm_config, proposer.model
    ranks, mode = config.parallel_config.tensor_parallel_size, config.compilation_config.mode
    if proposer.method != "eagle3" or proposer.parallel_drafting or ranks > 1 or mode != CompilationMode.NONE:
        return False
    if not proposer._enable_probabilistic_draft_probs or proposer.use_fp64_gumbel or len(model.model.layers) > 1:
        return False
    widths = (model.config.hidden_size, model.model.layers[0].self_attn.head_dim)
    are_plain = all(hasattr(module, "cpu_linear") for module in _products(model))
    return are_plain and model.logits_processor.scale == 1.0 and all(width % _VECTOR == 0 for width in widths)


def _products(model: Any) -> tuple[Any, ...]:
    layer = model.model.layers[0]
    attention, mlp = layer.self_attn, layer.mlp
    return attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj, model.lm_head


class Passes:
    """Passes of an EAGLE-3 draft of one layer.

    Legend: `T` tokens of the step, `B` requests, `K` passes, `V` the draft's vocabulary, `H` hidden size.
    Source: vLLM 0.32, `v1/spec_decode/llm_base_proposer.py`, `model_executor/models/qwen3_eagle3.py` and
    `llama_eagle3.py`.
    """

    def __init__(self, proposer: Any) -> None:
        self._proposer, self._model, self._core = proposer, proposer.model, proposer.model.model
        self._layer = self._core.layers[0]
        self._epsilon: float = self._core.norm.variance_epsilon
        self._qkv_proj, self._o_proj, self._gate_up_proj, self._down_proj, self._lm_head = _products(self._model)

    def propose(
        self,
        *,
        num_speculative_tokens: int,
        target_hidden_states: Tensor,
        common_attn_metadata: Any,
        sampling_metadata: Any,
        num_rejected_tokens_gpu: Tensor | None,
        **inputs: Any,
    ) -> Tensor:
        """Propose [B, K] tokens for requests that all sample."""
        proposer, batch = self._proposer, common_attn_metadata
        proposer.num_speculative_tokens = num_speculative_tokens
        del inputs["mm_embed_inputs"], inputs["slot_mappings"]
        states_TH = self._model.combine_hidden_states(target_hidden_states)
        num_tokens, last_B, batch = proposer.set_inputs_first_pass(
            **inputs, target_hidden_states=states_TH, cad=batch, num_rejected_tokens_gpu=num_rejected_tokens_gpu
        )
        positions_T = proposer.positions[:num_tokens]
        q_T, residual_TH = self._cache(proposer.input_ids[:num_tokens], positions_T, states_TH, batch.slot_mapping)
        q_B, residual_BH, num = q_T[last_B], residual_TH[last_B], len(last_B)

        batch.num_actual_tokens, batch.max_query_len = num, 1
        batch.query_start_loc = proposer.arange[: num + 1]
        if num_rejected_tokens_gpu is not None:
            batch.seq_lens -= num_rejected_tokens_gpu
        later_KB = positions_T[last_B] + torch.arange(1, num_speculative_tokens)[:, None]  # of all passes but the first
        size = proposer.block_size
        blocks_KB = batch.block_table_tensor.gather(1, (later_KB // size).t()).t()
        slots_KB = (blocks_KB.long() * size + later_KB % size).contiguous()
        noise_BKV = torch.empty(num, num_speculative_tokens, self._model.config.draft_vocab_size)
        fill_with_noise(noise_BKV, sampling_metadata.generators)
        offsets_V = self._model.draft_id_to_target_id  # None for a draft with the policy's vocabulary
        known_V = None if offsets_V is None else torch.arange(len(offsets_V)) + offsets_V
        (group,) = proposer.draft_attn_groups
        tokens, probs = [], []
        for number, noise_BV in enumerate(noise_BKV.unbind(dim=1)):
            attention = group.build_metadata_for_drafting(common_attn_metadata=batch, draft_index=number)
            logits_BV, hidden_BH = self._attend(q_B, residual_BH, attention)
            probs_BV = (logits_BV / sampling_metadata.temperature.view(-1, 1)).softmax(dim=-1, dtype=torch.float32)
            tokens_B = (probs_BV / noise_BV).argmax(dim=-1)
            tokens_B = tokens_B if known_V is None else known_V[tokens_B]
            tokens.append(tokens_B)
            probs.append(probs_BV)
            if number < len(later_KB):
                batch.seq_lens += 1
                batch.max_seq_len += 1
                q_B, residual_BH = self._cache(tokens_B, later_KB[number], hidden_BH, slots_KB[number])
        probs_BKV = torch.stack(probs, dim=1)
        if known_V is not None:
            all_tokens = probs_BKV.new_zeros(num, num_speculative_tokens, self._model.config.vocab_size)
            probs_BKV = all_tokens.index_copy_(2, known_V, probs_BKV)
        proposer._last_draft_probs = probs_BKV
        return torch.stack(tokens, dim=1)

    def _cache(self, tokens: Tensor, positions: Tensor, hidden: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Write the tokens' keys and values into the draft's cache.

        Returns:
            Queries [tokens, heads, head size], and the residual [tokens, H].
        """
        layer, block, at = self._layer, self._layer.self_attn, self._layer.self_attn.attn
        embedded = embedding(tokens, self._core.embed_tokens.weight)
        embedded = rms_norm(embedded, layer.input_layernorm.weight, self._epsilon)
        hidden, residual = layer._residual_norm(hidden)
        qkv = _product(self._qkv_proj, torch.cat((embedded, hidden), dim=-1))
        q, k, v = qkv.split((block.q_size, block.kv_size, block.kv_size), dim=-1)
        if hasattr(block, "q_norm"):
            q = rms_norm(q.unflatten(-1, (at.num_heads, -1)), block.q_norm.weight, self._epsilon).flatten(1)
            k = rms_norm(k.unflatten(-1, (at.num_kv_heads, -1)), block.k_norm.weight, self._epsilon).flatten(1)
        q, k = block.rotary_emb(positions, q, k)
        q, k, v = (x.unflatten(-1, (-1, at.head_size)) for x in (q, k, v))
        at.impl.do_kv_cache_update(at, k, v, at.kv_cache, slots)
        return q, residual

    def _attend(self, q: Tensor, residual_BH: Tensor, metadata: Any) -> tuple[Tensor, Tensor]:
        """Compute logits [B, V], and the [B, H] that the next pass reads."""
        layer, at = self._layer, self._layer.self_attn.attn
        attended = torch.empty(q.shape, dtype=q.dtype)
        at.impl.forward(at, q, None, None, at.kv_cache, metadata, attended)
        weight = layer.post_attention_layernorm.weight
        x, residual_BH = add_rms_norm(_product(self._o_proj, attended.flatten(1)), residual_BH, weight, self._epsilon)
        gate, up = _product(self._gate_up_proj, x).chunk(2, dim=-1)
        x = _product(self._down_proj, silu(gate) * up)
        x, residual_BH = add_rms_norm(x, residual_BH, self._core.norm.weight, self._epsilon)
        logits = _product(self._lm_head, x)[:, : self._model.config.draft_vocab_size]  # vLLM pads the layer's rows
        return logits, x if self._core.norm_output else residual_BH


def _product(module: Any, x: Tensor) -> Tensor:
    out: Tensor = module.cpu_linear(x, module.weight, getattr(module, "bias", None))
    return out
