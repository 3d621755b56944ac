"""Prompt sets that are too small for a later stage are refused with the field, what is left, and why."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.config import ConfigError
from slipstream.data.prompts import PromptSets
from slipstream.data.sizes import require_sizes
from slipstream.records.stages import DataSetRecord
from slipstream.types import Prompt


def prompts(name: str, count: int) -> tuple[Prompt, ...]:
    return tuple(Prompt(id=f"{name}{i}", text=f"{name}{i}", token_ids=(1,), answer="1") for i in range(count))


def record(name: str, *, num_read: int, num_kept: int, **dropped: int) -> DataSetRecord:
    counts = {"num_duplicates": 0, "num_conflicting": 0, "num_unparseable": 0, "num_too_long": 0, "num_held_out": 0}
    return DataSetRecord(name=name, source="rows", num_read=num_read, num_kept=num_kept, **{**counts, **dropped})


SETS = PromptSets(
    train=prompts("train", 4),
    draft_in_domain=prompts("in domain", 10),
    draft_general=prompts("general", 6),
    validation=prompts("validation", 1),
    records=(
        record("train", num_read=4, num_kept=4),
        record("draft_in_domain", num_read=15, num_kept=9, num_duplicates=3, num_held_out=2, num_empty=1),
        record("draft_general", num_read=9, num_kept=5, num_duplicates=4),
        record("draft_general", num_read=2, num_kept=1, num_duplicates=1),
    ),
)
# Each just fits: 10 prompts in domain; 4 of training, and so 4 x 8 = 32 rollouts.
EXACT: dict[str, Any] = {
    "draft_set": "draft_in_domain",
    "num_draft_prompts": 10,
    "prompts_per_step": 4,
    "group_size": 8,
    "tuning_batch": 32,
    "num_repeated_prompts": 4,
    "num_greedy_prompts": 4,
}


def test_sets_that_just_suffice_are_accepted() -> None:
    require_sizes(SETS, **EXACT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"num_draft_prompts": 11},
            r"^draft\.num_prompts \+ draft\.num_heldout_prompts must be <= 10, the number of distinct prompts in "
            r"data\.draft_in_domain, got 11; of 15 rows read 3 duplicates, 2 in another set, 1 without a usable "
            r"problem were dropped: lower it, or read more rows \(synthetic: raise data\.synthetic\.num_draft_rows; "
            r"else add a source or raise its max_rows\)$",
        ),
        (
            {"draft_set": "draft_general", "num_draft_prompts": 7},
            r"must be <= 6, .* data\.draft_general, got 7; of 11 rows read 5 duplicates were dropped",
        ),
        (
            {"prompts_per_step": 5},
            r"^grpo\.prompts_per_step must be <= 4, .* data\.train, got 5; of 4 rows read none were dropped: .* "
            r"raise data\.synthetic\.num_train_problems",
        ),
        (
            {"tuning_batch": 40},
            r"^tuning\.batch_sizes must be <= 32: 8 rollouts \(grpo\.group_size\) for each of the 4 distinct prompts "
            r"in data\.train, got 40",
        ),
        ({"num_repeated_prompts": 5}, r"^losslessness\.num_repeated_prompts must be <= 4, .* data\.train, got 5"),
        ({"num_greedy_prompts": 5}, r"^losslessness\.num_greedy_prompts must be <= 4, .* data\.train, got 5"),
    ],
)
def test_each_number_above_what_is_left_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        require_sizes(SETS, **{**EXACT, **change})
