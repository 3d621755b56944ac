"""What vLLM has drawn, in the words of the GRPO loop."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.engine.protocol import Trace
from slipstream.engine.requests import GroupRequest
from slipstream.engine.vllm_groups import Drawn
from slipstream.types import FinishReason, Prompt, Rollout, RolloutGroup, VersionSpan


def group_of(request: GroupRequest, drawn: Sequence[Drawn]) -> RolloutGroup:
    """The rollouts of a request."""
    return RolloutGroup(prompt=request.prompt, rollouts=tuple(_rollout(each, request.prompt) for each in drawn))


def trace_of(prompt: Prompt, drawn: Drawn) -> Trace:
    """A rollout, and which of its tokens came together."""
    return Trace(
        prompt_token_ids=prompt.token_ids,
        token_ids=tuple(drawn.output.outputs[0].token_ids),
        window_lengths=drawn.window_lengths,
        policy_version=drawn.versions[0].policy_version,
        draft_version=drawn.versions[0].draft_version,
        versions=_if_several(drawn.versions),
    )


def _rollout(drawn: Drawn, prompt: Prompt) -> Rollout:
    completion = drawn.output.outputs[0]
    logprobs = tuple(completion.logprobs.logprobs)
    assert len(logprobs) == len(completion.token_ids), "one logprob a token: the sampled one's"
    return Rollout(
        prompt_id=prompt.id,
        token_ids=tuple(completion.token_ids),
        rollout_logprobs=logprobs,
        finish_reason=FinishReason(completion.finish_reason),
        policy_version=drawn.versions[0].policy_version,
        draft_version=drawn.versions[0].draft_version,
        versions=_if_several(drawn.versions),
    )


def _if_several(versions: tuple[VersionSpan, ...]) -> tuple[VersionSpan, ...]:
    return versions if len(versions) > 1 else ()
