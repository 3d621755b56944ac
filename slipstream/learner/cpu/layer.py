"""Transformer layer for CPUs: Megatron's layer with forward and backward pass written as one operation each.

On a CPU the time of a small layer depends more on the number of operations and on padding than on arithmetic. This
layer takes fewer operations, keeps no graph inside, and computes each different token once: no padding, and no token
again that several sequences begin with, as the rollouts of a group do with their prompt. A token's states depend on the
tokens up to it alone, and its gradient is the sum over its sequences. The parameters keep Megatron's names, so that
blocks, schedules and optimizer work unchanged; research/log.md has the measurements.

Legend: `S` tokens, `B` sequences, `N` different tokens of them all, `H` hidden size, `G` query groups (key-value
heads), `R` query heads a group, `D` head dim, `F` width of the MLP.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_concentration_factor_from_config
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from slipstream.learner.cpu import host
from slipstream.learner.lora import weight_of
from slipstream.learner.packing import plan_rectangles


class _Parameters(NamedTuple):
    """Parameters of one layer, in the order in which the operation takes them and returns their gradients."""

    input_norm_H: Tensor
    qkv_QH: Tensor  # Q = G * (R + 2) * D: queries, key and value of each group
    qkv_Q: Tensor | None
    query_norm_D: Tensor | None
    key_norm_D: Tensor | None
    proj_HO: Tensor  # O = G * R * D
    mlp_norm_H: Tensor
    gate_up_FH: Tensor  # 2 F rows: those of the gate, then those that the gate multiplies
    down_HF: Tensor


class _Copies(NamedTuple):
    """Rows of a matrix that belong to each of the `N` tokens: `M` in all, token by token."""

    rows_M: Tensor
    starts_N: Tensor  # index in `rows_M` of each token's first row

    @classmethod
    def of(cls, tokens: Tensor, num_tokens: int) -> _Copies:
        """Find them from the token of each row; -1 marks a row that belongs to none."""
        ordered, rows = tokens.sort(stable=True)
        starts = torch.searchsorted(ordered, torch.arange(num_tokens))
        return cls(rows[starts[0] :], starts - starts[0])

    def sum(self, matrix: Tensor) -> Tensor:
        """Sum each token's rows."""
        return torch.nn.functional.embedding_bag(self.rows_M, matrix, self.starts_N, mode="sum")


@dataclass(frozen=True, slots=True, eq=False)
class _Rectangle:
    """Sequences of similar lengths, padded for attention to `B` x `S` = `C` cells.

    A cell of padding holds a copy of the first token; no real token attends to padding.
    """

    tokens: slice  # those that are computed in these sequences
    batch: int
    num_tokens: int  # S
    cells_N: Tensor  # cell of each of `tokens`
    tokens_C: Tensor  # token of each cell
    future_1RS: Tensor  # [1, R * S, S]: -inf where the key comes after the query


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """Places of the `N` tokens of a micro-batch, sequence by sequence, and tensors that depend on positions alone.

    Every operation except the attention runs over these tokens only.
    """

    rows_N: Tensor  # row of each token in the layer's input, flattened to [S * B, H]
    copies: _Copies  # rows of the layer's output
    tokens_M: Tensor  # token of each of these rows
    cells: _Copies  # cells of all rectangles, one behind the other
    cos_N11D: Tensor
    sin_N11D: Tensor  # the first half is negated, so that the rotation needs no negation
    rectangles: tuple[_Rectangle, ...]


class CpuTransformerLayer(TransformerLayer):
    """Dense pre-norm layer on one rank: grouped-query attention and a gated MLP."""

    def forward(
        self, hidden_states: Tensor, *, rotary_pos_emb: Tensor, padding_mask: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        """Compute [S, B, H] from [S, B, H]; a token attends to itself and to earlier tokens of its sequence.

        Args:
            rotary_pos_emb: [S, 1, 1, D], the angles of each position.
            padding_mask: [B, S], True where there is no token, on the right; the output is zero there. Or
                `Inputs.states_of_BT`, with the rows whose tokens are computed in place of others.
        """
        attention, mlp = cast(Any, self.self_attention), cast(Any, self.mlp)
        query_norm, key_norm = attention.q_layernorm, attention.k_layernorm
        parameters = _Parameters(
            cast(Any, self.input_layernorm).weight,
            weight_of(attention.linear_qkv),
            attention.linear_qkv.bias,
            None if query_norm is None else query_norm.weight,
            None if key_norm is None else key_norm.weight,
            weight_of(attention.linear_proj),
            cast(Any, self.pre_mlp_layernorm).weight,
            weight_of(mlp.linear_fc1),
            weight_of(mlp.linear_fc2),
        )
        config: Any = self.config
        heads = config.num_attention_heads // config.num_query_groups
        scale = _yarn_get_concentration_factor_from_config(config)
        plan = _plan(padding_mask, hidden_states.shape[1], rotary_pos_emb, scale, hidden_states.dtype, heads)
        return cast(Tensor, _Layer.apply(hidden_states, plan, config, *parameters)), None


@functools.lru_cache(maxsize=1)  # keyed by the tensors' identity: all layers of a pass get the same tensors
def _plan(
    mask_BS: Tensor | None,
    batch: int,
    rotary_pos_emb_S11D: Tensor,
    scale: float,
    dtype: torch.dtype,
    heads_of_a_group: int,
) -> _Plan:
    num_tokens, half = rotary_pos_emb_S11D.shape[0], rotary_pos_emb_S11D.shape[-1] // 2
    own_B1 = torch.arange(batch)[:, None]
    states_of_BS = own_B1.expand(batch, num_tokens) if mask_BS is None else mask_BS
    if states_of_BS.dtype == torch.bool:
        states_of_BS = torch.where(states_of_BS, -1, own_B1)
    sequence_N, position_N = (states_of_BS == own_B1).nonzero(as_tuple=True)
    token_BS = torch.full((batch, num_tokens), -1)
    token_BS[sequence_N, position_N] = torch.arange(len(position_N))
    token_BS = token_BS.gather(0, states_of_BS.clamp(min=0)).masked_fill_(states_of_BS < 0, -1)
    copies = _Copies.of(token_BS.t().flatten(), len(position_N))
    angles = rotary_pos_emb_S11D.detach()[position_N]
    cos, sin = angles.cos() * scale, angles.sin() * scale
    rectangles, cells = _rectangles(token_BS, sequence_N, position_N, dtype, heads_of_a_group)
    return _Plan(
        rows_N=position_N * batch + sequence_N,
        copies=copies,
        tokens_M=token_BS.t().flatten()[copies.rows_M],
        cells=cells,
        cos_N11D=cos.to(dtype),
        sin_N11D=torch.cat((-sin[..., :half], sin[..., half:]), dim=-1).to(dtype),
        rectangles=rectangles,
    )


def _rectangles(
    token_BS: Tensor, sequence_N: Tensor, position_N: Tensor, dtype: torch.dtype, heads_of_a_group: int
) -> tuple[tuple[_Rectangle, ...], _Copies]:
    """Lay out the sequences with a token of their own, for all others are copies of prefixes."""
    sequences, counts = sequence_N.unique_consecutive(return_counts=True)
    lengths, ends = (token_BS[sequences] >= 0).sum(1).tolist(), [0, *counts.cumsum(0).tolist()]
    rectangles, cells = [], []
    for first, last in plan_rectangles(lengths):
        width, tokens = max(lengths[first:last]), slice(ends[first], ends[last])
        token_C = token_BS[sequences[first:last], :width]
        future = torch.full((width, width), float("-inf"), dtype=dtype).triu(1).repeat(heads_of_a_group, 1).unsqueeze(0)
        rectangles.append(
            _Rectangle(
                tokens=tokens,
                batch=last - first,
                num_tokens=width,
                cells_N=torch.searchsorted(sequences[first:last], sequence_N[tokens]) * width + position_N[tokens],
                tokens_C=torch.where(token_C < 0, token_C[:, :1], token_C).flatten(),
                future_1RS=future,
            )
        )
        cells.append(token_C.flatten())
    return tuple(rectangles), _Copies.of(torch.cat(cells), len(sequence_N))


class _Layer(torch.autograd.Function):
    """Compute y = x + attention(norm(x)), then y + mlp(norm(y))."""

    @staticmethod
    def forward(ctx: Any, x_SBH: Tensor, plan: _Plan, config: Any, *parameters: Tensor | None) -> Tensor:
        p = _Parameters(*cast(Any, parameters))
        eps, groups, dim = config.layernorm_epsilon, config.num_query_groups, config.kv_channels
        heads = p.proj_HO.shape[1] // dim
        repeat = heads // groups
        flat_x = x_SBH.reshape(-1, x_SBH.shape[-1])
        x = flat_x.index_select(0, plan.rows_N)

        x_scaled, x_normed, x_scale = _norm(x, p.input_norm_H, eps)
        qkv = torch.nn.functional.linear(x_scaled, p.qkv_QH, p.qkv_Q).view(-1, groups, repeat + 2, dim)
        qk = qkv[..., : repeat + 1, :]
        qk_weight = _qk_weight(p, repeat)
        qk_scaled, qk_normed, qk_scale = (qk, None, None) if qk_weight is None else _norm(qk, qk_weight, eps)
        torch.addcmul(qk_scaled * plan.cos_N11D, qk_scaled.roll(dim // 2, -1), plan.sin_N11D, out=qk)
        mixed = x.new_empty(len(x), heads * dim)
        attended = [_attended(qkv, mixed, rectangle) for rectangle in plan.rectangles]
        y = torch.addmm(x, mixed, p.proj_HO.t())

        y_scaled, y_normed, y_scale = _norm(y, p.mlp_norm_H, eps)
        gate_up = y_scaled @ p.gate_up_FH.t()
        gate, up = gate_up.chunk(2, dim=-1)
        out = torch.addmm(y, torch.nn.functional.silu(gate).mul_(up), p.down_HF.t())

        ctx.recomputes = config.recompute_granularity == "selective"
        inside = (qkv,) if ctx.recomputes else (gate_up, *itertools.chain.from_iterable(attended))
        ctx.save_for_backward(
            *(x_scaled, x_normed, x_scale, qk_normed, qk_scale, mixed, y_scaled, y_normed, y_scale),
            *parameters,
            *inside,
        )
        ctx.plan, ctx.config = plan, config
        shared = out.index_select(0, plan.tokens_M)
        return torch.zeros_like(flat_x).index_copy_(0, plan.copies.rows_M, shared).view(x_SBH.shape)

    @staticmethod
    @host.model_arithmetic()
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_SBH,) = grads
        saved, plan, groups, dim = ctx.saved_tensors, ctx.plan, ctx.config.num_query_groups, ctx.config.kv_channels
        x_scaled, x_normed, x_scale, qk_normed, qk_scale, mixed, y_scaled, y_normed, y_scale = saved[:9]
        p = _Parameters(*saved[9:18])
        repeat = p.proj_HO.shape[1] // dim // groups
        if ctx.recomputes:
            gate_up = y_scaled @ p.gate_up_FH.t()
            attended = itertools.chain.from_iterable(_attend(saved[18], each) for each in plan.rectangles)
        else:
            gate_up, *attended = saved[18:]
        attended = iter(attended)
        grad = plan.copies.sum(grad_SBH.reshape(-1, grad_SBH.shape[-1]))

        gate, up = gate_up.chunk(2, dim=-1)
        silu = torch.nn.functional.silu(gate)
        d_gated = grad @ p.down_HF
        d_gate_up = torch.empty_like(gate_up)
        d_gate, d_up = d_gate_up.chunk(2, dim=-1)
        torch.mul(d_gated, silu, out=d_up)
        torch.ops.aten.silu_backward.grad_input(d_gated.mul_(up), gate, grad_input=d_gate)
        d_down = grad.t() @ silu.mul_(up)
        d_y, d_mlp_norm = _norm_backward(d_gate_up @ p.gate_up_FH, y_normed, p.mlp_norm_H, y_scale)
        d_y = d_y.add_(grad)

        d_mixed = d_y @ p.proj_HO
        dots_NA = (d_mixed * mixed).view(-1, groups * repeat, dim).sum(-1)
        d_cells = []
        for rectangle in plan.rectangles:
            kept = tuple(itertools.islice(attended, 4))
            d_cells.append(_attend_backward(d_mixed, dots_NA, groups, kept, rectangle))
        d_qkv = plan.cells.sum(torch.cat(d_cells))
        d_qk = d_qkv.view(-1, groups, repeat + 2, dim)[..., : repeat + 1, :]
        d_rotated = (d_qk * plan.sin_N11D).roll(dim // 2, -1).addcmul_(d_qk, plan.cos_N11D)
        qk_weight, d_query_norm, d_key_norm = _qk_weight(p, repeat), None, None
        if qk_weight is None:
            d_qk[:] = d_rotated
        else:
            d_qk[:], d_qk_norm = _norm_backward(d_rotated, qk_normed, qk_weight, qk_scale)
            d_query_norm, d_key_norm = d_qk_norm[:repeat].sum(0), d_qk_norm[repeat]
        d_x, d_input_norm = _norm_backward(d_qkv @ p.qkv_QH, x_normed, p.input_norm_H, x_scale)
        gradients = _Parameters(
            input_norm_H=d_input_norm,
            qkv_QH=d_qkv.t() @ x_scaled,
            qkv_Q=None if p.qkv_Q is None else d_qkv.sum(0),
            query_norm_D=d_query_norm,
            key_norm_D=d_key_norm,
            proj_HO=d_y.t() @ mixed,
            mlp_norm_H=d_mlp_norm,
            gate_up_FH=d_gate_up.t() @ y_scaled,
            down_HF=d_down,
        )
        d_x_SBH = torch.zeros_like(grad_SBH, memory_format=torch.contiguous_format)
        d_x_SBH.view(-1, d_x.shape[1]).index_copy_(0, plan.rows_N, d_x.add_(d_y))
        return d_x_SBH, None, None, *gradients


def _norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Compute RMSNorm over the last dimension in float32; returns the result, x / rms and 1 / rms."""
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    normed = wide * scale
    return (normed * weight.float()).to(x.dtype), normed.to(x.dtype), scale.to(x.dtype)


def _norm_backward(grad: Tensor, normed: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Compute RMSNorm's gradients: with n = x / rms, dx = (g w - n mean(g w n)) / rms and dw = sum(g n).

    `weight` may have several dimensions.
    """
    by_normed = grad * normed
    grad_weight = by_normed.flatten(0, -1 - weight.dim()).sum(0)
    mean = by_normed.mul_(weight).mean(-1, keepdim=True)
    return (grad * weight).addcmul_(normed, mean, value=-1).mul_(scale), grad_weight


def _qk_weight(p: _Parameters, repeat: int) -> Tensor | None:
    """Stack the norm weights of a group's heads, [R + 1, D]: R times that of the queries, then that of the key."""
    if p.query_norm_D is None or p.key_norm_D is None:
        return None
    return torch.cat((p.query_norm_D.expand(repeat, -1), p.key_norm_D.unsqueeze(0)))


def _attend(qkv_NGXD: Tensor, rectangle: _Rectangle) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute queries, keys, values and attention probabilities within a rectangle.

    The heads of a group are stacked along the query axis: queries [B * G, R * S, D], keys and values [B * G, S, D].
    """
    _, groups, width, dim = qkv_NGXD.shape
    qkv = qkv_NGXD.flatten(1).index_select(0, rectangle.tokens_C)
    qkv = qkv.view(rectangle.batch, rectangle.num_tokens, groups, width, dim)
    query, key, value = (_stack(part) for part in qkv.split((width - 2, 1, 1), dim=3))
    scores = torch.baddbmm(rectangle.future_1RS, query, key.transpose(1, 2), alpha=dim**-0.5)
    return query, key, value, torch.softmax(scores, -1)


def _attended(qkv_NGXD: Tensor, mixed: Tensor, rectangle: _Rectangle) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Write causal attention to a rectangle's tokens in `mixed` [N, G * R * D]; returns the results of `_attend`."""
    query, key, value, chances = _attend(qkv_NGXD, rectangle)
    repeat = qkv_NGXD.shape[2] - 2
    by_cell = _unstack(torch.bmm(chances, value), rectangle, repeat).reshape(len(rectangle.tokens_C), -1)
    torch.index_select(by_cell, 0, rectangle.cells_N, out=mixed[rectangle.tokens])
    return query, key, value, chances


def _attend_backward(
    d_mixed: Tensor, dots_NA: Tensor, groups: int, attended: tuple[Tensor, ...], rectangle: _Rectangle
) -> Tensor:
    """Compute the gradient of `_attend` for each cell of the rectangle, [C, G * (R + 2) * D].

    The gradient of the softmax, (d - sum(d chances)) chances, is not torch's own operation, whose bits depend on the
    number of threads on a processor with AVX2 where a row's length is no multiple of 8. The sum over all keys is the
    dot product of a head's output with its gradient, [N, A] for A heads (FlashAttention, arXiv:2205.14135).
    """
    query, key, value, chances = attended
    dim = query.shape[-1]
    repeat = d_mixed.shape[1] // (groups * dim)
    d_out = _stack(_cells(d_mixed, rectangle).view(rectangle.batch, rectangle.num_tokens, groups, repeat, dim))
    dots = _stack(_cells(dots_NA, rectangle).view(rectangle.batch, rectangle.num_tokens, groups, repeat, 1))
    scale = dim**-0.5  # on the smaller tensors
    d_scores = torch.bmm(d_out, value.mul(scale).transpose(1, 2)).sub_(dots.mul_(scale)).mul_(chances)
    d_qkv = torch.cat(
        (
            _unstack(torch.bmm(d_scores, key), rectangle, repeat),
            _unstack(torch.bmm(d_scores.transpose(1, 2), query), rectangle, 1),
            _unstack(torch.bmm(chances.transpose(1, 2), d_out), rectangle, 1),
        ),
        dim=3,
    )
    return d_qkv.view(len(rectangle.tokens_C), -1)


def _cells(x_N: Tensor, rectangle: _Rectangle) -> Tensor:
    """Scatter the rows of a rectangle's tokens to its cells; all other cells hold zeros."""
    cells = x_N.new_zeros(len(rectangle.tokens_C), x_N.shape[1])
    return cells.index_copy_(0, rectangle.cells_N, x_N[rectangle.tokens])


def _stack(x_BSGRD: Tensor) -> Tensor:
    """Stack the heads of a group along the query axis, [B * G, R * S, D]."""
    batch, num_tokens, groups, repeat, dim = x_BSGRD.shape
    return x_BSGRD.permute(0, 2, 3, 1, 4).reshape(batch * groups, repeat * num_tokens, dim)


def _unstack(x: Tensor, rectangle: _Rectangle, repeat: int) -> Tensor:
    """Invert `_stack`, as a view [B, S, G, R, D]."""
    return x.view(rectangle.batch, -1, repeat, rectangle.num_tokens, x.shape[-1]).permute(0, 3, 1, 2, 4)
