"""What an engine holds to propose tokens: the weights and the cached layers of its draft."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from slipstream.config import require
from slipstream.drafts.config import DraftConfig
from slipstream.drafts.methods import DraftMethod
from slipstream.learner.architecture import Shape
from slipstream.workers.placement.memory import NOTHING_PROPOSED, Proposer, draft_parameters, num_parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class _SmallShape:
    """A draft model's, with the policy's vocabulary."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    ffn_hidden_size: int
    tie_word_embeddings: bool = False


def proposer(shape: Shape, config: DraftConfig) -> Proposer:
    """The draft of a policy of this shape.

    Raises:
        ConfigError: a draft model of the hub, whose files are not at hand.
    """
    match config.method:
        case DraftMethod.EAGLE3 | DraftMethod.MTP:  # a layer, and what joins states to it
            return Proposer(
                parameters=draft_parameters(shape),
                num_layers=1,
                num_query_groups=shape.num_query_groups,
                head_dim=shape.head_dim,
            )
        case DraftMethod.DRAFT_MODEL:
            small = _small_shape(shape, config)
            return Proposer(
                parameters=num_parameters(small),
                num_layers=small.num_layers,
                num_query_groups=small.num_query_groups,
                head_dim=small.head_dim,
            )
        case DraftMethod.NGRAM | DraftMethod.SUFFIX:
            return NOTHING_PROPOSED


def _small_shape(shape: Shape, config: DraftConfig) -> _SmallShape:
    if config.model is None:
        small = config.scratch
        return _SmallShape(
            vocab_size=shape.vocab_size,
            hidden_size=small.hidden_size,
            num_layers=small.num_layers,
            num_attention_heads=small.num_attention_heads,
            num_query_groups=small.num_query_groups,
            head_dim=small.head_dim,
            ffn_hidden_size=small.ffn_hidden_size,
        )
    file = Path(config.model) / "config.json"
    fix = "give its directory, or leave out the section `simulator`: only the layout is checked then"
    require(file.is_file(), "draft.model", "must be at hand for the memory to be planned", config.model, fix)
    values = json.loads(file.read_text())
    heads = values["num_attention_heads"]
    return _SmallShape(
        vocab_size=values["vocab_size"],
        hidden_size=values["hidden_size"],
        num_layers=values["num_hidden_layers"],
        num_attention_heads=heads,
        num_query_groups=values.get("num_key_value_heads", heads),
        head_dim=values.get("head_dim") or values["hidden_size"] // heads,
        ffn_hidden_size=values["intermediate_size"],
        tie_word_embeddings=values.get("tie_word_embeddings", False),
    )
