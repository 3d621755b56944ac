"""Whether the prompts suffice for what a recipe asks of them: known once they are read, long before they are used."""

from __future__ import annotations

from typing import Literal

from slipstream.config import require
from slipstream.data.prompts import PromptSets
from slipstream.data.synthetic import Split

DraftSet = Literal["draft_in_domain", "draft_general"]

_SYNTHETIC_FIELD = {
    "train": "num_train_problems",
    "draft_in_domain": "num_draft_rows",
    "draft_general": "num_draft_rows",
}
_REASONS = {
    "num_duplicates": "duplicates",
    "num_conflicting": "with conflicting answers",
    "num_unparseable": "without a usable answer",
    "num_too_long": "too long",
    "num_held_out": "in another set",
    "num_empty": "without a usable problem",
}


def require_sizes(
    sets: PromptSets,
    *,
    draft_set: DraftSet,
    num_draft_prompts: int,
    prompts_per_step: int,
    group_size: int,
    tuning_batch: int,
    num_repeated_prompts: int,
    num_greedy_prompts: int,
) -> None:
    """Refuse prompt sets that a later stage would find too small.

    Args:
        draft_set: the set that the draft is trained on.
        num_draft_prompts: prompts of the draft, the held-out ones included.
        tuning_batch: rollouts of the largest batch of the sweep.
        num_repeated_prompts: of the certificate, as `num_greedy_prompts`.
    Raises:
        ConfigError: a set has too few distinct prompts; it names the field, what is left, and where the rest went.
    """
    _require(sets, draft_set, "draft.num_prompts + draft.num_heldout_prompts", num_draft_prompts)
    _require(sets, "train", "grpo.prompts_per_step", prompts_per_step)
    _require(sets, "train", "tuning.batch_sizes", tuning_batch, rollouts_per_prompt=group_size)
    _require(sets, "train", "losslessness.num_repeated_prompts", num_repeated_prompts)
    _require(sets, "train", "losslessness.num_greedy_prompts", num_greedy_prompts)


def _require(sets: PromptSets, split: Split, field: str, value: int, *, rollouts_per_prompt: int = 1) -> None:
    left = sets.sizes()[split]
    rule = f"must be <= {left}, the number of distinct prompts in data.{split}"
    if rollouts_per_prompt > 1:
        rule = (
            f"must be <= {left * rollouts_per_prompt}: {rollouts_per_prompt} rollouts (grpo.group_size) for each of "
            f"the {left} distinct prompts in data.{split}"
        )
    fix = (
        f"{_account(sets, split)}: lower it, or read more rows "
        f"(synthetic: raise data.synthetic.{_SYNTHETIC_FIELD[split]}; else add a source or raise its max_rows)"
    )
    require(value <= left * rollouts_per_prompt, field, rule, value, fix)


def _account(sets: PromptSets, split: Split) -> str:
    """How many rows were read, and why the others are no prompts."""
    own = [record for record in sets.records if record.name == split]
    dropped = {reason: sum(getattr(record, name) for record in own) for name, reason in _REASONS.items()}
    reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items() if count)
    return f"of {sum(record.num_read for record in own)} rows read {reasons or 'none'} were dropped"
