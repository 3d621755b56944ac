"""Logprobs and entropies from hidden states, without holding the logits of all tokens at once.

The output layer is applied to a chunk of tokens at a time, and its logits are recomputed for the gradient: with a
vocabulary of 150,000 the logits of a micro-batch are larger than all other tensors together. Only tokens whose label
counts are computed. `conditionals` serves the losslessness certificate: statistics of a token under the exact
distribution from which a sampler should have sampled the token.

Legend: `T` tokens, `B` sequences, `N` tokens whose label counts, `C` tokens of a chunk, `H` hidden size, `V` this
rank's part of the vocabulary (in `conditionals` the whole vocabulary).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor
from transformers import TopKLogitsWarper, TopPLogitsWarper

from slipstream.learner import parallel
from slipstream.learner.batches import MicroBatch
from slipstream.learner.cpu import host

COLUMNS = (
    "mass_before",
    "probability",
    "logprob_mean",
    "logprob_variance",
    "largest_probability",
    "sharper_mass_before",
    "sharper_probability",
    "sharper_total_variation",
    "flatter_mass_before",
    "flatter_probability",
    "flatter_total_variation",
)
"""Columns of `conditionals`; `slipstream.losslessness.hypothesis_tests.Draws` describes each."""
_SHARPER, _FLATTER = 2.0, 0.5  # exponents of the probabilities


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenScores:
    """Logprobs and entropy of a micro-batch's labels under the policy, at one temperature."""

    logprobs_BT: Tensor  # with gradient; undefined where a label does not count
    entropy: Tensor  # scalar without gradient: sum of nats over the labels that count


class OutputHead:
    """Output layer of the last pipeline stage."""

    def __init__(self, gpt: GPTModel, *, chunk_tokens: int | None, adds_to_main_grad: bool) -> None:
        """Wrap the output layer of `gpt`.

        Args:
            chunk_tokens: tokens whose logits are held at once; None: those of a whole micro-batch.
            adds_to_main_grad: the weight's gradient is added to Megatron's float32 buffer directly.
        """
        self._gpt = gpt
        self._chunk_tokens = chunk_tokens
        self._adds_to_main_grad = adds_to_main_grad

    def scores(self, hidden_TBH: Tensor, batch: MicroBatch, temperature: float) -> TokenScores:
        """Compute logprobs of a micro-batch's labels under softmax(logits / temperature).

        Args:
            hidden_TBH: states after the final norm; under sequence and context parallelism this rank's part of the
                tokens.
        """
        labels_BT, mask_BT = (parallel.context_part(each, 1) for each in (batch.labels_BT, batch.mask_BT))
        hidden_NH = self._all_tokens(hidden_TBH).transpose(0, 1)[mask_BT]
        if parallel.tensor_group().size() > 1 and not self._gpt.config.sequence_parallel:
            # The backward pass sums the gradient over ranks. Megatron drops the sum of a gradient that is not
            # contiguous, such as that of a transposed tensor, so the sum is taken of these rows.
            hidden_NH = cast(Tensor, copy_to_tensor_model_parallel_region(hidden_NH))
        weight_VH = output_weight(self._gpt)
        logprobs_N, entropy_N = _ChunkedLogprobs.apply(
            hidden_NH,
            weight_VH,
            labels_BT[mask_BT],
            _Head(
                temperature=temperature,
                chunk_tokens=self._chunk_tokens or max(1, len(hidden_NH)),
                main_grad_VH=cast(Any, weight_VH).main_grad if self._adds_to_main_grad else None,
            ),
        )
        logprobs_BT = logprobs_N.new_zeros(mask_BT.shape).masked_scatter(mask_BT, logprobs_N)
        entropy = parallel.all_reduce(entropy_N.sum(), parallel.context_group())
        return TokenScores(logprobs_BT=parallel.all_tokens(logprobs_BT, 1), entropy=entropy)

    def rows(self, hidden_TBH: Tensor, batch: MicroBatch) -> Iterator[tuple[int, slice, Tensor, Tensor]]:
        """Iterate over logits of the whole vocabulary, without gradient, by chunks of one sequence's tokens.

        Yields:
            Index of a sequence in the micro-batch, slice of its labels that count, logits [C, vocabulary], labels [C].
        """
        whole_TBH = parallel.all_tokens(self._all_tokens(hidden_TBH), 0)
        hidden_BTH, weight_VH = whole_TBH.transpose(0, 1), output_weight(self._gpt)
        for number, place in enumerate(batch.inputs.places):
            mask_T = batch.mask_BT[place]
            hidden_NH, labels_N = hidden_BTH[place][mask_T], batch.labels_BT[place][mask_T]
            for part in _chunks(len(labels_N), self._chunk_tokens or len(labels_N)):
                shards = parallel.tensor_parallel_shards(hidden_NH[part] @ weight_VH.t())
                yield number, part, torch.cat(shards, dim=-1), labels_N[part]

    def _all_tokens(self, hidden_TBH: Tensor) -> Tensor:
        """Gather the tokens under sequence parallelism; the backward pass sums the gradient over these ranks."""
        if self._gpt.config.sequence_parallel:
            return cast(Tensor, gather_from_sequence_parallel_region(hidden_TBH))
        return hidden_TBH


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Head:
    """Arguments of `_ChunkedLogprobs` that are no tensors, and the gradient buffer."""

    temperature: float
    chunk_tokens: int
    main_grad_VH: Tensor | None

    def logits(self, hidden_CH: Tensor, weight_VH: Tensor) -> Tensor:
        """Compute logits [C, V] in float32; the caller may overwrite the result."""
        return (hidden_CH @ weight_VH.t()).float().div_(self.temperature)


class _ChunkedLogprobs(torch.autograd.Function):
    """Logprobs of labels, and entropies without gradient; saves one number a token for the backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, labels_N: Tensor, head: _Head) -> tuple[Tensor, Tensor]:
        group = parallel.tensor_group()
        own_N = labels_N - group.rank() * len(weight_VH)  # outside 0 .. V-1 where another rank holds the label
        logprobs_N, entropy_N, normalizer_N = (hidden_NH.new_empty(len(hidden_NH), dtype=torch.float32) for _ in "123")
        for part in _chunks(len(hidden_NH), head.chunk_tokens):
            logits_CV = head.logits(hidden_NH[part], weight_VH)
            largest_C = largest(logits_CV)
            logits_CV.sub_(largest_C[:, None])
            inside_C1, at_C1 = _inside(own_N[part], logits_CV.shape[1])
            chosen_C = torch.where(inside_C1, logits_CV.gather(1, at_C1), 0.0)[:, 0]
            sum_C, dot_C = _moments(logits_CV)
            sum_C, dot_C, chosen_C = parallel.all_reduce(torch.stack([sum_C, dot_C, chosen_C]), group)
            log_C = sum_C.log()
            logprobs_N[part] = chosen_C - log_C
            entropy_N[part] = log_C - dot_C / sum_C
            normalizer_N[part] = log_C + largest_C
        ctx.save_for_backward(hidden_NH, weight_VH, own_N, normalizer_N)
        ctx.head = head
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    @host.model_arithmetic()
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden_NH, weight_VH, own_N, normalizer_N = ctx.saved_tensors
        head: _Head = ctx.head
        d_hidden_NH = torch.empty_like(hidden_NH)
        d_weight_VH = head.main_grad_VH
        if d_weight_VH is None and ctx.needs_input_grad[1]:
            d_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32)
        scaled_N = grads[0] / head.temperature
        for part in _chunks(len(hidden_NH), head.chunk_tokens):
            d_logits_CV = head.logits(hidden_NH[part], weight_VH).sub_(normalizer_N[part, None]).exp_()
            d_logits_CV.mul_(-scaled_N[part, None])
            inside_C1, at_C1 = _inside(own_N[part], d_logits_CV.shape[1])
            d_logits_CV.scatter_add_(1, at_C1, torch.where(inside_C1, scaled_N[part, None], 0.0))
            narrow_CV = d_logits_CV.to(weight_VH.dtype)
            torch.mm(narrow_CV, weight_VH, out=d_hidden_NH[part])
            if d_weight_VH is None:  # frozen
                continue
            if narrow_CV.dtype is d_weight_VH.dtype:
                d_weight_VH.addmm_(narrow_CV.t(), hidden_NH[part])
            else:
                d_weight_VH.add_(narrow_CV.t() @ hidden_NH[part])
        if head.main_grad_VH is not None or d_weight_VH is None:
            return d_hidden_NH, None, None, None
        return d_hidden_NH, d_weight_VH.to(weight_VH.dtype), None, None


def output_weight(gpt: GPTModel) -> Tensor:
    """Return this rank's part [V, H] of the output layer's weight, which may be tied to the embeddings."""
    if gpt.share_embeddings_and_output_weights:
        return gpt.shared_embedding_or_output_weight()
    return cast(Tensor, gpt.output_layer.weight)


def _chunks(num_tokens: int, chunk_tokens: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk_tokens, num_tokens)) for start in range(0, num_tokens, chunk_tokens))


def _inside(own_C: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return a mask [C, 1] of the labels that this rank holds, and valid column indices [C, 1]."""
    return ((own_C >= 0) & (own_C < size))[:, None], own_C.clamp(0, size - 1)[:, None]


def largest(logits_CV: Tensor) -> Tensor:
    """Compute the largest logit [C] over the vocabulary of all ranks."""
    return parallel.all_reduce(logits_CV.amax(-1), parallel.tensor_group(), dist.ReduceOp.MAX)


def _moments(logits_CV: Tensor) -> tuple[Tensor, Tensor]:
    """Sum exp(x) and x exp(x) over this rank's logits x; [C] each."""
    mass_CV = logits_CV.exp()
    sum_C = mass_CV.sum(-1)
    return sum_C, mass_CV.mul_(logits_CV).sum(-1)


def processed_logprobs(logits_NV: Tensor, *, temperature: float, top_p: float, top_k: int) -> Tensor:
    """Compute logprobs of the sampling distribution: temperature, then top-k, then top-p, as in vLLM.

    Args:
        top_k: 0 keeps all tokens.
    Returns:
        [N, V] float32, -inf for tokens that cannot be sampled.
    """
    scores_NV: Any = logits_NV.float() / temperature
    tokens: Any = None  # of the sequence, which neither rule reads
    if top_k:
        scores_NV = TopKLogitsWarper(top_k)(tokens, scores_NV)
    if top_p < 1.0:
        scores_NV = TopPLogitsWarper(top_p)(tokens, scores_NV)
    return scores_NV.log_softmax(-1)


def conditionals(
    logits_NV: Tensor, labels_N: Tensor, *, temperature: float, top_p: float, top_k: int, generator: torch.Generator
) -> Tensor:
    """Compute the `COLUMNS` of each label, [N, len(COLUMNS)] float64."""
    logprobs_NV = processed_logprobs(logits_NV, temperature=temperature, top_p=top_p, top_k=top_k).double()
    mass_NV = logprobs_NV.exp()
    finite_NV = torch.where(mass_NV > 0, logprobs_NV, 0.0)
    mean_N = (mass_NV * finite_NV).sum(-1)
    variance_N = (mass_NV * finite_NV.square()).sum(-1) - mean_N.square()
    columns = [*_place(mass_NV, labels_N), mean_N, variance_N.clamp(min=0.0), mass_NV.amax(-1)]
    for exponent in (_SHARPER, _FLATTER):
        biased_NV = torch.where(mass_NV > 0, mass_NV.pow(exponent), 0.0)
        biased_NV = biased_NV / biased_NV.sum(-1, keepdim=True)
        drawn_N = torch.multinomial(biased_NV, 1, generator=generator)[:, 0]
        columns += [*_place(mass_NV, drawn_N), 0.5 * (biased_NV - mass_NV).abs().sum(-1)]
    return torch.stack(columns, dim=-1)


def _place(mass_NV: Tensor, tokens_N: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the probability of all tokens that precede each token in falling probability, ties by id.

    Returns:
        That sum [N], NaN for a token of probability 0, and the token's own probability [N].
    """
    own_N1 = mass_NV.gather(-1, tokens_N[:, None])
    ids_V = torch.arange(mass_NV.shape[-1], device=mass_NV.device)
    before_NV = (mass_NV > own_N1) | ((mass_NV == own_N1) & (ids_V < tokens_N[:, None]))
    before_N = torch.where(before_NV, mass_NV, 0.0).sum(-1)
    return torch.where(own_N1[:, 0] > 0, before_N, torch.nan), own_N1[:, 0]
