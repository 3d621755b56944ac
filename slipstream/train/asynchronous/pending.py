"""What an asynchronous training has generated, or begun, and not trained on: a part of its checkpoints.

As bytes it is an archive of plain arrays: tokens and logprobs of all rollouts one behind the other, and a text (JSON)
that says what belongs to what. Nothing in it is code, and floats come back to the last bit.

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
from typing import Any

import numpy as np

from slipstream.config import from_mapping
from slipstream.engine.protocol import GenerationResult
from slipstream.learner.checkpoint import CheckpointError
from slipstream.records.steps import AcceptanceStats, AutopilotStep
from slipstream.rewards.verifier import RewardResult
from slipstream.train.asynchronous.buffer import Generated, Scored
from slipstream.train.step import Versions
from slipstream.types import FinishReason, Prompt, Rollout, RolloutGroup, VersionSpan


@dataclass(frozen=True, kw_only=True, slots=True)
class Pending:
    """Between two steps.

    Attributes:
        scored: in the buffer, in its order.
        under_way: indices of groups that were submitted and are not in the buffer; they have to start anew.
        published: versions of policy and draft that `scored` may come from.
    """

    scored: tuple[Scored, ...] = ()
    under_way: tuple[int, ...] = ()
    published: tuple[Versions, ...] = ()

    def to_bytes(self) -> bytes:
        """What `from_bytes` reads."""
        rollouts = [
            rollout for each in self.scored for group in each.generated.result.groups for rollout in group.rollouts
        ]
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
        """Read it back.

        Raises:
            CheckpointError: it is damaged.
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


class Tally:
    """How many groups were ever submitted to engines, in a file: what was lost with a process is counted by it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def note(self, num_submitted: int) -> None:
        """So many in all, the first of which has the index 0."""
        if num_submitted > self.read():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._path.with_suffix(".part")
            temporary.write_text(str(num_submitted))
            temporary.replace(self._path)

    def read(self) -> int:
        """Of all attempts so far; 0 before the first."""
        try:
            return int(self._path.read_text())
        except FileNotFoundError:
            return 0


def _described(scored: Scored) -> dict[str, Any]:
    result = scored.generated.result
    return {
        "index": scored.index,
        "groups": [{"prompt": asdict(group.prompt), "size": len(group.rollouts)} for group in result.groups],
        "acceptance": None if result.acceptance is None else asdict(result.acceptance),
        "autopilot": None if result.autopilot is None else asdict(result.autopilot),
        "generation_s": result.generation_s,
        "num_engine_restarts": result.num_engine_restarts,
        "num_regenerated": result.num_regenerated,
        "engine_idle_fraction": result.engine_idle_fraction,
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
    acceptance, autopilot = text["acceptance"], text["autopilot"]
    result = GenerationResult(
        groups=groups,
        acceptance=None if acceptance is None else from_mapping(AcceptanceStats, acceptance, "acceptance"),
        generation_s=text["generation_s"],
        num_engine_restarts=text["num_engine_restarts"],
        num_regenerated=text["num_regenerated"],
        engine_idle_fraction=text["engine_idle_fraction"],
        autopilot=None if autopilot is None else from_mapping(AutopilotStep, autopilot, "autopilot"),
    )
    rewards = from_mapping(RewardResult, text["rewards"], "rewards")
    return Scored(generated=Generated(index=text["index"], result=result, ended_s=0.0), rewards=rewards)
