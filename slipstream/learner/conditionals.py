"""What a policy says about given tokens: the exact conditional distribution that a sampler should have drawn from.

Legend: `N` tokens, `V` vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

COLUMNS = (
    "mass_before",
    "probability",
    "logprob_mean",
    "logprob_variance",
    "sharper_mass_before",
    "sharper_probability",
    "sharper_total_variation",
    "flatter_mass_before",
    "flatter_probability",
    "flatter_total_variation",
)
"""What `conditionals` gives for each token; see `slipstream.losslessness.hypothesis_tests.Draws`."""

_SHARPER, _FLATTER = 2.0, 0.5  # exponents of the probabilities


def processed_logprobs(logits_NV: Tensor, *, temperature: float, top_p: float, top_k: int) -> Tensor:
    """Log-probabilities of the distribution that is sampled: temperature, then top-k, then top-p, as in vLLM.

    Args:
        top_k: 0 keeps all tokens.
    Returns:
        [N, V] float32, -inf for tokens that cannot be drawn.
    """
    logits_NV = logits_NV.float() / temperature
    if top_k:
        kth_N1 = logits_NV.topk(min(top_k, logits_NV.shape[-1]), dim=-1).values[:, -1:]
        logits_NV = logits_NV.masked_fill(logits_NV < kth_N1, float("-inf"))
    if top_p < 1.0:
        ordered_NV, order_NV = logits_NV.sort(dim=-1)
        below_NV = ordered_NV.softmax(-1).cumsum(-1)
        dropped_NV = below_NV <= 1.0 - top_p
        dropped_NV[:, -1] = False  # the likeliest token always stays
        logits_NV = logits_NV.masked_fill(dropped_NV.scatter(-1, order_NV, dropped_NV), float("-inf"))
    return logits_NV.log_softmax(-1)


def conditionals(
    logits_NV: Tensor, labels_N: Tensor, *, temperature: float, top_p: float, top_k: int, generator: torch.Generator
) -> Tensor:
    """For each label what `COLUMNS` names, [N, len(COLUMNS)] float64."""
    logprobs_NV = processed_logprobs(logits_NV, temperature=temperature, top_p=top_p, top_k=top_k).double()
    mass_NV = logprobs_NV.exp()
    finite_NV = torch.where(mass_NV > 0, logprobs_NV, 0.0)
    mean_N = (mass_NV * finite_NV).sum(-1)
    variance_N = (mass_NV * finite_NV.square()).sum(-1) - mean_N.square()
    columns = [*_place(mass_NV, labels_N), mean_N, variance_N.clamp(min=0.0)]
    for exponent in (_SHARPER, _FLATTER):
        biased_NV = torch.where(mass_NV > 0, mass_NV.pow(exponent), 0.0)
        biased_NV = biased_NV / biased_NV.sum(-1, keepdim=True)
        drawn_N = torch.multinomial(biased_NV, 1, generator=generator)[:, 0]
        columns += [*_place(mass_NV, drawn_N), 0.5 * (biased_NV - mass_NV).abs().sum(-1)]
    return torch.stack(columns, dim=-1)


def _place(mass_NV: Tensor, tokens_N: Tensor) -> tuple[Tensor, Tensor]:
    """Mass of the tokens before each token by falling probability (ties by id), NaN if it has none; its own."""
    own_N1 = mass_NV.gather(-1, tokens_N[:, None])
    ids_V = torch.arange(mass_NV.shape[-1], device=mass_NV.device)
    before_NV = (mass_NV > own_N1) | ((mass_NV == own_N1) & (ids_V < tokens_N[:, None]))
    before_N = torch.where(before_NV, mass_NV, 0.0).sum(-1)
    return torch.where(own_N1[:, 0] > 0, before_N, torch.nan), own_N1[:, 0]
