"""Catalog of models, accelerators and simulator settings in configs/sim/*.yaml; each constant there has its source."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field

from slipstream.config import Checked, PositiveInt, from_mapping, read_mapping, require

T = TypeVar("T")
Positive = Annotated[float, Field(gt=0)]

# `configs` lies beside `slipstream` in a checkout, an image and a wheel alike.
CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def load(cls: type[T], kind: str, name: str) -> T:
    """Load the section `name` of configs/sim/<kind>.yaml as a `cls`."""
    return from_mapping(cls, section(kind, name), f"{kind.removesuffix('s')}.{name}")


def section(kind: str, name: str) -> dict[str, Any]:
    """Return the plain values of a section, which must exist."""
    sections = _sections(kind)
    require(name in sections, kind, "must be a known section", name, f"known: {', '.join(sections)}")
    return sections[name]


def section_names(kind: str) -> tuple[str, ...]:
    """Return the names of a file's sections."""
    return tuple(_sections(kind))


@cache
def _sections(kind: str) -> dict[str, Any]:
    return read_mapping(CONFIGS / "sim" / f"{kind}.yaml", "simulator data")


class Precision(StrEnum):
    """Type of weights and activations; `BYTES` has their width."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT8 = "float8"


BYTES = {Precision.FLOAT32: 4, Precision.BFLOAT16: 2, Precision.FLOAT8: 1}
DFLASH_LAYERS = 5
"""Layers of the published DFlash drafts of Qwen3 (arXiv 2602.06036)."""


def target_of(hardware: str) -> str:
    """Return the kind of machine of a section of configs/sim/hardware.yaml: `cpu` or `gpu`."""
    return "cpu" if hardware.startswith("cpu") else "gpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """One accelerator, with its peak rates in bytes, bytes/s and flop/s and the source of each."""

    name: str
    memory_bytes: Positive
    memory_bytes_per_s: Positive
    link_bytes_per_s: Positive  # one direction, within an NVLink domain
    domain_gpus: PositiveInt  # accelerators of an NVLink domain
    network_bytes_per_s: Positive  # one direction, one accelerator, between domains
    flops_per_s: dict[Precision, Positive]  # dense
    sources: dict[str, str]

    def __post_init__(self) -> None:
        missing = sorted({field.name for field in fields(self)} - {"name", "sources", *self.sources})
        require(not missing, f"hardware {self.name}.sources", "must name a source of every constant", missing)
        rule = f"must have a rate for each of {', '.join(Precision)}"
        found = sorted(self.flops_per_s)
        require(found == sorted(Precision), f"hardware {self.name}.flops_per_s", rule, found)


@cache
def load_hardware(name: str) -> Hardware:
    """Load the section `name` of configs/sim/hardware.yaml."""
    return load(Hardware, "hardware", name)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A dense or mixture-of-experts decoder with grouped-query attention, and its one-layer draft."""

    name: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int  # key-value heads
    head_dim: int
    vocab_size: int
    ffn_hidden_size: int = 0  # dense
    num_experts: int = 0
    num_experts_per_token: int = 0
    expert_ffn_hidden_size: int = 0
    tie_word_embeddings: bool = False
    draft_ffn_hidden_size: int
    draft_vocab_size: int
    source: str
    draft_source: str

    def __post_init__(self) -> None:
        dense, sparse = self.ffn_hidden_size > 0, self.num_experts > 0
        require(dense != sparse, f"model {self.name}", "must be either dense or a mixture of experts", (dense, sparse))
        heads, groups = self.num_attention_heads, self.num_query_groups
        rule = f"must divide num_attention_heads {heads}"
        require(heads % groups == 0, f"model {self.name}.num_query_groups", rule, groups)
        active, rule = self.num_experts_per_token, f"must lie in [0, num_experts {self.num_experts}]"
        require(0 <= active <= self.num_experts, f"model {self.name}.num_experts_per_token", rule, active)

    @property
    def queries_per_group(self) -> int:
        """Number of query heads that share a key-value head."""
        return self.num_attention_heads // self.num_query_groups

    @property
    def shared_parameters(self) -> float:
        """Number of parameters that every token reads: attention, dense feed-forward, output head."""
        return self.num_layers * (self._attention() + self._ffn(self.ffn_hidden_size)) + self._head()

    @property
    def expert_parameters(self) -> float:
        """Number of one expert's parameters over all layers."""
        return self.num_layers * self._ffn(self.expert_ffn_hidden_size)

    @property
    def parameters_per_token(self) -> float:
        """Number of parameters in one token's forward pass."""
        return self.shared_parameters + self.num_experts_per_token * self.expert_parameters

    @property
    def total_parameters(self) -> float:
        """Number of all parameters, with the input embedding."""
        return self.shared_parameters + self.num_experts * self.expert_parameters + self._head()

    @property
    def draft_parameters(self) -> float:
        """Number of parameters that a draft pass reads: fused features, a layer with a double-width input, output head.

        Source: EAGLE-3, arXiv 2503.01840, section 3.
        """
        fused = 3 * self.hidden_size**2
        extra_input = self.hidden_size * self.head_dim * (self.num_attention_heads + 2 * self.num_query_groups)
        layer = self._attention() + extra_input + self._ffn(self.draft_ffn_hidden_size)
        return fused + layer + self.hidden_size * self.draft_vocab_size

    @property
    def dflash_parameters(self) -> float:
        """Number of parameters that a pass of a DFlash draft reads: fused features, its layers, output head.

        Source: DFlash, arXiv 2602.06036: as many layers as layers of the policy that it reads.
        """
        layer = self._attention() + self._ffn(self.draft_ffn_hidden_size)
        return DFLASH_LAYERS * (self.hidden_size**2 + layer) + self.hidden_size * self.draft_vocab_size

    def key_value_elements(self) -> float:
        """Return the key-value cache elements of one token."""
        return 2.0 * self.num_layers * self.num_query_groups * self.head_dim

    def attention_flops(self) -> float:
        """Return the attention flops of one query token over one token of context, for scores and values."""
        return 4.0 * self.num_layers * self.num_attention_heads * self.head_dim

    def _attention(self) -> float:
        return float(self.hidden_size * self.head_dim * 2 * (self.num_attention_heads + self.num_query_groups))

    def _ffn(self, width: int) -> float:
        return 3.0 * self.hidden_size * width

    def _head(self) -> float:
        return float(self.vocab_size * self.hidden_size)


@cache
def load_model(name: str) -> ModelShape:
    """Load the section `name` of configs/sim/models.yaml."""
    return load(ModelShape, "models", name)


class SimulatorConfig(Checked, path="simulator"):
    """Sections of configs/sim/models.yaml and configs/sim/hardware.yaml, for the projection and the memory of GPUs."""

    model: str
    """Section of configs/sim/models.yaml with the policy's shape."""
    hardware: str
    """Section of configs/sim/hardware.yaml with the accelerator's peaks and memory."""

    def _check(self) -> None:
        for name, kind in (("model", "models"), ("hardware", "hardware")):
            known = section_names(kind)
            self._require(getattr(self, name) in known, name, "must be known", f"known: {', '.join(known)}")
