"""Plans that group sequences into micro-batches, as indices, so that the original order can be restored."""

from __future__ import annotations

from collections.abc import Callable, Sequence

MICROBATCH_COST = 300
"""Fixed cost of a micro-batch in tokens, measured on two cores: research/log.md."""

UNPADDED_MICROBATCH_COST = 3000
"""Fixed cost of a micro-batch, in tokens, where the layers skip padding, so that padding costs almost nothing."""

_RECTANGLE_COST = 40_000
"""Fixed cost of an attention rectangle in scores, measured with the tiny recipe: research/log.md."""


def plan_microbatches(
    lengths: Sequence[int], *, max_tokens: int, microbatch_cost: int = MICROBATCH_COST
) -> list[tuple[int, ...]]:
    """Split sequences into micro-batches whose padded size (count x longest) stays within `max_tokens`.

    Sequences of similar length share a micro-batch. Among all such splits the plan has the least padding plus
    `microbatch_cost` tokens a micro-batch. The longest sequences come first, so that a bound that exceeds the memory
    fails at once.

    Raises:
        ValueError: a sequence is empty or longer than `max_tokens`.
    """
    _require_lengths(lengths, max_tokens)
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])

    def cost(start: int, end: int) -> int | None:
        padded = (end - start) * lengths[order[start]]
        return padded + microbatch_cost if padded <= max_tokens else None

    return [tuple(order[start:end]) for start, end in _cheapest_split(len(order), cost)]


def plan_packed_microbatches(lengths: Sequence[int], *, max_tokens: int) -> list[tuple[int, ...]]:
    """Split sequences into few, about equally full micro-batches of at most `max_tokens` tokens.

    The longest sequence of each micro-batch comes first.

    Raises:
        ValueError: a sequence is empty or longer than `max_tokens`.
    """
    _require_lengths(lengths, max_tokens)
    num_batches = -(-sum(lengths) // max_tokens)
    batches = _dealt(lengths, num_batches)
    while any(sum(lengths[index] for index in indices) > max_tokens for indices in batches):
        num_batches += 1
        batches = _dealt(lengths, num_batches)
    return [tuple(indices) for indices in batches if indices]


def plan_shards(lengths: Sequence[int], num_shards: int) -> list[tuple[int, ...]]:
    """Distribute sequences over data-parallel ranks, balanced by tokens; each shard keeps the sequences' order."""
    return [tuple(sorted(shard)) for shard in _dealt(lengths, num_shards)]


def _dealt(lengths: Sequence[int], num_shares: int) -> list[list[int]]:
    """Assign sequences, the longest first, to the share with the fewest tokens so far."""
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    taken = [0] * num_shares
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        least = taken.index(min(taken))
        shares[least].append(index)
        taken[least] += lengths[index]
    return shares


def plan_rectangles(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Split neighbouring sequences into parts (start, end) whose padded attention costs least.

    A part costs count x longest^2 scores plus a fixed cost; sequences sorted by length give the best plan.
    """

    def cost(start: int, end: int) -> int:
        return (end - start) * max(lengths[start:end]) ** 2 + _RECTANGLE_COST

    return _cheapest_split(len(lengths), cost)


def _cheapest_split(num_items: int, cost: Callable[[int, int], int | None]) -> list[tuple[int, int]]:
    """Split 0 .. num_items into parts (start, end) of the least total cost; None forbids a part and all longer ones."""
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


def _require_lengths(lengths: Sequence[int], max_tokens: int) -> None:
    for index, length in enumerate(lengths):
        if not 0 < length <= max_tokens:
            known = f"{max_tokens} (max_tokens_per_microbatch)"
            raise ValueError(f"sequence {index} must have 1 to {known} tokens, got {length}")
