"""What vLLM is told of a draft: its `speculative_config`, for every method in one place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.config import require
from slipstream.drafts.config import DraftConfig
from slipstream.drafts.methods import TRAITS, DraftMethod, Weights, require_package
from slipstream.records.steps import ScheduleEntry

SCHEDULE = "num_speculative_tokens_per_batch_size"
"""vLLM's name for the table of draft lengths by running batch."""


def speculative_config(
    config: DraftConfig, draft: Path | None, num_speculative_tokens: int, *, schedule: Sequence[ScheduleEntry] = ()
) -> dict[str, Any]:
    """vLLM's `speculative_config`.

    `draft_sample_method` is explicit where it applies: vLLM's default drafts greedily, which wastes acceptance at
    temperature > 0. A method that looks drafts up proposes one token alone at each position; the same rejection rule
    then accepts it with the policy's probability of it, and draws what it rejects from the others.

    Args:
        draft: directory of the draft; None exactly where the method has no weights of its own.
        num_speculative_tokens: of every draft; with a schedule, of the longest.
        schedule: k by running batch. Only with one can the length be changed while the engine lives.
    Raises:
        ConfigError: fewer than one token, or the method's package is not installed.
    """
    require(num_speculative_tokens >= 1, "num_speculative_tokens", "must be >= 1", num_speculative_tokens)
    traits = TRAITS[config.method]
    assert (draft is not None) == (traits.weights is Weights.OWN), f"{config.method} with draft {draft}"
    require_package(config.method)
    told: dict[str, Any] = {
        "method": config.method.value,
        "num_speculative_tokens": num_speculative_tokens,
        "rejection_sample_method": "standard",
    }
    if schedule:
        told[SCHEDULE] = [[entry.batch_from, entry.batch_to, entry.num_speculative_tokens] for entry in schedule]
    if draft is not None:
        told["model"] = str(draft)
    if traits.samples:
        told["draft_sample_method"] = "probabilistic"
    match config.method:
        case DraftMethod.NGRAM:
            told["prompt_lookup_min"] = config.prompt_lookup_min
            told["prompt_lookup_max"] = config.prompt_lookup_max
        case DraftMethod.SUFFIX:
            told["suffix_decoding_max_tree_depth"] = config.suffix_max_tree_depth
            told["suffix_decoding_max_cached_requests"] = config.suffix_max_cached_requests
            told["suffix_decoding_max_spec_factor"] = config.suffix_max_spec_factor
            told["suffix_decoding_min_token_prob"] = config.suffix_min_token_prob
        case _:
            pass
    return told
