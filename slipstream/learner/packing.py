"""Plans of which sequences share a micro-batch: lists of indices, so that the order can be restored."""

from __future__ import annotations

from collections.abc import Callable, Sequence

MICROBATCH_COST = 300
"""Cost of one more micro-batch beside its tokens, in tokens: measured on two cores, docs/log.md."""

UNPADDED_MICROBATCH_COST = 3000
"""Cost of one more micro-batch where the layers skip padding, which then costs next to nothing."""

_RECTANGLE_COST = 40_000
"""Cost of one more attention rectangle beside its scores, in scores: of the tiny recipe, docs/log.md."""


def plan_microbatches(
    lengths: Sequence[int], *, max_tokens: int, microbatch_cost: int = MICROBATCH_COST
) -> list[tuple[int, ...]]:
    """Split sequences into micro-batches whose padded size (count x longest) stays within `max_tokens`.

    Neighbours in length share a micro-batch, and of all such splits the one with the least padding is taken, every
    micro-batch counting `microbatch_cost` tokens itself. The longest come first, so that a bound too large for the
    memory fails at once. Deterministic; every index occurs exactly once.

    Raises:
        ValueError: a sequence is empty or longer than `max_tokens`.
    """
    _require_lengths(lengths, max_tokens, "max_tokens_per_microbatch")
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))

    def cost(start: int, end: int) -> int | None:
        padded = (end - start) * lengths[order[start]]
        return padded + microbatch_cost if padded <= max_tokens else None

    return [tuple(order[start:end]) for start, end in _cheapest_split(len(order), cost)]


def plan_packed_microbatches(lengths: Sequence[int], *, max_tokens: int) -> list[tuple[int, ...]]:
    """Split sequences into few micro-batches, about equally full, each of at most `max_tokens` tokens.

    The longest sequence of each comes first. Deterministic; every index occurs exactly once.

    Raises:
        ValueError: a sequence is empty or longer than `max_tokens`.
    """
    _require_lengths(lengths, max_tokens, "max_tokens_per_microbatch")
    num_batches = -(-sum(lengths) // max_tokens)
    batches = _dealt(lengths, num_batches)
    while any(sum(lengths[index] for index in indices) > max_tokens for indices in batches):
        num_batches += 1
        batches = _dealt(lengths, num_batches)
    return [tuple(indices) for indices in batches if indices]


def plan_shards(lengths: Sequence[int], num_shards: int) -> list[tuple[int, ...]]:
    """Deal sequences to data-parallel ranks: the longest first, each to whoever has the fewest tokens so far.

    Each share keeps the sequences' order; with no more sequences than shards, some have one and the others none.
    """
    return [tuple(sorted(shard)) for shard in _dealt(lengths, num_shards)]


def _dealt(lengths: Sequence[int], num_shares: int) -> list[list[int]]:
    """The longest first, each to whoever has the fewest tokens so far."""
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    taken = [0] * num_shares
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        least = taken.index(min(taken))
        shares[least].append(index)
        taken[least] += lengths[index]
    return shares


def plan_rectangles(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Split neighbouring sequences, as (start, end), so that attention over each part's rectangle costs least.

    A part costs its count x longest^2 scores, and something itself; longest first (or last) is the best order.
    """

    def cost(start: int, end: int) -> int:
        return (end - start) * max(lengths[start:end]) ** 2 + _RECTANGLE_COST

    return _cheapest_split(len(lengths), cost)


def _cheapest_split(num_items: int, cost: Callable[[int, int], int | None]) -> list[tuple[int, int]]:
    """Cut 0 .. num_items into (start, end) of the least summed cost; None: no longer part that ends there may be."""
    # least[end]: cost of the best split of the first `end` items; starts[end]: where its last part begins
    least, starts = [0], [0]
    for end in range(1, num_items + 1):
        costs = []
        for start in range(end - 1, -1, -1):
            part = cost(start, end)
            if part is None:
                break
            costs.append((least[start] + part, start))
        cheapest, start = min(costs)
        least.append(cheapest)
        starts.append(start)
    parts: list[tuple[int, int]] = []
    end = num_items
    while end:
        parts.append((starts[end], end))
        end = starts[end]
    return parts[::-1]


def _require_lengths(lengths: Sequence[int], bound: int, name: str) -> None:
    for index, length in enumerate(lengths):
        if not 0 < length <= bound:
            raise ValueError(f"sequence {index} must have 1 to {bound} ({name}) tokens, got {length}")
