"""The rollout engine on vLLM: exact speculative sampling of the policy, refit in place, counters read as deltas.

One `VllmEngine` a process (deleting one of two breaks the other): `slipstream.workers` gives each one of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slipstream.config import require
from slipstream.imports import uncollected
from slipstream.records import ScheduleEntry
from slipstream.refit.channel.choice import Location
from slipstream.refit.config import Channel, EngineState
from slipstream.refit.fingerprint import Turn, weight_totals
from slipstream.rollout.acceptance import AcceptanceCounters, acceptance_between
from slipstream.rollout.config import EngineConfig, SamplingConfig
from slipstream.rollout.engine import Portion, Trace
from slipstream.rollout.requests import GroupRequest, group_requests
from slipstream.rollout.vllm_arguments import device_arguments, stop_token_ids
from slipstream.rollout.vllm_drafting import Drafting
from slipstream.rollout.vllm_groups import GroupsUnderWay
from slipstream.types import Dtype, FinishReason, Prompt, Rollout, RolloutGroup

_PROBE = "slipstream.rollout.vllm_plugin.EngineProbe"


def process_environment(config: EngineConfig) -> dict[str, str]:
    """Environment that the engine's process must start with.

    vLLM's core runs in that same process: it has no other work, and a step then needs no message between processes.
    The ranks of a tensor-parallel engine are its children and inherit the rest. None is bound to cores: vLLM would bind
    the ranks of every engine on the host to the same ones.
    """
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(config.num_threads),
        "TOKENIZERS_PARALLELISM": "false",
    }


class VllmEngine:
    """A running vLLM engine that holds one version of the policy and one of the draft, if that has weights."""

    def __init__(
        self,
        policy: Path,
        *,
        config: EngineConfig,
        speculative_config: dict[str, Any] | None,
        executor: str | None = None,
    ) -> None:
        """Start the engine.

        Args:
            policy: model directory in Hugging Face format.
            speculative_config: vLLM's own, None for autoregressive decoding.
            executor: of the engine's workers: `uni`, `mp` or `ray`; None leaves vLLM its choice.
        Raises:
            RuntimeError: the process samples with a broken sampler.
        """
        assert config.dtype is not Dtype.AUTO, "the stage settles what auto stands for"
        os.environ.update(process_environment(config))
        with uncollected():  # vLLM collects garbage seven times while it starts
            from vllm import LLM

            from slipstream.refit.engine_transfer import BACKEND

        self._has_draft = speculative_config is not None and "model" in speculative_config
        self._stop_token_ids = stop_token_ids(policy)
        self._llm = LLM(
            str(policy),
            dtype=config.dtype.value,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            enforce_eager=config.enforce_eager,
            tensor_parallel_size=config.tensor_parallel_size,
            distributed_executor_backend=executor,
            skip_tokenizer_init=True,
            disable_log_stats=False,  # the acceptance counters live there
            logprobs_mode="processed_logprobs",  # at temperature != 1 raw ones are of another distribution
            speculative_config=speculative_config,
            weight_transfer_config={"backend": BACKEND},
            worker_extension_cls=_PROBE,
            seed=0,  # of what no rollout sees: each has a seed of its own
            **device_arguments(config),
        )
        self._check_sampler()
        self._drafting = None if speculative_config is None else Drafting(self._llm)
        self._max_model_len = config.max_model_len
        self._is_draft_updating = False
        self._num_traced = 0
        self._groups = GroupsUnderWay(self._llm.llm_engine, max_num_seqs=config.max_num_seqs)
        self.policy_version = 0
        self.policy_digest = ""
        self.draft_version = 0
        self.draft_digest = ""
        self.num_prefix_cache_resets = 0

    def generate(
        self,
        requests: Sequence[GroupRequest],
        *,
        sampling: SamplingConfig,
        is_first: bool = True,
        room_for: int | None = None,
    ) -> Portion:
        """Start `requests` beside what is under way, and generate.

        Args:
            is_first: of the calls of one generation: forget what an earlier one that failed may have left.
            room_for: return as soon as so many more rollouts have room; the unfinished ones go on with the next call.
                None generates until all are done.
        """
        if is_first:
            self._groups.drop()
            self._groups.take_running()
        self._check_lengths([request.prompt for request in requests], sampling)
        params = self._params(sampling)
        before = self._counters()
        started_s = time.perf_counter()
        done: list[tuple[int, RolloutGroup]] = []
        try:
            for request in requests:
                self._groups.start(request, lambda seed: _seeded(params, seed))
            while not self._groups.is_empty():
                done += [(request.index, self._group(request, outputs)) for request, outputs in self._groups.step()]
                if room_for is not None and self._groups.has_room(room_for):
                    break
        except BaseException:
            self._groups.drop()
            raise
        ended_s = time.perf_counter()
        after = self._counters()
        acceptance = None if before is None or after is None else acceptance_between(before, after)
        return Portion(
            groups=tuple(done),
            acceptance=acceptance,
            started_s=started_s,
            ended_s=ended_s,
            running=self._groups.take_running(),
        )

    def before_each_iteration(self, call: Callable[[], None] | None) -> None:
        """Have `call` made before each iteration of what `generate` runs; None: nothing."""
        self._groups.before_step = call

    def draft_by(self, schedule: Sequence[ScheduleEntry]) -> None:
        """Draft by another table from the next generation on; only an engine that started with one can.

        Raises:
            ConfigError: the engine does not speculate, or started without a table.
        """
        self._groups.drop()
        require(self._drafting is not None, "draft.length", "needs an engine that speculates", None)
        assert self._drafting is not None
        self._drafting.draft_by(schedule)

    def _group(self, request: GroupRequest, outputs: Sequence[Any]) -> RolloutGroup:
        rollouts = tuple(self._rollout(output, request.prompt) for output in outputs)
        return RolloutGroup(prompt=request.prompt, rollouts=rollouts)

    def trace(self, prompts: Sequence[Prompt], *, sampling: SamplingConfig, group_size: int, seed: int) -> list[Trace]:
        """Sample as `generate` does, and tell which tokens came out of the engine together: for the certificate.

        Returns:
            One trace a rollout, prompt by prompt.
        """
        from vllm.sampling_params import RequestOutputKind

        self._groups.drop()
        self._check_lengths(prompts, sampling)
        requests = [
            (request.prompt, rollout_seed)
            for request in group_requests(prompts, group_size=group_size, seed=seed)
            for rollout_seed in request.seeds
        ]
        params = self._params(sampling)
        params.output_kind = RequestOutputKind.DELTA
        engine = self._llm.llm_engine
        self._num_traced += 1
        ids = {f"trace-{self._num_traced}-{index}": index for index in range(len(requests))}
        tokens: list[list[int]] = [[] for _ in requests]
        windows: list[list[int]] = [[] for _ in requests]
        try:
            for (name, _), (prompt, rollout_seed) in zip(ids.items(), requests, strict=True):
                tokenized: Any = {"prompt_token_ids": list(prompt.token_ids)}
                engine.add_request(name, tokenized, _seeded(params, rollout_seed))
            while engine.has_unfinished_requests():
                outputs: list[Any] = list(engine.step())
                for output in outputs:
                    drawn = list(output.outputs[0].token_ids)
                    if drawn:
                        tokens[ids[output.request_id]] += drawn
                        windows[ids[output.request_id]].append(len(drawn))
        except BaseException:
            engine.abort_request(list(ids))  # or they would come out of the next call
            raise
        return [
            Trace(
                prompt_token_ids=requests[i][0].token_ids,
                token_ids=tuple(tokens[i]),
                window_lengths=tuple(windows[i]),
                policy_version=self.policy_version,
                draft_version=self.draft_version if self._has_draft else None,
            )
            for i in range(len(requests))
        ]

    def refit(
        self, policy: Path, *, policy_version: int, draft: Path | None = None, draft_version: int = 0
    ) -> EngineState:
        """Replace the policy's weights, and the draft's if `draft` is given, and forget all cached prefixes.

        Args:
            policy: safetensors file under the names of the Hugging Face checkpoint, or a directory of such files.
            draft: the same for the draft.
        Raises:
            RuntimeError: vLLM could not reset the prefix cache, or its ranks read different weights; the engine must
                not be used further.
        """
        self._read(policy, is_draft=False)
        if draft is not None:
            self._read(draft, is_draft=True)
        return self.adopt(policy_version=policy_version, draft_version=None if draft is None else draft_version)

    def locations(self) -> list[Location]:
        """Where each of the engine's workers computes."""
        return self._llm.collective_rpc("location")

    def join_channel(self, channel: Channel, settings: dict[str, Any]) -> None:
        """Get ready to receive over `channel`; `settings` are what its sender says. Files can be read at any time."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        init = {"channel": channel, "settings": settings}
        self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init))

    def start_update(self, *, is_draft: bool) -> None:
        """What comes next is for the policy, or for the draft."""
        rule = "needs an engine whose draft has weights of its own"
        require(self._has_draft or not is_draft, "refit.draft", rule, is_draft)
        self._groups.drop()  # what a generation that failed in another engine left here: nobody waits for it
        self._llm.collective_rpc("abandon_update")  # that of a refit in which another engine was lost
        (self._llm.start_draft_weight_update if is_draft else self._llm.start_weight_update)()
        self._is_draft_updating = is_draft

    def update(self, channel: Channel, settings: dict[str, Any]) -> None:
        """Receive some or all weights over `channel`."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        info = {"channel": channel, "settings": settings}
        self._llm.update_weights(WeightTransferUpdateRequest(update_info=info))

    def finish_update(self) -> None:
        """All weights have come.

        Raises:
            RuntimeError: the engine's ranks read different weights; the engine must not be used further.
        """
        self._llm.finish_weight_update()
        digests = set(self._llm.collective_rpc("received_digest"))
        if len(digests) > 1:
            raise RuntimeError("the engine's ranks read different weights in one update")
        if self._is_draft_updating:
            self.draft_digest = digests.pop()
        else:
            self.policy_digest = digests.pop()

    def adopt(self, *, policy_version: int, draft_version: int | None) -> EngineState:
        """Call what was received by these versions, and forget all cached prefixes.

        Args:
            draft_version: None if the draft stayed as it was.
        Raises:
            RuntimeError: vLLM could not reset the prefix cache; the engine must not be used further.
        """
        self.policy_version = policy_version
        if draft_version is not None:
            self.draft_version = draft_version
        if not self._llm.reset_prefix_cache():
            raise RuntimeError(f"prefix cache not reset after the refit to policy version {policy_version}")
        self.num_prefix_cache_resets += 1
        return self.state()

    def weight_dtypes(self, *, is_draft: bool) -> dict[str, str]:
        """The tensors of the policy, or of the draft, that the engine's ranks hold, and their types.

        Raises:
            LookupError: a layer keeps its weights where nobody can read them.
        """
        return {
            name: dtype
            for rank in self._llm.collective_rpc("weight_dtypes", args=(is_draft,))
            for name, dtype in rank.items()
        }

    def weight_fingerprints(self, *, is_draft: bool, turn: Turn) -> dict[str, int]:
        """Fingerprints of the tensors that the engine computes with and whose turn it is, whatever each rank holds.

        Raises:
            RuntimeError: two ranks hold the same part with different values.
        """
        return weight_totals(self._llm.collective_rpc("weight_fingerprints", args=(is_draft, turn)))

    def token_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Logprob of each token but the first, given those before it, at temperature 1; from the policy alone."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0, detokenize=False)
        prompts: list[Any] = [{"prompt_token_ids": list(sequence)} for sequence in sequences]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        found = []
        for sequence, output in zip(sequences, outputs, strict=True):
            entries: Any = output.prompt_logprobs
            found.append([entry[token].logprob for token, entry in zip(sequence[1:], entries[1:], strict=True)])
        return found

    def state(self) -> EngineState:
        """Versions and counters that every refit must move."""
        return EngineState(
            policy_version=self.policy_version,
            policy_digest=self.policy_digest,
            draft_version=self.draft_version if self._has_draft else None,
            draft_digest=self.draft_digest,
            num_prefix_cache_resets=self.num_prefix_cache_resets,
        )

    def _params(self, sampling: SamplingConfig) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_response_tokens,
            stop_token_ids=list(self._stop_token_ids),
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            detokenize=False,
        )

    def _read(self, path: Path, *, is_draft: bool) -> None:
        self.start_update(is_draft=is_draft)
        self.update(Channel.SHARED_MEMORY, {"path": str(path)})
        self.finish_update()

    def _check_sampler(self) -> None:
        broken = [answer for answer in self._llm.collective_rpc("check_sampler") if answer]
        if broken:
            raise RuntimeError(
                f"vLLM does not sample as it is asked to ({broken[0]}): speculative rollouts would be silently biased, "
                "or depend on their batch; is slipstream installed, so that vLLM finds its plugin?"
            )

    def _check_lengths(self, prompts: Sequence[Prompt], sampling: SamplingConfig) -> None:
        longest = max((len(prompt.token_ids) for prompt in prompts), default=0)
        require(
            longest + sampling.max_response_tokens <= self._max_model_len,
            "engine.max_model_len",
            f"must hold the longest prompt {longest} + max_response_tokens {sampling.max_response_tokens}",
            self._max_model_len,
        )

    def _counters(self) -> AcceptanceCounters | None:
        """The engine's counters, None without a draft."""
        return None if self._drafting is None else self._drafting.counters()

    @property
    def _speculates(self) -> bool:
        return self._drafting is not None

    def _rollout(self, output: Any, prompt: Prompt) -> Rollout:
        completion = output.outputs[0]
        logprobs = tuple(completion.logprobs.logprobs)
        assert len(logprobs) == len(completion.token_ids), "one logprob a token: the sampled one's"
        return Rollout(
            prompt_id=prompt.id,
            token_ids=tuple(completion.token_ids),
            rollout_logprobs=logprobs,
            finish_reason=FinishReason(completion.finish_reason),
            policy_version=self.policy_version,
            draft_version=self.draft_version if self._has_draft else None,
        )


def _seeded(params: Any, seed: int) -> Any:
    """vLLM's sampling parameters of one rollout."""
    own = params.clone()
    own.seed = seed
    return own
