"""Which draft proposes tokens, how it is trained, and the engine settings that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from slipstream.config import require
from slipstream.drafts.autopilot import AutopilotConfig
from slipstream.records import ScheduleEntry


class DraftMethod(StrEnum):
    """Speculation methods, named as in vLLM."""

    EAGLE3 = "eagle3"


class DraftInit(StrEnum):
    """Which prompts the draft is pretrained on; responses always come from the policy itself."""

    IN_DOMAIN = "in_domain"
    GENERAL = "general"


class DraftLengthRule(StrEnum):
    """Whether all rollouts of the speculative arm are drafted for with the tuned k, or with one k a running batch.

    With `by_batch` a rollout's draws depend on how many others run beside it; its distribution never does.
    """

    FIXED = "fixed"
    BY_BATCH = "by_batch"


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """A one-layer EAGLE-3 draft and its pretraining.

    `aux_hidden_state_layer_ids`: id i is the residual stream after i layers of the policy. They are explicit because
    defaults collapse to duplicates on shallow models.
    """

    method: DraftMethod = DraftMethod.EAGLE3
    init: DraftInit = DraftInit.IN_DOMAIN
    length: DraftLengthRule = DraftLengthRule.FIXED
    autopilot: AutopilotConfig = field(default_factory=AutopilotConfig)
    aux_hidden_state_layer_ids: tuple[int, ...]
    num_prompts: int = 1024
    samples_per_prompt: int = 1
    num_heldout_prompts: int = 64
    num_steps: int = 300
    tokens_per_step: int = 2048
    states_cache_gib: float = 4.0  # the policy's hidden states are captured once if they fit, else at each step
    tokens_per_row: int = 512  # chats are packed into rows; attention over a row is dense, so its cost is quadratic
    ttt_steps: int = 4
    ttt_step_loss_decay: float = 1.0
    loss: str = "kl_div"
    learning_rate: float = 1e-3
    warmup_steps: int = 20
    clip_grad: float = 1.0
    checkpoint_every_steps: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        ids = self.aux_hidden_state_layer_ids
        require(
            len(ids) == 3 and len(set(ids)) == 3,
            "draft.aux_hidden_state_layer_ids",
            "must be three different layers",
            ids,
            "duplicates make vLLM fail with a shape error",
        )
        require(list(ids) == sorted(ids) and ids[0] >= 0, "draft.aux_hidden_state_layer_ids", "must rise from 0", ids)
        for name in (
            "num_prompts",
            "samples_per_prompt",
            "num_heldout_prompts",
            "num_steps",
            "ttt_steps",
            "tokens_per_row",
        ):
            value: int = getattr(self, name)
            require(value > 0, f"draft.{name}", "must be > 0", value)
        require(self.states_cache_gib >= 0.0, "draft.states_cache_gib", "must be >= 0", self.states_cache_gib)
        require(self.loss in ("kl_div", "tv", "lk"), "draft.loss", "must be one of kl_div, tv, lk", self.loss)


def speculative_config(
    method: DraftMethod, draft: Path, num_speculative_tokens: int, *, schedule: Sequence[ScheduleEntry] = ()
) -> dict[str, Any]:
    """vLLM's `speculative_config` of a draft.

    `draft_sample_method` is explicit: vLLM's default drafts greedily, which wastes acceptance at temperature > 0.

    Args:
        num_speculative_tokens: of every draft; with a schedule, of the longest.
        schedule: k by running batch. Only with one can the length be changed while the engine lives.
    """
    require(num_speculative_tokens >= 1, "num_speculative_tokens", "must be >= 1", num_speculative_tokens)
    by_batch = [[entry.batch_from, entry.batch_to, entry.num_speculative_tokens] for entry in schedule]
    return {
        "method": method.value,
        "model": str(draft),
        "num_speculative_tokens": num_speculative_tokens,
        "draft_sample_method": "probabilistic",
        "rejection_sample_method": "standard",
        **({"num_speculative_tokens_per_batch_size": by_batch} if by_batch else {}),
    }
