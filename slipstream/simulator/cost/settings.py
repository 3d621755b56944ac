"""How a run is laid out: model, hardware, GPUs, rollouts and their lengths, read from configs/sim/settings.yaml."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated

from slipstream.config import Checked, ge, require, within
from slipstream.simulator.cost.data_files import load
from slipstream.simulator.cost.hardware import BYTES, Hardware, Precision, load_hardware
from slipstream.simulator.cost.lengths import Lengths, lengths_with_mean
from slipstream.simulator.cost.models import ModelShape, load_model
from slipstream.simulator.cost.rollout import RolloutShape, Slots

_NAMED = ("model", "hardware", "precision", "learner_precision", "sources")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting(Checked, path="setting"):
    """One layout. Tokens are counted without the prompt unless the name says so."""

    model: str
    hardware: str
    precision: Precision
    learner_precision: Precision
    num_gpus: int
    gpus_per_engine: int
    memory_share: Annotated[float, within("(0, 1]")]  # of an engine's memory that weights and key-value cache may take
    num_rollouts: int
    group_size: Annotated[int, ge(1)]
    slots: Slots
    prompt_tokens: int
    max_response_tokens: int
    mean_response_tokens: dict[str, float]  # by workload
    length_log_sd: float
    captured_tokens: int
    packed: bool  # the learner's sequences; else each is padded to the longest allowed
    sources: dict[str, str]

    def _check(self) -> None:
        missing = sorted({field.name for field in fields(self)} - set(_NAMED) - set(self.sources))
        require(not missing, "setting.sources", "must name a source of every figure", missing)
        rule = f"must be >= gpus_per_engine {self.gpus_per_engine}"
        self._require(self.num_gpus >= self.gpus_per_engine, "num_gpus", rule)
        needed, memory = self.model_shape.total_parameters * BYTES[self.precision], self.accelerator.memory_bytes
        rule = f"must hold {needed / 1e9:.0f} GB of weights at {memory / 1e9:.0f} GB a GPU"
        self._require(needed <= self.gpus_per_engine * memory, "gpus_per_engine", rule)

    @property
    def model_shape(self) -> ModelShape:
        """The model's shape."""
        return load_model(self.model)

    @property
    def accelerator(self) -> Hardware:
        """The hardware's peaks."""
        return load_hardware(self.hardware)

    def learner_tokens(self, mean_tokens: float) -> float:
        """Tokens of one step's batch as the learner sees it, of responses of `mean_tokens` tokens on average."""
        return self.num_rollouts * (self.prompt_tokens + (mean_tokens if self.packed else self.max_response_tokens))

    @property
    def cache_tokens(self) -> float:
        """Tokens whose keys and values an engine holds beside the weights; one where the weights leave no room."""
        width = BYTES[self.precision]
        room = self.memory_share * self.gpus_per_engine * self.accelerator.memory_bytes
        room -= self.model_shape.total_parameters * width
        return max(1.0, room / (self.model_shape.key_value_elements() * width))

    def shape(self, num_gpus: int | None = None) -> RolloutShape:
        """The rollouts, over the engines that `num_gpus` GPUs hold (default: all of them)."""
        gpus = self.num_gpus if num_gpus is None else num_gpus
        engines = max(1, gpus // self.gpus_per_engine)
        # An engine without a response idles; it does not make the others faster.
        return RolloutShape(
            num_rollouts=self.num_rollouts,
            num_engines=min(engines, self.num_rollouts),
            prompt_tokens=float(self.prompt_tokens),
            group_size=self.group_size,
            slots=self.slots,
            cache_tokens=self.cache_tokens,
        )

    def lengths(self, mean_tokens: float) -> Lengths:
        """Responses of `mean_tokens` tokens on average."""
        limit = float(self.max_response_tokens)
        return lengths_with_mean(mean=mean_tokens, log_sd=self.length_log_sd, max_tokens=limit)


def load_setting(name: str) -> Setting:
    """The section `name` of configs/sim/settings.yaml; refuses what `load` refuses."""
    return load(Setting, "settings", name)
