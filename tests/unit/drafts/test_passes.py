"""The attention of a draft's passes is that of a mask over the whole row, whatever the chats' lengths."""

from __future__ import annotations

import pytest
import torch
from speculators.models.eagle3.attention import create_combined_mask_mod, extend_dense_mask_for_draft_tokens
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from slipstream.drafts import passes
from slipstream.drafts.passes import attend

GROUPS, HEADS, DIM = 2, 6, 4


def randomly(num: int, num_passes: int) -> tuple[Tensor, ...]:
    """Queries, keys and values of a row of so many tokens."""
    generator = torch.Generator().manual_seed(0)
    sizes = (HEADS, num), (GROUPS, num_passes * num), (GROUPS, num_passes * num)
    return tuple(torch.randn(1, *size, DIM, generator=generator, requires_grad=True) for size in sizes)


def masked(query: Tensor, key: Tensor, value: Tensor, documents: Tensor, scaling: float) -> Tensor:
    """The same with the mask that speculators builds."""
    num, passes = query.shape[2], key.shape[2] // query.shape[2]
    rule = create_combined_mask_mod(documents, num)
    mask = create_mask(rule, None, None, num, num, device=str(query.device))
    for _ in range(passes - 1):
        mask = extend_dense_mask_for_draft_tokens(mask, num)
    keys, values = (each.repeat_interleave(HEADS // GROUPS, dim=1) for each in (key, value))
    found = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling)
    return found.transpose(1, 2)


@pytest.mark.parametrize("num_passes", [1, 2, 4])
@pytest.mark.parametrize("lengths", [[5], [1, 1], [3, 7, 2], [4, 260, 5, 3]])
def test_each_chat_attends_to_itself_and_each_token_to_its_own_later_keys(lengths: list[int], num_passes: int) -> None:
    query, key, value = randomly(sum(lengths), num_passes)
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    weight = torch.randn(1, sum(lengths), HEADS, DIM, generator=torch.Generator().manual_seed(1))
    expected = masked(query, key, value, documents, 0.3)
    wanted = torch.autograd.grad((expected * weight).sum(), (query, key, value))
    found, _ = attend(torch.nn.Identity(), query, key, value, lengths, scaling=0.3)
    grads = torch.autograd.grad((found * weight).sum(), (query, key, value))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for grad, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-4, atol=1e-5)


def test_the_attention_of_a_long_chat_is_recomputed_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [3, 7, 2]
    query, key, value = randomly(sum(lengths), num_passes=3)

    def outcome(most: int) -> tuple[list[Tensor], int]:
        kept: list[int] = []
        monkeypatch.setattr(passes, "_KEPT_TOKENS", most)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
            found, _ = attend(torch.nn.Identity(), query, key, value, lengths, scaling=0.3)
        return [found, *torch.autograd.grad(found.square().sum(), (query, key, value))], sum(kept)

    (whole, most), (anew, least) = outcome(7), outcome(6)
    for one, other in zip(whole, anew, strict=True):
        assert torch.equal(one, other)
    assert least < most
