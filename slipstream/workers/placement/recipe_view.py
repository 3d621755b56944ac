# ruff: noqa: D102 - a recipe's sections are documented at their classes
"""What the planner reads of a recipe, which stands above it."""

from __future__ import annotations

from typing import Protocol

from slipstream.data.config import DataConfig
from slipstream.drafts.config import DraftConfig
from slipstream.drafts.length import TuningConfig
from slipstream.engine.config import EngineConfig, SamplingConfig
from slipstream.grpo.config import GrpoConfig
from slipstream.learner.config import LearnerConfig, PolicyConfig
from slipstream.refit.config import RefitConfig
from slipstream.simulator.config import SimulatorConfig
from slipstream.workers.placement.config import Layout


class Run(Protocol):
    """The sections of a recipe that decide what a GPU has to hold; a `Recipe` has them."""

    @property
    def policy(self) -> PolicyConfig: ...
    @property
    def learner(self) -> LearnerConfig: ...
    @property
    def engine(self) -> EngineConfig: ...
    @property
    def sampling(self) -> SamplingConfig: ...
    @property
    def data(self) -> DataConfig: ...
    @property
    def draft(self) -> DraftConfig: ...
    @property
    def tuning(self) -> TuningConfig: ...
    @property
    def grpo(self) -> GrpoConfig: ...
    @property
    def refit(self) -> RefitConfig: ...
    @property
    def simulator(self) -> SimulatorConfig | None: ...
    @property
    def layout(self) -> Layout: ...
