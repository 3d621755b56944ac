"""The part of a large vocabulary that a draft knows: the tokens that the policy answers with most."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

from slipstream.config import require


def require_cut(num: int, vocab_size: int) -> None:
    """Refuse a draft's vocabulary that is none of the policy's, or all of it."""
    fix = "null keeps the whole vocabulary"
    require(0 < num < vocab_size, "draft.vocab_size", f"must be < the policy's {vocab_size} tokens", num, fix)


def frequent_tokens(responses: Iterable[Sequence[int]], *, num: int, vocab_size: int) -> tuple[int, ...]:
    """The `num` tokens that occur most, in ascending order; of two that occur as often the smaller one.

    Source: `build_vocab_mappings_from_distribution` of speculators 0.9.
    """
    counts = Counter(itertools.chain.from_iterable(responses))
    by_count = sorted(range(vocab_size), key=lambda token: (-counts[token], token))
    return tuple(sorted(by_count[:num]))


def coverage(responses: Iterable[Sequence[int]], token_ids: Iterable[int]) -> float:
    """Fraction of the tokens in `responses` that are among `token_ids`."""
    counts = Counter(itertools.chain.from_iterable(responses))
    return sum(counts[token] for token in set(token_ids)) / max(counts.total(), 1)
