"""Which groups a step has to take, lest one of them, at this step or a later one, grows older than the lag allows.

Of groups that were submitted under version v, the last step that can take them is v + lag. A step takes `P` groups, so
all of version v or before are taken in time only if no more than `P * (v + lag - t + 1)` of them are left when step t
begins. That holds for every v, not for the oldest alone: a step that takes young groups, only because they are there,
may leave more old ones than a later batch holds.

It can always be kept. While the newest version is t, (t + lag + 1) batches were submitted in all, so at most a batch of
those that are there has to be taken in one step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slipstream.train.asynchronous.buffer import Scored


def due(started: Mapping[int, int], step: int, *, lag: int) -> set[int]:
    """Groups that would be older than the lag allows in the step after this one.

    Args:
        started: by index of each group that was not trained on yet, the version that it was submitted under.
        step: which takes a batch; its version is the newest.
        lag: in steps.
    """
    return {index for index, version in started.items() if version <= step - lag}


def num_missing(there: Sequence[int], started: Mapping[int, int], step: int, *, lag: int, per_step: int) -> int:
    """How many groups this step has to take and has to wait for; `there` are those that it could take.

    Raises:
        AssertionError: more are due than a batch holds; the steps before took the wrong ones.
    """
    missing = 0
    for version, num_owed in _owed(started, step, lag=lag, per_step=per_step):
        missing = max(missing, num_owed - sum(started[index] <= version for index in there))
    return missing


def batch(
    waiting: Sequence[Scored], started: Mapping[int, int], step: int, *, lag: int, per_step: int
) -> list[Scored] | None:
    """`per_step` groups, or None as long as too few are there: those that have to be taken, then in the order given.

    Raises:
        AssertionError: see `num_missing`.
    """
    there = [each.index for each in waiting]
    if len(there) < per_step or num_missing(there, started, step, lag=lag, per_step=per_step):
        return None
    chosen: list[int] = []
    for version, num_owed in _owed(started, step, lag=lag, per_step=per_step):
        others = [index for index in there if started[index] <= version and index not in chosen]
        chosen += others[: max(0, num_owed - len(chosen))]
    chosen += [index for index in there if index not in chosen][: per_step - len(chosen)]
    by_index = {each.index: each for each in waiting}
    return [by_index[index] for index in chosen]


def _owed(started: Mapping[int, int], step: int, *, lag: int, per_step: int) -> list[tuple[int, int]]:
    """How many groups of each version or before this step has to take; the oldest version first."""
    owed: list[tuple[int, int]] = []
    for num_later, version in enumerate(range(step - lag, step - lag + max(1, lag))):
        num_owed = max(0, sum(each <= version for each in started.values()) - num_later * per_step)
        assert num_owed <= per_step, f"{num_owed} groups of version {version} or before have to be taken in step {step}"
        owed.append((version, num_owed))
    return owed
