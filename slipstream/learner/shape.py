# ruff: noqa: D102 - the names of a model's sizes say what they are
"""What the sizes of a dense model's tensors follow from, and how they may be split."""

from __future__ import annotations

from typing import Protocol

from slipstream.config import require


class Shape(Protocol):
    """What the sizes of a dense model's tensors follow from; an `Architecture` is one."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_query_groups(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def ffn_hidden_size(self) -> int: ...
    @property
    def tie_word_embeddings(self) -> bool: ...


def require_divisible(shape: Shape, *, tensor: int, pipeline: int) -> None:
    """Refuse a split over learner ranks that does not come out even; as many query heads share each key-value head."""
    for name, size in (
        ("key-value heads", shape.num_query_groups),
        ("ffn hidden size", shape.ffn_hidden_size),
        ("vocabulary", shape.vocab_size),
    ):
        require(size % tensor == 0, "learner.parallel.tensor", f"must divide the policy's {size} {name}", tensor)
    layers = shape.num_layers
    require(layers % pipeline == 0, "learner.parallel.pipeline", f"must divide the policy's {layers} layers", pipeline)
