"""Config of the verifier."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated

from pydantic import Field

from slipstream.config import LARGEST, NUMBER, Checked, NonNegativeInt, PositiveFloat, PositiveInt, Probability, Text

MAX_ANSWER_CHARS = 512
"""Longer answers score 0 unread; a request must fit into a pipe's buffer, or writing it could block."""

MATHEMATICS, REASONING_GYM = "mathematics", "reasoning_gym"
BUILT_IN = (MATHEMATICS, REASONING_GYM)
"""Rewards that need no file: the comparison of answers in mathematics, and reasoning-gym's own score of its tasks."""


class FunctionConfig(Checked, path="reward function"):
    """One of several rewards."""

    function: Text
    """Reward of your own as `FILE:NAME`, or `mathematics`, or `reasoning_gym`. Set it for each."""
    weight: PositiveFloat = 1.0
    """Factor of its score. Set it by how much the function counts beside the others."""
    data_source: Text | None = None
    """Data source whose prompts it scores; null: all prompts. Set it where sets need rewards of their own."""


class OverlongConfig(Checked, path="reward.overlong"):
    """Penalty on responses that near `sampling.max_response_tokens` (DAPO's soft punishment, arXiv:2503.14476)."""

    buffer_tokens: NonNegativeInt = 0
    """Last tokens before the limit, over which the penalty rises linearly from 0; 0 punishes nothing. Set it where
    responses grow towards the limit."""
    penalty: PositiveFloat = 1.0
    """Reward that a response of the largest length loses. Set it by the scale of the reward."""

    def _check(self) -> None:
        rule = "must be left out with reward.overlong.buffer_tokens 0"
        fix = "nothing is punished without it: set buffer_tokens"
        self._require(self.buffer_tokens > 0 or self.penalty == 1.0, "penalty", rule, fix)


class RewardConfig(Checked, path="reward"):
    """Functions that score responses, how long they may take, and in how many processes."""

    function: Text | None = None
    """Reward of your own as `FILE:NAME`, short for `functions` with this one alone. Set it for your task."""
    functions: tuple[FunctionConfig, ...] = ()
    """Rewards whose weighted scores are summed; where none scores a prompt, reasoning-gym or mathematics does. Set it
    for several."""
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    """Penalty on responses that near their limit, in training alone."""
    max_failed_fraction: Probability = 0.1
    """Share of a step's responses for which a function may fail; more end the run. Set it by how sure you are of it."""
    timeout_s: PositiveFloat = 5.0
    """Seconds for one answer; then its worker is killed and the answer scores 0. Set it higher for slow rewards."""
    num_workers: PositiveInt = 1
    """Processes of each function. Set it where rewards take a noticeable part of a step."""
    worker_memory_gib: Annotated[float, Field(ge=0.5, le=LARGEST), NUMBER] = 2.0
    """Memory of one worker, in GiB, beyond which its answer scores 0. Set it for rewards that load data."""

    @property
    def parts(self) -> tuple[FunctionConfig, ...]:
        """The functions, however they are given."""
        return self.functions if self.function is None else (FunctionConfig(function=self.function),)

    def _check(self) -> None:
        is_alone = self.function is None or not self.functions
        self._require(is_alone, "function", "must be left out beside functions", "make it one of them")
