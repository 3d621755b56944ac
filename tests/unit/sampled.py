"""Rollouts, traces, acceptance counters and overlaps as a step reports them, and a decision on them."""

from dataclasses import MISSING, fields

from slipstream.engine.protocol import Trace
from slipstream.records.steps import AcceptanceStats, DraftDecision, Overlap
from slipstream.types import FinishReason, Rollout, VersionSpan

_SECONDS = {"generation_s": 2.0, "saved_s": 6.0, "lost_s": 1.25, "cost_s": None}
DECISION = DraftDecision(trains=True, reason="it pays", length=2.5, reference_length=3.5, **_SECONDS)


def overlapping(**measured: float) -> Overlap:
    """What overlapped in a step, 0 unless it is given."""
    nothing = {field.name: 0.0 for field in fields(Overlap) if field.default is MISSING}
    return Overlap(**{**nothing, **measured})  # type: ignore[arg-type]


def rollout(
    token_ids: tuple[int, ...],
    logprob: float | tuple[float, ...] = 0.0,
    *,
    prompt_id: str = "0",
    is_cut: bool = False,
    policy_version: int = 0,
    draft_version: int | None = None,
    versions: tuple[VersionSpan, ...] = (),
) -> Rollout:
    """A response whose tokens have one log-probability, or one each."""
    return Rollout(
        prompt_id=prompt_id,
        token_ids=token_ids,
        rollout_logprobs=logprob if isinstance(logprob, tuple) else (logprob,) * len(token_ids),
        finish_reason=FinishReason.LENGTH if is_cut else FinishReason.STOP,
        policy_version=policy_version,
        draft_version=draft_version,
        versions=versions,
    )


def trace(prompt: tuple[int, ...], token_ids: tuple[int, ...], windows: tuple[int, ...] | None = None) -> Trace:
    """A response of version 0, in draft windows of one token each unless they are given."""
    return Trace(
        prompt_token_ids=prompt,
        token_ids=token_ids,
        window_lengths=(1,) * len(token_ids) if windows is None else windows,
        policy_versions=(0,) * len(token_ids),
    )


def accepted(num_drafts: int, *by_position: int) -> AcceptanceStats:
    """Acceptance of drafts of one length, by position of the draft token."""
    total, num = sum(by_position), max(num_drafts, 1)
    return AcceptanceStats(
        num_drafts=num_drafts,
        num_draft_tokens=num_drafts * len(by_position),
        num_accepted_tokens=total,
        accepted_by_position=by_position,
        mean_acceptance_length=1 + total / num,
        acceptance_rate=total / (num * len(by_position)),
        rate_by_position=tuple(count / num for count in by_position),
    )
