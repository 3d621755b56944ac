"""The rollout engine on vLLM: exact speculative sampling of the policy, refit in place, counters read as deltas.

One `VllmEngine` a process (deleting one of two breaks the other): `loop.workers` runs each in a process of its own.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.config import require
from slipstream.imports import uncollected
from slipstream.refit.config import EngineState
from slipstream.refit.fingerprint import weight_totals
from slipstream.rollout.acceptance import AcceptanceCounters, acceptance_between
from slipstream.rollout.config import EngineConfig, SamplingConfig
from slipstream.rollout.engine import GenerationResult, Trace
from slipstream.types import Dtype, FinishReason, Prompt, Rollout, RolloutGroup

_COUNTER = "vllm:spec_decode_num_"
_PROBE = "slipstream.rollout.vllm_plugin.EngineProbe"


def process_environment(config: EngineConfig) -> dict[str, str]:
    """Environment that the engine's process must start with.

    vLLM's core runs in that same process: it has no other work, and a step then needs no message between processes.
    """
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{config.num_threads - 1}",
        "OMP_NUM_THREADS": str(config.num_threads),
        "TOKENIZERS_PARALLELISM": "false",
    }


class VllmEngine:
    """A running vLLM engine that holds one version of the policy and, if it speculates, one of the draft."""

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
            RuntimeError: the process samples with a broken rejection sampler.
        """
        assert config.dtype is not Dtype.AUTO, "the stage settles what auto stands for"
        os.environ.update(process_environment(config))
        with uncollected():  # vLLM collects garbage seven times while it starts
            from vllm import LLM

            from slipstream.refit.engine_transfer import BACKEND

        memory: dict[str, Any] = (
            {"gpu_memory_utilization": config.gpu_memory_utilization}
            if config.kv_cache_gib is None
            else {"kv_cache_memory_bytes": int(config.kv_cache_gib * 2**30)}
        )
        self._speculates = speculative_config is not None
        self._stop_token_ids = _stop_token_ids(policy)
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
            seed=0,
            **memory,
        )
        self._check_sampler()
        self._max_model_len = config.max_model_len
        self._transfer_ready = False
        self._num_traced = 0
        self.policy_version = 0
        self.policy_digest = ""
        self.draft_version = 0
        self.num_prefix_cache_resets = 0

    def generate(
        self, prompts: Sequence[Prompt], *, sampling: SamplingConfig, group_size: int, seed: int
    ) -> GenerationResult:
        """Sample `group_size` rollouts a prompt. See `Engine.generate`."""
        self._check_lengths(prompts, sampling)
        requests: list[Any] = _requests(prompts, group_size)
        params = self._params(sampling)
        self._llm.collective_rpc("reseed", args=(seed,))
        before = self._counters()
        start = time.perf_counter()
        outputs = self._llm.generate(requests, params, use_tqdm=False)
        elapsed_s = time.perf_counter() - start
        after = self._counters()
        rollouts = [
            self._rollout(requests_output, prompts[i // group_size]) for i, requests_output in enumerate(outputs)
        ]
        groups = tuple(
            RolloutGroup(prompt=prompt, rollouts=tuple(rollouts[i * group_size : (i + 1) * group_size]))
            for i, prompt in enumerate(prompts)
        )
        acceptance = None if before is None or after is None else acceptance_between(before, after)
        return GenerationResult(groups=groups, acceptance=acceptance, generation_s=elapsed_s)

    def trace(self, prompts: Sequence[Prompt], *, sampling: SamplingConfig, group_size: int, seed: int) -> list[Trace]:
        """Sample as `generate` does, and tell which tokens came out of the engine together: for the certificate.

        Returns:
            One trace a rollout, prompt by prompt.
        """
        from vllm.sampling_params import RequestOutputKind

        self._check_lengths(prompts, sampling)
        requests: list[Any] = _requests(prompts, group_size)
        params = self._params(sampling)
        params.output_kind = RequestOutputKind.DELTA
        self._llm.collective_rpc("reseed", args=(seed,))
        engine = self._llm.llm_engine
        self._num_traced += 1
        ids = {f"trace-{self._num_traced}-{index}": index for index in range(len(requests))}
        tokens: list[list[int]] = [[] for _ in requests]
        windows: list[list[int]] = [[] for _ in requests]
        try:
            for name, index in ids.items():
                engine.add_request(name, requests[index], params.clone())
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
                prompt_token_ids=prompts[i // group_size].token_ids,
                token_ids=tuple(tokens[i]),
                window_lengths=tuple(windows[i]),
                policy_version=self.policy_version,
                draft_version=self.draft_version if self._speculates else None,
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
        self._transfer(policy, self._llm.start_weight_update)
        digests = set(self._llm.collective_rpc("received_digest"))
        if len(digests) > 1:
            raise RuntimeError(f"the engine's ranks read different weights for policy version {policy_version}")
        self.policy_version, self.policy_digest = policy_version, digests.pop()
        if draft is not None:
            require(self._speculates, "refit.draft", "needs an engine that speculates", str(draft))
            self._transfer(draft, self._llm.start_draft_weight_update)
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

    def weight_fingerprints(self, *, is_draft: bool) -> dict[str, int]:
        """Fingerprints of the tensors that the engine computes with, whatever part of them each rank holds.

        Raises:
            RuntimeError: two ranks hold the same part with different values.
        """
        return weight_totals(self._llm.collective_rpc("weight_fingerprints", args=(is_draft,)))

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
            draft_version=self.draft_version if self._speculates else None,
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

    def _transfer(self, path: Path, start: Any) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

        if not self._transfer_ready:
            self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
            self._transfer_ready = True
        start()
        self._llm.update_weights(WeightTransferUpdateRequest(update_info={"path": str(path)}))
        self._llm.finish_weight_update()

    def _check_sampler(self) -> None:
        broken = [answer for answer in self._llm.collective_rpc("check_sampler") if answer]
        if broken:
            raise RuntimeError(
                f"the rejection sampler loses sampling parameters ({broken[0]}): speculative rollouts would be "
                "silently biased; is slipstream installed, so that vLLM finds its plugin?"
            )

    def _check_lengths(self, prompts: Sequence[Prompt], sampling: SamplingConfig) -> None:
        longest = max(len(prompt.token_ids) for prompt in prompts)
        require(
            longest + sampling.max_response_tokens <= self._max_model_len,
            "engine.max_model_len",
            f"must hold the longest prompt {longest} + max_response_tokens {sampling.max_response_tokens}",
            self._max_model_len,
        )

    def _counters(self) -> AcceptanceCounters | None:
        """The engine's counters, None without a draft; missing ones are an error, never a zero."""
        if not self._speculates:
            return None
        metrics: dict[str, Any] = {m.name.removeprefix(_COUNTER): m for m in self._llm.get_metrics()}
        try:
            return AcceptanceCounters(
                num_drafts=int(metrics["drafts"].value),
                num_draft_tokens=int(metrics["draft_tokens"].value),
                num_accepted_tokens=int(metrics["accepted_tokens"].value),
                accepted_by_position=tuple(int(value) for value in metrics["accepted_tokens_per_pos"].values),
            )
        except KeyError as error:
            raise RuntimeError(f"vLLM reports no counter {_COUNTER}{error.args[0]}: acceptance is unknown") from error

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
            draft_version=self.draft_version if self._speculates else None,
        )


def _requests(prompts: Sequence[Prompt], group_size: int) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": list(prompt.token_ids)} for prompt in prompts for _ in range(group_size)]


def _stop_token_ids(policy: Path) -> tuple[int, ...]:
    """End-of-sequence tokens of config.json and, where there is one, generation_config.json."""
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = policy / name
        if path.is_file():
            eos = json.loads(path.read_text()).get("eos_token_id")
            ids.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
    require(bool(ids), "policy.model", "must name an eos_token_id in its config.json", str(policy))
    return tuple(sorted(ids))
