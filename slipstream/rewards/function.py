"""A reward that a user's function computes, and the choice between it and the built-in one."""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from slipstream.config import ConfigError, require
from slipstream.records.files import write_atomic
from slipstream.rewards.config import RewardConfig
from slipstream.rewards.pool import Request, WorkerPool
from slipstream.rewards.reward import Reward, RewardResult
from slipstream.rewards.verifier import Verifier
from slipstream.types import FinishReason, Prompt

logger = logging.getLogger(__name__)

_SHOWN_FAILURES = 3
_SCORE = "score"
_SIGNATURE = "(data_source, solution_str, ground_truth, extra_info)"


class RewardError(RuntimeError):
    """The reward function failed for more responses than the recipe allows."""


@contextmanager
def open_reward(config: RewardConfig) -> Iterator[Reward]:
    """Open the reward of a recipe; its processes end with the block.

    Raises:
        ConfigError: the reward function cannot be loaded.
    """
    reward = Verifier(config) if config.function is None else FunctionReward(config)
    try:
        yield reward
    finally:
        reward.close()


class FunctionReward:
    """A reward by a function that takes verl's arguments: `data_source, solution_str, ground_truth, extra_info`.

    It returns a number, or a mapping with a `score` and further numbers, which become metrics; it may be async. It is
    called in a process that is killed at its deadline, so a call that hangs or crashes costs its own response alone.
    """

    def __init__(self, config: RewardConfig) -> None:
        """Keep `config`, and load the function once.

        Raises:
            ConfigError: there is no such file or function, it cannot be imported, or it takes other arguments.
        """
        assert config.function is not None
        _parts(config.function)
        self._function = config.function
        self._max_failed_fraction = config.max_failed_fraction
        self._pool = WorkerPool(
            config.function,
            num_workers=config.num_workers,
            timeout_s=config.timeout_s,
            memory_gib=config.worker_memory_gib,
        )
        try:
            self._pool.start()
        except RuntimeError as error:
            self._pool.close()
            rule = f"must be a function that can be loaded and takes {_SIGNATURE}"
            raise ConfigError(f"reward.function {rule}, got {config.function!r}; {error}") from error

    def close(self) -> None:
        """End the processes; a later call starts new ones."""
        self._pool.close()

    def gradable(self, references: Sequence[str]) -> tuple[bool, ...]:
        """Take every reference: what it means only the function knows."""
        return (True,) * len(references)

    def equal(self, pairs: Sequence[tuple[str, str]]) -> tuple[bool, ...]:
        """Compare the references by their text."""
        return tuple(one == other for one, other in pairs)

    def judge(self, prompts: Sequence[Prompt], responses: Sequence[str], *, cut_off: Sequence[bool]) -> RewardResult:
        """Call the function with each response.

        Raises:
            RewardError: it failed for more than `reward.max_failed_fraction` of the responses.
        """
        asked = zip(prompts, responses, cut_off, strict=True)
        outcome = self._pool.run([_request(prompt, response, is_cut_off) for prompt, response, is_cut_off in asked])
        failures = dict(outcome.failures)
        rewards: list[float] = []
        numbers: dict[str, list[float]] = defaultdict(list)
        for index, value in enumerate(outcome.values):
            found = _numbers(value)
            if found is None:
                failures.setdefault(index, f"it returned {value!r:.200}, and no finite number")
                found = {_SCORE: 0.0}
            rewards.append(found.pop(_SCORE))
            for name, number in found.items():
                numbers[name].append(number)
        self._report(prompts, failures)
        return RewardResult(
            rewards=tuple(rewards),
            num_timeouts=outcome.num_timeouts,
            num_crashes=outcome.num_crashes,
            num_failures=len(failures) - outcome.num_timeouts - outcome.num_crashes,
            metrics={name: fmean(found) for name, found in sorted(numbers.items())},
        )

    def _report(self, prompts: Sequence[Prompt], failures: Mapping[int, str]) -> None:
        """Log the first failures; raise a RewardError where there are too many."""
        for index in sorted(failures)[:_SHOWN_FAILURES]:
            logger.warning("reward.function for prompt %s: %s", prompts[index].id, failures[index])
        if len(failures) > self._max_failed_fraction * len(prompts):
            first = min(failures)
            raise RewardError(
                f"reward.function must fail for at most {self._max_failed_fraction:.0%} of the responses "
                f"(reward.max_failed_fraction), got {len(failures)} of {len(prompts)}; the first, for prompt "
                f"{prompts[first].id}: {failures[first]}; mend {self._function}"
            )


def _metric(name: str) -> str:
    """Spell a name as metrics are spelled."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") or "unnamed"


def kept(config: RewardConfig, directory: Path) -> RewardConfig:
    """Name the copy of the reward function's file that an execution keeps in `directory`: the name has its hash.

    Raises:
        ConfigError: there is no such file, or the copy was changed after the execution had begun.
    """
    if config.function is None:
        return config
    name, function = _parts(config.function)
    content = name.read_bytes()
    digest = hashlib.sha256(content).hexdigest()[:12]
    if name.parent == directory:
        rule = "must be the function with which the execution was started"
        fix = "its file was changed: bring it back, or start a new execution"
        require(name.stem.endswith(f"-{digest}"), "reward.function", rule, config.function, fix)
        return config
    return replace(config, function=f"{directory / f'{name.stem}-{digest}.py'}:{function}")


def write_kept(config: RewardConfig, copy: RewardConfig) -> None:
    """Write the copy that `kept` named, unless `config` names it already."""
    if config.function is not None and copy.function not in (None, config.function):
        write_atomic(Path(copy.function.rpartition(":")[0]), _parts(config.function)[0].read_bytes())


def _parts(function: str) -> tuple[Path, str]:
    """The file and the name of `FILE:NAME`.

    Raises:
        ConfigError: it is of another form, or there is no such file.
    """
    path, _, name = function.rpartition(":")
    fix = "as in reward.py:compute_score"
    require(bool(path) and name.isidentifier(), "reward.function", "must be FILE:NAME", function, fix)
    require(Path(path).is_file(), "reward.function", "must name a file", path)
    return Path(path), name


def _request(prompt: Prompt, response: str, is_cut_off: bool) -> Request:
    reason = FinishReason.LENGTH if is_cut_off else FinishReason.STOP
    return Request(
        name=f"prompt {prompt.id}",
        arguments={
            "data_source": prompt.data_source,
            "solution_str": response,
            "ground_truth": prompt.answer,
            "extra_info": {**prompt.extra, "finish_reason": reason.value},
        },
    )


def _numbers(value: Any) -> dict[str, float] | None:
    """The score and what stands beside it; None where there is no finite score."""
    found = value if isinstance(value, Mapping) else {_SCORE: value}
    numbers = {_metric(str(name)): float(each) for name, each in found.items() if isinstance(each, int | float)}
    finite = {name: number for name, number in numbers.items() if math.isfinite(number)}
    return finite if _SCORE in finite else None
