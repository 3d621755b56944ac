"""What sets each method of speculation apart, in one table.

Everything that depends on the method asks here: what pretraining makes, what an engine loads, what a refit brings,
what may be trained during RL, and what vLLM is told (`speculative_config`).
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
"""vLLM's name for the table of draft lengths by running batch."""


class DraftMethod(StrEnum):
    """Speculation methods, named as in vLLM."""

    EAGLE3 = "eagle3"  # one layer on the policy's hidden states
    MTP = "mtp"  # the layer of the policy itself that predicts the token after the next
    DRAFT_MODEL = "draft_model"  # a small language model of the policy's vocabulary
    NGRAM = "ngram"  # what followed the last tokens where they stood before in this sequence
    SUFFIX = "suffix"  # the same over all that the engine has answered


class Weights(StrEnum):
    """Where the weights lie that propose tokens."""

    NONE = "none"  # drafts are looked up
    OWN = "own"  # in a model directory of their own
    POLICY = "policy"  # they are heads of the policy: saved, loaded and refitted with it


class Training(StrEnum):
    """From what `pretrain_draft` trains."""

    NONE = "none"  # nothing to train
    HIDDEN_STATES = "hidden_states"  # of the policy, on its own responses
    RESPONSES = "responses"  # of the policy, as text alone


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """What sets one method apart.

    `samples`: it draws its tokens from a distribution of its own; else it proposes one sequence as if it were certain.
    `trains_online`: `draft.online` has something to train, and a refit brings the draft too.
    `fields`: of `DraftConfig`, beside `method`, that change what the method does.
    `package`: what must be installed beside vLLM.
    """

    weights: Weights = Weights.NONE
    training: Training = Training.NONE
    samples: bool = False
    trains_online: bool = False
    fields: frozenset[str]
    package: str | None = None
    has_one_length: bool = False  # vLLM's proposer cannot draft fewer tokens than it was started for


_TRAINED = frozenset(
    {
        "init",
        "num_prompts",
        "samples_per_prompt",
        "num_heldout_prompts",
        "num_steps",
        "tokens_per_step",
        "ttt_steps",
        "learning_rate",
        "warmup_steps",
        "checkpoint_every_steps",
        "seed",
    }
)

ONLINE_FIELDS = (
    "online",
    "online_horizon_steps",
    "online_learning_rate",
    "online_optimizer",
    "online_tokens_per_update",
    "online_ttt_steps",
    "online_updates",
)
"""What pretraining does not read."""

TRAITS = {
    DraftMethod.EAGLE3: Traits(
        weights=Weights.OWN,
        training=Training.HIDDEN_STATES,
        samples=True,
        trains_online=True,
        fields=_TRAINED.union(
            ONLINE_FIELDS,
            ("aux_hidden_state_layer_ids", "states_cache_gib", "tokens_per_row", "ttt_step_loss_decay", "clip_grad"),
            ("loss", "loss_chunk_tokens", "model", "vocab_size"),
        ),
    ),
    DraftMethod.MTP: Traits(
        # In the policy's checkpoint, yet trained apart: it has a directory of its own, and is refitted as a draft.
        weights=Weights.OWN,
        training=Training.HIDDEN_STATES,
        samples=True,
        trains_online=True,
        fields=_TRAINED.union(ONLINE_FIELDS, ("states_cache_gib", "ttt_step_loss_decay", "clip_grad")),
    ),
    DraftMethod.DRAFT_MODEL: Traits(
        weights=Weights.OWN,
        training=Training.RESPONSES,
        samples=True,
        fields=_TRAINED | {"model", "scratch"},
    ),
    DraftMethod.NGRAM: Traits(fields=frozenset({"prompt_lookup_min", "prompt_lookup_max"})),
    DraftMethod.SUFFIX: Traits(
        fields=frozenset(
            f"suffix_{name}" for name in ("max_tree_depth", "max_cached_requests", "max_spec_factor", "min_token_prob")
        ),
        package="arctic_inference",
        has_one_length=True,
    ),
}
"""A method that looks its drafts up has the defaults."""


def require_package(method: DraftMethod) -> None:
    """Refuse a method whose package is not installed.

    Raises:
        ConfigError: the message has the package to install.
    """
    package = TRAITS[method].package
    if package is None or find_spec(package) is not None:
        return
    fix = f"install {package.replace('_', '-')}, which compiles C++, or take {DraftMethod.NGRAM.value}"
    require(False, "draft.method", f"must do without the package {package}, which is not here", method.value, fix)


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
    if traits.weights is Weights.NONE:
        lookup = {name: getattr(config, name) for name in sorted(traits.fields)}
        told |= {name.replace("suffix_", "suffix_decoding_"): value for name, value in lookup.items()}
    return told
