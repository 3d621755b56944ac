"""Traits of each method of speculation, in one table.

All code that depends on the method reads this table: what pretraining produces, what an engine loads, what a refit
transfers, what RL may train, and vLLM's `speculative_config`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.config import require
from slipstream.records.steps import ScheduleEntry

if TYPE_CHECKING:
    from slipstream.drafts.config import DraftConfig

SCHEDULE = "num_speculative_tokens_per_batch_size"
"""vLLM's key of the schedule of draft lengths by running batch."""


class DraftMethod(StrEnum):
    """Speculation methods, named as in vLLM; `history` is our own."""

    EAGLE3 = "eagle3"  # one layer on the policy's hidden states
    DFLASH = "dflash"  # layers on the policy's hidden states that propose all tokens in one pass
    MTP = "mtp"  # the policy's own layer that predicts the token after the next
    DRAFT_MODEL = "draft_model"  # a small language model with the policy's vocabulary
    NGRAM = "ngram"  # the continuation of an earlier match of the last tokens in the same sequence
    SUFFIX = "suffix"  # the continuation of a match in all responses of the engine
    HISTORY = "history"  # the continuation of a match in the engine's responses to the same prompt


class Verification(StrEnum):
    """Rule by which the policy accepts drafts; responses have the policy's own distribution by either."""

    TOKEN = "token"  # a test of each draft token, up to the first that fails
    BLOCK = "block"  # a test of each length of the draft, of which the longest that passes is taken


class DraftSampling(StrEnum):
    """Choice of the tokens that a draft with weights proposes; responses have the policy's own distribution by any."""

    AUTO = "auto"  # the faster of the two others, which tuning measures
    PROBABILISTIC = "probabilistic"  # sampled from the draft's distribution
    GREEDY = "greedy"  # the draft's likeliest token


class Training(StrEnum):
    """Data that `pretrain_draft` trains on."""

    NONE = "none"  # nothing to train
    HIDDEN_STATES = "hidden_states"  # the policy's states on its own responses
    RESPONSES = "responses"  # the policy's responses as text


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """Traits of one method."""

    has_weights: bool = False  # a model in a directory of its own samples drafts; else they are looked up, and certain
    training: Training = Training.NONE
    trains_online: bool = False  # RL can train the draft (`draft.online`), and a refit transfers the draft too
    fields: frozenset[str]  # fields and sections of `DraftConfig`, beside `method`, that the method reads
    package: str | None = None  # package that the method needs beside vLLM
    has_one_length: bool = False  # vLLM's proposer cannot draft fewer tokens than at its start


_TRAINED = frozenset({"init", "pretrain", "seed"})

TRAITS = {
    DraftMethod.EAGLE3: Traits(
        has_weights=True,
        training=Training.HIDDEN_STATES,
        trains_online=True,
        fields=_TRAINED | {"eagle3", "model", "online"},
    ),
    DraftMethod.DFLASH: Traits(has_weights=True, training=Training.HIDDEN_STATES, fields=_TRAINED | {"dflash"}),
    DraftMethod.MTP: Traits(
        # The layer lies in the policy's checkpoint, but is trained, saved and refitted as a draft of its own.
        has_weights=True,
        training=Training.HIDDEN_STATES,
        trains_online=True,
        fields=_TRAINED | {"online"},
    ),
    DraftMethod.DRAFT_MODEL: Traits(
        has_weights=True, training=Training.RESPONSES, fields=_TRAINED | {"draft_model", "model"}
    ),
    DraftMethod.NGRAM: Traits(fields=frozenset({"ngram"})),
    DraftMethod.SUFFIX: Traits(fields=frozenset({"suffix"}), package="arctic_inference", has_one_length=True),
    DraftMethod.HISTORY: Traits(fields=frozenset({"history"}), has_one_length=True),
}
"""Traits by method; a method that looks its drafts up keeps the defaults."""


def require_package(method: DraftMethod) -> None:
    """Reject a method whose package is not installed."""
    package = TRAITS[method].package
    if package is None or find_spec(package) is not None:
        return
    fix = f"install {package.replace('_', '-')}, which compiles C++, or take {DraftMethod.NGRAM.value}"
    require(False, "draft.method", f"must do without the package {package}, which is not here", method.value, fix)


def require_choice(sampling: DraftSampling) -> None:
    """Reject `auto` where no tuning has chosen."""
    rule, fix = "must be probabilistic or greedy where no draft length is tuned", "tuning alone compares the two"
    require(sampling is not DraftSampling.AUTO, "draft.sampling", rule, sampling.value, fix)


def speculative_config(
    config: DraftConfig, draft: Path | None, num_speculative_tokens: int, *, schedule: Sequence[ScheduleEntry] = ()
) -> dict[str, Any]:
    """Build vLLM's `speculative_config`.

    With `disable_eagle_block_drop` rollouts share the last whole block of their prompt too. vLLM would compute it anew,
    as the draft's last entry in it comes from the token behind it, which a group shares. Where prompts are equal up to
    that block alone, the entry is another prompt's, and drafts may be accepted less.

    A greedy draft, and a method that looks drafts up, proposes one token with certainty at each position. Rejection
    sampling accepts it with the policy's probability of it, and samples the replacement from the other tokens.

    Args:
        draft: directory of the draft; None exactly where the method has no weights of its own.
        num_speculative_tokens: draft length; with a schedule, the longest.
        schedule: k by running batch; only with a schedule can the length change while the engine lives.
    """
    require(num_speculative_tokens >= 1, "num_speculative_tokens", "must be >= 1", num_speculative_tokens)
    require_choice(config.sampling)
    traits = TRAITS[config.method]
    assert (draft is not None) == traits.has_weights, f"{config.method} with draft {draft}"
    require_package(config.method)
    told: dict[str, Any] = {
        "method": config.method.value,
        "num_speculative_tokens": num_speculative_tokens,
        "rejection_sample_method": "block" if config.verification is Verification.BLOCK else "standard",
    }
    if schedule:
        told[SCHEDULE] = [[entry.batch_from, entry.batch_to, entry.num_speculative_tokens] for entry in schedule]
    if draft is not None:
        told |= {"model": str(draft), "draft_sample_method": config.sampling.value, "disable_eagle_block_drop": True}
    else:
        prefix = "suffix_decoding_" if config.method is DraftMethod.SUFFIX else ""
        told |= {f"{prefix}{name}": value for name, value in vars(getattr(config, config.method.value)).items()}
    return told
