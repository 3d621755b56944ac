"""A reward that a user's function computes, and the sum of several, each of the prompts that it scores."""

from __future__ import annotations

import hashlib
import logging
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from slipstream.config import LARGEST, ConfigError, require
from slipstream.data.config import REASONING_GYM as TASK
from slipstream.records.files import write_atomic
from slipstream.rewards.config import BUILT_IN, MATHEMATICS, FunctionConfig, RewardConfig
from slipstream.rewards.config import REASONING_GYM as GYM
from slipstream.rewards.pool import Request, WorkerPool
from slipstream.rewards.reward import Reward, RewardResult, joined
from slipstream.rewards.verifier import Verifier
from slipstream.types import FinishReason, Prompt

logger = logging.getLogger(__name__)

_SHOWN_FAILURES = 3
_SCORE = "score"
_METRIC_CHARACTERS = 100
_SIGNATURE = "(data_source, solution_str, ground_truth, extra_info)"


class RewardError(RuntimeError):
    """The reward function failed for more responses than the recipe allows."""


@contextmanager
def open_reward(config: RewardConfig, *, per_step: int = 0) -> Iterator[Reward]:
    """Open the reward of a recipe, whose functions must load; its processes end with the block.

    Args:
        per_step: responses of a training step, where a call of `judge` may score some of them alone.
    """
    with closing(SummedReward(config, per_step=per_step)) as reward:
        for part in config.parts:
            reward.of(part.function)
        yield reward


class SummedReward:
    """Sum of the weighted scores of the functions that score a prompt; the built-in reward where none of them does."""

    def __init__(self, config: RewardConfig, *, per_step: int = 0) -> None:
        """Keep `config`; a function is loaded before its first call."""
        self._config, self._per_step = config, per_step
        self._rewards: dict[str, Reward] = {}  # by function

    def close(self) -> None:
        """End the processes; a later call starts new ones."""
        for reward in self._rewards.values():
            reward.close()

    def gradable(self, references: Sequence[str], data_source: str = "") -> tuple[bool, ...]:
        """Check that every function of the data source can score against each reference."""
        found = [self.of(part.function).gradable(references) for part in self._parts(data_source)]
        return tuple(map(all, zip(*found, strict=True)))

    def equal(self, pairs: Sequence[tuple[str, str]], data_source: str = "") -> tuple[bool, ...]:
        """Check that every function of the data source takes both references of each pair for the same."""
        found = [self.of(part.function).equal(pairs) for part in self._parts(data_source)]
        return tuple(map(all, zip(*found, strict=True)))

    def judge(self, prompts: Sequence[Prompt], responses: Sequence[str], *, cut_off: Sequence[bool]) -> RewardResult:
        """Score each response by the functions of its prompt's data source.

        Where a recipe has several functions, the mean score of each is a metric too, and names of metrics begin with
        the function's data source, or its name where it scores all, and with its place where that says too little.

        Raises:
            RewardError: a function failed for more than `reward.max_failed_fraction` of a step's responses.
        """
        asked: dict[FunctionConfig, list[int]] = defaultdict(list)
        for index, prompt in enumerate(prompts):
            for part in self._parts(prompt.data_source):
                asked[part].append(index)
        rewards, results = [0.0] * len(prompts), []
        for part, own in asked.items():
            result = self.of(part.function).judge(
                [prompts[index] for index in own],
                [responses[index] for index in own],
                cut_off=[cut_off[index] for index in own],
            )
            for index, score in zip(own, result.rewards, strict=True):
                rewards[index] += part.weight * score
            results.append(result if len(self._config.parts) < 2 else _named(part, result, self._config.parts))
        return replace(joined(results), rewards=tuple(rewards))

    def _parts(self, data_source: str) -> Sequence[FunctionConfig]:
        own = [part for part in self._config.parts if part.data_source in (None, data_source)]
        built_in = GYM if data_source.startswith(TASK) else MATHEMATICS
        return own or [FunctionConfig(function=built_in)]

    def of(self, function: str) -> Reward:
        """Return the reward of one function, which the first call loads."""
        if function not in self._rewards:
            if function == MATHEMATICS:
                self._rewards[function] = Verifier(self._config)
            else:
                self._rewards[function] = FunctionReward(self._config, function, per_step=self._per_step)
        return self._rewards[function]


def _named(part: FunctionConfig, result: RewardResult, parts: Sequence[FunctionConfig]) -> RewardResult:
    """Name the metrics of one of several functions after it, and put its mean score beside them."""
    names = [_metric(each.data_source or each.function.rpartition(":")[2]) for each in parts]
    place = parts.index(part) if part in parts else None  # None: the built-in reward, where no function scores
    name = _metric(part.function) if place is None else names[place]
    if place is not None and names.count(name) > 1:
        name = f"{name}_{place + 1}"
    own = {f"{name}_{key}": value for key, value in result.metrics.items()}
    return replace(result, metrics={f"{name}_{_SCORE}": fmean(result.rewards), **own})


class FunctionReward:
    """A reward by a function that takes verl's arguments: `data_source, solution_str, ground_truth, extra_info`.

    It returns a number, or a mapping with a `score` and further numbers, which become metrics; it may be async. It is
    called in a process that is killed at its deadline, so a call that hangs or crashes costs its own response alone.
    """

    def __init__(self, config: RewardConfig, function: str, *, per_step: int = 0) -> None:
        """Keep the limits of `config`, and load the function, `FILE:NAME` or a built-in one, to see that it can be."""
        if function not in BUILT_IN:
            _file_and_name(function)
        self._function = function
        self._max_failed_fraction = config.max_failed_fraction
        self._per_step = per_step
        self._recent: list[bool] = []  # for each of the last responses whether the function failed
        self._pool = WorkerPool(function, config)
        try:
            self._pool.start()
        except RuntimeError as error:
            self._pool.close()
            rule = f"must be a function that can be loaded and takes {_SIGNATURE}"
            raise ConfigError(f"reward.function {rule}, got {function!r}; {error}") from error

    def close(self) -> None:
        """End the processes; a later call starts new ones."""
        self._pool.close()

    def gradable(self, references: Sequence[str], data_source: str = "") -> tuple[bool, ...]:
        """Take every reference: what it means only the function knows."""
        return (True,) * len(references)

    def equal(self, pairs: Sequence[tuple[str, str]], data_source: str = "") -> tuple[bool, ...]:
        """Compare the references by their text."""
        return tuple(one == other for one, other in pairs)

    def judge(self, prompts: Sequence[Prompt], responses: Sequence[str], *, cut_off: Sequence[bool]) -> RewardResult:
        """Call the function with each response.

        Raises:
            RewardError: it failed for more than `reward.max_failed_fraction` of the responses, or of a step's where the
                call has fewer: then earlier calls count too.
        """
        asked = zip(prompts, responses, cut_off, strict=True)
        outcome = self._pool.run([_request(prompt, response, is_cut_off) for prompt, response, is_cut_off in asked])
        failures = dict(outcome.failures)
        rewards: list[float] = []
        numbers: dict[str, list[float]] = defaultdict(list)
        for index, value in enumerate(outcome.values):
            found = _numbers(value)
            if found is None:
                failures.setdefault(index, f"it returned {value!r:.200}, and no number up to {LARGEST}")
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
        num = max(len(prompts), self._per_step)
        self._recent = [*self._recent, *(index in failures for index in range(len(prompts)))][-num:]
        if failures and sum(self._recent) > self._max_failed_fraction * num:
            first = min(failures)
            raise RewardError(
                f"reward.function must fail for at most {self._max_failed_fraction:.0%} of the responses "
                f"(reward.max_failed_fraction), got {sum(self._recent)} of {num}; the first of this call, for prompt "
                f"{prompts[first].id}: {failures[first]}; mend {self._function}"
            )


def _metric(name: str) -> str:
    """Spell a name as metrics are spelled: with a letter first, and short enough for two in one."""
    spelled = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")[:_METRIC_CHARACTERS]
    return f"x{spelled}" if spelled[:1].isdigit() else spelled or "unnamed"


def kept(config: RewardConfig, directory: Path) -> RewardConfig:
    """Name the copies of the reward functions' files that an execution keeps in `directory`: names have their hashes.

    A copy that was changed after the execution had begun is refused.
    """
    functions = tuple(replace(part, function=_copy(part.function, directory)) for part in config.functions)
    function = None if config.function is None else _copy(config.function, directory)
    return replace(config, function=function, functions=functions)


def _copy(function: str, directory: Path) -> str:
    if function in BUILT_IN:
        return function
    path, name = _file_and_name(function)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    if path.parent == directory:
        rule = "must be the function with which the execution was started"
        fix = "its file was changed: bring it back, or start a new execution"
        require(path.stem.endswith(f"-{digest}"), "reward.function", rule, function, fix)
        return function
    return f"{directory / f'{path.stem}-{digest}.py'}:{name}"


def write_kept(config: RewardConfig, copy: RewardConfig) -> None:
    """Write the copies that `kept` named, unless `config` names them already; they must load where they stand alone."""
    for own, new in zip(config.parts, copy.parts, strict=True):
        if own == new:
            continue
        path = Path(new.function.rpartition(":")[0])
        write_atomic(path, _file_and_name(own.function)[0].read_bytes())
        try:
            FunctionReward(copy, new.function).close()
        except ConfigError as error:
            path.unlink()
            fix = "the run scores with a copy of the file alone: put what it imports into it, or install that"
            raise ConfigError(f"{error}; {fix}") from error


def _file_and_name(function: str) -> tuple[Path, str]:
    """Split `FILE:NAME`, of a file that exists."""
    path, _, name = function.rpartition(":")
    fix = f"as in reward.py:compute_score, or {' or '.join(BUILT_IN)}"
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
    """The score and what stands beside it, without values that are no numbers up to `LARGEST`; None without a score."""
    found = value if isinstance(value, Mapping) else {_SCORE: value}
    numbers = {_metric(str(name)): each for name, each in found.items() if isinstance(each, int | float)}
    usable = {name: float(number) for name, number in numbers.items() if abs(number) <= LARGEST}
    return usable if _SCORE in usable else None
