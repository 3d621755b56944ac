"""Rollouts that an asynchronous training has generated or begun but not trained on: a part of its checkpoints.

The bytes are an archive of plain arrays: the concatenated tokens and logprobs of all rollouts, and a JSON text that
assigns them to groups. The archive holds no code, and floats come back to the last bit.

Legend: `R` rollouts, `N` their tokens.
"""

from __future__ import annotations

import io
import itertools
import json
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from slipstream.config import from_mapping
from slipstream.engine.protocol import GenerationResult
from slipstream.learner.checkpoint import CheckpointError
from slipstream.records.steps import AcceptanceStats, AutopilotStep
from slipstream.rewards.reward import RewardResult
from slipstream.train.batch import Versions
from slipstream.types import FinishReason, Prompt, Rollout, RolloutGroup, VersionSpan

T = TypeVar("T")
_PLAIN = (
    "generation_s",
    "num_engine_restarts",
    "num_regenerated",
    "num_preemptions",
    "engine_idle_fraction",
)  # fields of a result


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """Rollouts that left the engines together, with their rewards: a whole batch, or one group."""

    index: int  # of the batch, or of the group, over the whole training
    result: GenerationResult
    rewards: RewardResult
    generated_s: float = 0.0  # end of their generation, on this process's clock


@dataclass(frozen=True, kw_only=True, slots=True)
class Pending:
    """Rollouts between two steps that are not trained on yet.

    Attributes:
        scored: scored rollouts, in the order of the queue.
        under_way: indices of submitted groups that are not scored; a resumed attempt restarts them.
        published: versions of policy and draft that `scored` may come from.
    """

    scored: tuple[Scored, ...] = ()
    under_way: tuple[int, ...] = ()
    published: tuple[Versions, ...] = ()

    def to_bytes(self) -> bytes:
        """Serialize to the archive that `from_bytes` reads."""
        rollouts = [rollout for each in self.scored for group in each.result.groups for rollout in group.rollouts]
        text = {
            "scored": [_described(each) for each in self.scored],
            "under_way": self.under_way,
            "published": self.published,
            "rollouts": [_facts(rollout) for rollout in rollouts],
        }
        file = io.BytesIO()
        np.savez(
            file,
            text=np.frombuffer(json.dumps(text, allow_nan=False).encode(), dtype=np.uint8),
            tokens_N=np.asarray(list(itertools.chain(*(each.token_ids for each in rollouts))), dtype=np.int64),
            logprobs_N=np.asarray(list(itertools.chain(*(each.rollout_logprobs for each in rollouts))), np.float64),
        )
        return file.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> Pending:
        """Deserialize.

        Raises:
            CheckpointError: the archive is damaged.
        """
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                text = json.loads(arrays["text"].tobytes())
                rollouts = _rollouts(text["rollouts"], arrays["tokens_N"].tolist(), arrays["logprobs_N"].tolist())
            return cls(
                scored=tuple(_scored(each, rollouts) for each in text["scored"]),
                under_way=tuple(text["under_way"]),
                published=tuple((policy, draft) for policy, draft in text["published"]),
            )
        except (ValueError, KeyError, EOFError, OSError, zipfile.BadZipFile) as error:
            raise CheckpointError(
                f"rollouts that wait for training must be as they were written, got {error!r}"
            ) from error


class Submitted:
    """File with the number of groups ever submitted to engines, by which a resumed attempt counts the lost ones."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def note(self, num_submitted: int) -> None:
        """Raise the number in the file to `num_submitted`."""
        if num_submitted > self.read():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._path.with_suffix(".part")
            temporary.write_text(str(num_submitted))
            temporary.replace(self._path)

    def read(self) -> int:
        """Number over all attempts so far; 0 before the first."""
        try:
            return int(self._path.read_text())
        except FileNotFoundError:
            return 0


def _described(scored: Scored) -> dict[str, Any]:
    result = scored.result
    return {
        "index": scored.index,
        "groups": [{"prompt": asdict(group.prompt), "size": len(group.rollouts)} for group in result.groups],
        "acceptance": result.acceptance and asdict(result.acceptance),
        "autopilot": result.autopilot and asdict(result.autopilot),
        **{name: getattr(result, name) for name in _PLAIN},
        "rewards": asdict(scored.rewards),
    }


def _facts(rollout: Rollout) -> list[Any]:
    return [
        rollout.prompt_id,
        rollout.finish_reason.value,
        rollout.policy_version,
        rollout.draft_version,
        [[span.policy_version, span.draft_version, span.num_tokens] for span in rollout.versions],
        len(rollout.token_ids),
    ]


def _rollouts(facts: Sequence[Sequence[Any]], tokens_N: list[int], logprobs_N: list[float]) -> Iterator[Rollout]:
    start = 0
    for prompt_id, reason, policy_version, draft_version, spans, length in facts:
        end = start + length
        if end > min(len(tokens_N), len(logprobs_N)):
            raise ValueError(f"{len(tokens_N)} tokens of at least {end}")
        yield Rollout(
            prompt_id=prompt_id,
            token_ids=tuple(tokens_N[start:end]),
            rollout_logprobs=tuple(logprobs_N[start:end]),
            finish_reason=FinishReason(reason),
            policy_version=policy_version,
            draft_version=draft_version,
            versions=tuple(
                VersionSpan(policy_version=policy, draft_version=draft, num_tokens=num) for policy, draft, num in spans
            ),
        )
        start = end


def _next(rollouts: Iterator[Rollout], num: int) -> tuple[Rollout, ...]:
    found = tuple(itertools.islice(rollouts, num))
    if len(found) < num:
        raise ValueError(f"{len(found)} rollouts of a group of {num}")
    return found


def _scored(text: dict[str, Any], rollouts: Iterator[Rollout]) -> Scored:
    groups = tuple(
        RolloutGroup(
            prompt=Prompt(**{**group["prompt"], "token_ids": tuple(group["prompt"]["token_ids"])}),
            rollouts=_next(rollouts, group["size"]),
        )
        for group in text["groups"]
    )
    result = GenerationResult(
        groups=groups,
        acceptance=_optional(AcceptanceStats, text, "acceptance"),
        autopilot=_optional(AutopilotStep, text, "autopilot"),
        **{name: text[name] for name in _PLAIN},
    )
    rewards = from_mapping(RewardResult, text["rewards"], "rewards")
    return Scored(index=text["index"], result=result, rewards=rewards)


def _optional(kind: type[T], text: dict[str, Any], name: str) -> T | None:
    return None if text[name] is None else from_mapping(kind, text[name], name)
