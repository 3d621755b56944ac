"""Rollout engine on vLLM: exact speculative sampling of the policy, refit in place, acceptance from vLLM's counts.

A process holds one `VllmEngine` only, as deleting one of two breaks the other.
"""

from __future__ import annotations

import glob
import multiprocessing.connection
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from slipstream.config import require
from slipstream.data.chat import end_token_ids
from slipstream.engine.config import EngineConfig, SamplingConfig
from slipstream.engine.history_drafts import HISTORY, history_settings, told_vllm
from slipstream.engine.protocol import GroupRequest, Portion, Trace, group_requests
from slipstream.engine.vllm_groups import CacheMemory, FinishedRollout, GroupsUnderWay, StepCounts, group_of, trace_of
from slipstream.grpo.config import KvCache
from slipstream.imports import uncollected
from slipstream.records.steps import ScheduleEntry
from slipstream.refit.channel import Location
from slipstream.refit.config import Channel, EngineState, WeightFiles
from slipstream.refit.fingerprint import Turn, weight_totals
from slipstream.refit.quantization import LOAD_FORMAT, checkpoint_config
from slipstream.types import Dtype, Prompt, RolloutGroup

_PROBE = "slipstream.engine.vllm_plugin.EngineProbe"

OWN_NORMS = {"rms_norm": ["slipstream"], "fused_add_rms_norm": ["slipstream"]}
"""vLLM's `ir_op_priority` with the kernels of `vllm_eager`; where they do not fit, vLLM's own operations remain."""


def engine_arguments(
    config: EngineConfig, *, is_in_flight: bool, can_sleep: bool = False, returns_routes: bool = False
) -> dict[str, Any]:
    """Return vLLM's arguments that follow from the recipe and the device.

    An engine that `can_sleep` uses vLLM's sleep mode, whose allocator for GPUs can free the KV cache. An engine that
    `returns_routes` captures the experts of every token, which vLLM 0.32 does in its second model runner, a GPU's.

    On a GPU vLLM schedules asynchronously by default. The next step starts before the tokens of a step are returned,
    and a refit between the two steps would come too late. On a CPU vLLM never schedules asynchronously.
    """
    arguments = {
        "dtype": config.dtype.value,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "enforce_eager": config.enforce_eager,
        "tensor_parallel_size": config.tensor_parallel_size,
    }
    if (weight_format := config.weight_format) is not None:
        arguments |= {
            "hf_overrides": {"quantization_config": checkpoint_config(weight_format)},
            "load_format": LOAD_FORMAT,
            "model_loader_extra_config": asdict(weight_format),
        }
    if config.kv_cache_gib is None:
        scheduling = {"async_scheduling": False} if is_in_flight else {}
        sleeping = {"enable_sleep_mode": True} if can_sleep else {}
        routing = {"enable_return_routed_experts": True} if returns_routes else {}
        share = config.gpu_memory_utilization
        return {**arguments, "gpu_memory_utilization": share, **scheduling, **sleeping, **routing}
    assert not returns_routes, "the recipe refuses it on a CPU"
    return {
        **arguments,
        "kv_cache_memory_bytes": int(config.kv_cache_gib * 2**30),
        # Rollouts of a group share the whole blocks of their prompt, but for the last one in an engine with a draft. Of
        # vLLM's 128 tokens a block on CPUs a prompt has few; its attention there takes multiples of 32.
        "block_size": 32,
        # After each chunk but a prompt's last, vLLM 0.32 rewinds a seeded request's generator by its offset. A CPU's
        # generator has no offset, and the engine would end there.
        "enable_chunked_prefill": False,
        # A compiler fuses what torch does.
        **({"ir_op_priority": OWN_NORMS} if config.enforce_eager else {}),
    }


@contextmanager
def loadable(model: Path) -> Iterator[Path]:
    """Yield a path to the directory `model` without glob characters, as vLLM finds weights by a glob pattern."""
    if glob.escape(str(model)) == str(model):
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="slipstream-model-") as directory:
        link = Path(directory) / "model"
        link.symlink_to(model.absolute(), target_is_directory=True)
        yield link


def without_gpu() -> str:
    """Return why vLLM would generate on the CPU in this process; empty if vLLM would use a GPU.

    The answer is vLLM's, not torch's, as torch would initialize CUDA in a process from which vLLM may fork workers.
    """
    from vllm.platforms import current_platform

    return f"vLLM would generate on {current_platform.device_name!r}" if current_platform.is_cpu() else ""


def sampling_params(sampling: SamplingConfig, stop_tokens: Sequence[int]) -> Any:
    """Convert to vLLM's sampling parameters."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_response_tokens,
        stop_token_ids=list(stop_tokens),
        logprobs=0,  # the sampled token's alone
        flat_logprobs=True,
        detokenize=False,
    )


def process_environment(config: EngineConfig) -> dict[str, str]:
    """Environment variables that the engine's process must start with.

    vLLM logs errors alone, unless `VLLM_LOGGING_LEVEL` of this process says otherwise.

    vLLM's core runs in the same process, so a step needs no message between processes. The ranks of a tensor-parallel
    engine are child processes and inherit the variables. No process is bound to cores, as vLLM would bind the ranks of
    every engine on the host to the same cores.
    """
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(config.num_threads),
        "TOKENIZERS_PARALLELISM": "false",
    }


def _told(speculative_config: dict[str, Any], config: EngineConfig, links: ExitStack) -> dict[str, Any]:
    """Return the settings of speculation as vLLM gets them: a directory that it can read, and tests that it knows.

    The first model runner, a CPU's, does not verify in blocks and would sample drafts greedily if told to.
    """
    told = dict(speculative_config)
    if told["method"] == HISTORY:
        told = told_vllm(told)
    elif "model" in told:
        told["model"] = str(links.enter_context(loadable(Path(told["model"]))))
    if config.kv_cache_gib is not None:
        told["rejection_sample_method"] = "standard"
    return told


class VllmEngine:
    """Running vLLM engine with one version of the policy, and one version of a draft that has weights."""

    def __init__(
        self,
        policy: Path,
        *,
        config: EngineConfig,
        speculative_config: dict[str, Any] | None,
        executor: str | None = None,
        is_in_flight: bool = False,
        can_sleep: bool = False,
        returns_routes: bool = False,
    ) -> None:
        """Start the engine.

        Args:
            policy: model directory in Hugging Face format.
            speculative_config: vLLM's settings of speculation; None for autoregressive decoding.
            executor: vLLM's executor of the workers: `uni`, `mp` or `ray`; None leaves the choice to vLLM.
            is_in_flight: True if a refit may come while rollouts are in flight.
            can_sleep: True if `sleep` may be called.
            returns_routes: True if rollouts have `routes`.
        Raises:
            RuntimeError: vLLM's sampler is broken in this process.
        """
        assert config.dtype is not Dtype.AUTO, "the stage resolves auto"
        os.environ.update(process_environment(config))
        with uncollected():  # vLLM collects garbage seven times while it starts
            from vllm import LLM

            from slipstream.engine.weight_transfer import BACKEND

        how = {"is_in_flight": is_in_flight, "can_sleep": can_sleep, "returns_routes": returns_routes}
        self._stop_token_ids, self._max_model_len = end_token_ids(policy), config.max_model_len
        self._weight_format = config.weight_format
        with ExitStack() as links:
            self._llm: Any = LLM(
                str(links.enter_context(loadable(policy))),
                distributed_executor_backend=executor,
                skip_tokenizer_init=True,
                disable_log_stats=False,  # for the counts of drafts
                logprobs_mode="processed_logprobs",  # of the distribution that is sampled, at any temperature
                speculative_config=speculative_config and _told(speculative_config, config, links),
                weight_transfer_config={"backend": BACKEND},
                worker_extension_cls=_PROBE,
                seed=0,  # unused by rollouts, which have seeds of their own
                **engine_arguments(config, **how),
            )
        has_draft = speculative_config is not None and "model" in speculative_config  # with weights of its own
        self._state = EngineState(
            policy_version=0, policy_digest="", draft_version=0 if has_draft else None, num_prefix_cache_resets=0
        )
        self._check_sampler()
        if (speculative_config or {}).get("rejection_sample_method") == "block":
            self._verify_in_blocks(is_on_cpu=config.kv_cache_gib is not None)
        self._history = history_settings(speculative_config)
        self.forget()
        self._counts, self._cache = StepCounts(self._llm), CacheMemory(self._llm)
        self._is_updating = self._is_draft_updating = False  # True from the start of an update until `adopt`
        self._kv_cache: KvCache | None = None
        self._groups = GroupsUnderWay(self._llm.llm_engine, max_num_seqs=config.max_num_seqs)
        self._groups.adopt((self._state.policy_version, self._state.draft_version))

    def generate(
        self,
        requests: Sequence[GroupRequest],
        *,
        sampling: SamplingConfig,
        is_first: bool = True,
        room_for: int | None = None,
    ) -> Portion:
        """Start `requests` beside the rollouts in flight, and generate.

        Args:
            is_first: True for the first call of a generation, which drops the rollouts of a failed call.
            room_for: return as soon as this many more rollouts have room; the unfinished rollouts continue in the next
                call. None generates until all rollouts are complete.
        """
        if is_first:
            self._start_over()
        try:
            return self._run(requests, sampling, lambda _: room_for is not None and self._groups.has_room(room_for))
        except BaseException:
            self._groups.drop()
            raise

    def run_in_flight(self, kv_cache: KvCache | None) -> None:
        """Start generation in flight, where rollouts survive a refit; None ends it. All rollouts are dropped.

        `kv_cache` says what becomes of the rollouts' KV cache at a refit.
        """
        self._groups.drop()
        batches = self._llm.llm_engine.engine_core.engine_core.batch_queue
        rule = "needs engines that have no step under way between two others"
        require(kv_cache is None or batches is None, "loop.kv_cache", rule, kv_cache, "start them as is_in_flight")
        self._kv_cache = kv_cache

    def submit(self, requests: Sequence[GroupRequest], *, sampling: SamplingConfig) -> None:
        """Queue groups; `GroupRequest.index` is unique over a training run."""
        self._require_in_flight()
        self._start(requests, sampling)

    def advance(self, *, max_s: float, stops_at_first: bool = True) -> Portion:
        """Run until a group is complete, `max_s` seconds have passed, or no rollout is in flight.

        Without `stops_at_first` it runs on after a complete group.
        """
        self._require_in_flight()
        end_s = time.perf_counter() + max_s
        return self._run((), None, lambda done: bool(done and stops_at_first) or time.perf_counter() >= end_s)

    def restart(self, seeds: Mapping[int, Sequence[int]]) -> int:
        """Restart the unfinished rollouts of these groups with new seeds; returns the number of restarts."""
        self._require_in_flight()
        return sum(self._groups.restart(index, of_group) for index, of_group in seeds.items())

    def _start(self, requests: Sequence[GroupRequest], sampling: SamplingConfig) -> None:
        longest = max((len(request.prompt.token_ids) for request in requests), default=0)
        fits = longest + sampling.max_response_tokens <= self._max_model_len
        rule = f"must hold the longest prompt {longest} + max_response_tokens {sampling.max_response_tokens}"
        require(fits, "engine.max_model_len", rule, self._max_model_len)
        params = sampling_params(sampling, self._stop_token_ids)

        def seeded(seed: int) -> Any:
            own = params.clone()
            own.seed = seed
            return own

        for request in requests:
            self._groups.start(request, seeded)

    def _run(
        self,
        requests: Sequence[GroupRequest],
        sampling: SamplingConfig | None,
        is_over: Callable[[list[tuple[int, RolloutGroup]]], bool],
    ) -> Portion:
        """Start `requests` and run steps until no rollout is in flight, or `is_over` of the complete groups is True."""
        self._cache.wake()
        self._counts.take_preemptions()  # of what ran since the last generation
        self._counts.take_acceptance()
        started_s = time.perf_counter()
        done: list[tuple[int, RolloutGroup]] = []
        if sampling is not None:
            self._start(requests, sampling)
        while not self._groups.is_empty():
            done += [(request.index, group_of(request, finished)) for request, finished in self._groups.step()]
            if is_over(done):
                break
        ended_s = time.perf_counter()
        return Portion(
            groups=tuple(done),
            acceptance=self._counts.take_acceptance(),
            started_s=started_s,
            ended_s=ended_s,
            running=self._groups.take_running(),
            num_preemptions=self._counts.take_preemptions(),
        )

    def sleep(self) -> None:
        """Free the memory of the KV cache until the next generation, and drop the rollouts of a failed call.

        A sleeping engine can be refitted and fingerprinted.
        """
        self._start_over()
        self._cache.sleep()

    def _start_over(self) -> None:
        """Drop the rollouts of a failed call."""
        rule = "must be complete before another call generates"
        require(self._kv_cache is None or self._groups.is_empty(), "groups that were submitted", rule, "some under way")
        self._groups.drop()
        self._groups.take_running()

    def _require_in_flight(self) -> None:
        assert self._kv_cache is not None, "run_in_flight comes first"
        if self._is_updating:
            raise RuntimeError("an engine must adopt the weights that it received before it goes on: no step mixes two")

    def forget(self) -> None:
        """Forget the KV cache of prompts and the answers that drafts are looked up in; no rollout may be in flight."""
        self._llm.reset_prefix_cache()
        if self._history is not None:
            self._llm.collective_rpc("keep_history", args=(self._history, self._stop_token_ids))

    def history(self) -> bytes:
        """Serialize the history of answers that the method drafts from."""
        return self._llm.collective_rpc("history")[0]

    def recall(self, history: bytes) -> None:
        """Take over a history that another engine of these settings had, unless this one has answers already."""
        self._llm.collective_rpc("recall", args=(history,))

    def draft_by(self, schedule: Sequence[ScheduleEntry]) -> None:
        """Set the draft-length schedule from the next generation on."""
        self._start_over()
        self._counts.draft_by(schedule)

    def trace(
        self,
        prompts: Sequence[Prompt],
        *,
        sampling: SamplingConfig,
        group_size: int,
        seed: int,
        refits: Sequence[WeightFiles] = (),
        steps_between: int = 1,
    ) -> list[Trace]:
        """Sample as `generate` does, and record the draft windows for the certificate.

        Args:
            refits: weights to load while the rollouts are in flight, in a cycle; the last of them is loaded at the end.
                Needs an engine that runs in flight.
            steps_between: steps from one refit to the next.
        Returns:
            One trace a rollout, prompt by prompt.
        """
        self._start_over()
        self._cache.wake()
        found: dict[int, Sequence[FinishedRollout]] = {}
        try:
            self._start(group_requests(prompts, group_size=group_size, seed=seed), sampling)
            step = 0
            while not self._groups.is_empty():
                if refits and step % steps_between == 0:
                    self.refit(refits[step // steps_between % len(refits)])
                found.update((request.index, finished) for request, finished in self._groups.step())
                step += 1
            if refits:
                self.refit(refits[-1])
        except BaseException:
            self._groups.drop()  # the next call would return them
            raise
        return [trace_of(prompts[index], finished) for index in range(len(prompts)) for finished in found[index]]

    def refit(self, weights: WeightFiles) -> EngineState:
        """Load the policy's weights, and the draft's if there are any, and reset the prefix cache.

        After an error the engine must not be used further.
        """
        self._read(weights.policy, is_draft=False)
        if weights.draft is not None:
            self._read(weights.draft, is_draft=True)
        draft_version = None if weights.draft is None else weights.draft_version
        return self.adopt(policy_version=weights.policy_version, draft_version=draft_version)

    def facts(self) -> dict[str, str]:
        """Return what vLLM chose at its start and decides speed: kernels, model runner, graphs, size of the cache."""
        config = self._llm.llm_engine.engine_core.engine_core.scheduler.vllm_config
        return {
            "attention": ", ".join(self._llm.collective_rpc("attention_backends")[0]),
            "model runner": "V2" if config.use_v2_model_runner else "V1",
            "CUDA graphs": config.compilation_config.cudagraph_mode.name,
            "KV cache tokens": str(config.cache_config.kv_cache_size_tokens),
            **({} if self._weight_format is None else {"matrices": self._weight_format.dtype}),
        }

    def watch_ranks(self, on_end: Callable[[], None]) -> None:
        """Call `on_end` from another thread as soon as a child process of a tensor-parallel rank has ended.

        vLLM sees that too, but ends the other ranks first, and what runs here then fails with an error of its own.
        """
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        executor = self._llm.llm_engine.engine_core.engine_core.model_executor
        if not isinstance(executor, MultiprocExecutor):
            return
        ranks = [each.proc.sentinel for each in executor.workers]

        def watch() -> None:
            multiprocessing.connection.wait(ranks)
            on_end()

        threading.Thread(target=watch, daemon=True, name="ranks").start()

    def locations(self) -> list[Location]:
        """Return the locations of the engine's workers."""
        return self._llm.collective_rpc("location")

    def join_channel(self, channel: Channel, settings: dict[str, Any]) -> None:
        """Join a channel with the sender's `settings`; a shared-memory channel needs no call."""
        self._llm.init_weight_transfer_engine({"init_info": {"channel": channel, "settings": settings}})

    def start_update(self, *, is_draft: bool) -> None:
        """Begin an update of the policy, or of the draft; no step runs until `adopt`."""
        if self._kv_cache is None:
            self._groups.drop()  # rollouts of a generation that failed on another engine
        rule = "needs an engine whose draft has weights of its own"
        require(self._state.draft_version is not None or not is_draft, "refit.draft", rule, is_draft)
        self._llm.collective_rpc("abandon_update")  # left by a refit in which another engine was lost
        (self._llm.start_draft_weight_update if is_draft else self._llm.start_weight_update)()
        self._is_draft_updating, self._is_updating = is_draft, True

    def update(self, channel: Channel, settings: dict[str, Any]) -> None:
        """Receive a part of the weights, or all, over `channel`."""
        self._llm.update_weights({"update_info": {"channel": channel, "settings": settings}})

    def finish_update(self) -> None:
        """End an update after the last weights; raises if the engine's ranks read different ones."""
        self._llm.finish_weight_update()
        digests = set(self._llm.collective_rpc("received_digest"))
        if len(digests) > 1:
            raise RuntimeError("the engine's ranks read different weights in one update")
        name = "draft_digest" if self._is_draft_updating else "policy_digest"
        self._state = replace(self._state, **{name: digests.pop()})

    def weight_dtypes(self, *, is_draft: bool) -> dict[str, str]:
        """Return the types of the policy's tensors, or of the draft's; raises LookupError if a layer hides its own."""
        ranks = self._llm.collective_rpc("weight_dtypes", args=(is_draft,))
        return {name: dtype for rank in ranks for name, dtype in rank.items()}

    def weight_fingerprints(self, *, is_draft: bool, turn: Turn) -> dict[str, int]:
        """Fingerprint the engine's tensors in `turn`, over all ranks of the engine."""
        return weight_totals(self._llm.collective_rpc("weight_fingerprints", args=(is_draft, turn)))

    def state(self) -> EngineState:
        """Return the versions, digests and the counter that a refit changes."""
        return self._state

    def adopt(self, *, policy_version: int, draft_version: int | None) -> EngineState:
        """Set the versions of the received weights, None for a draft that did not change, and reset the prefix cache.

        Rollouts in flight continue with the new weights. After an error the engine must not be used further.
        """
        if draft_version is None:
            draft_version = self._state.draft_version
        self._leave_cache(policy_version)
        self._state = replace(
            self._state,
            policy_version=policy_version,
            draft_version=draft_version,
            num_prefix_cache_resets=self._state.num_prefix_cache_resets + 1,
        )
        self._groups.adopt((policy_version, draft_version))
        self._is_updating = False
        return self._state

    def _leave_cache(self, policy_version: int) -> None:
        """Reset the prefix cache, and treat the KV cache of rollouts in flight as `KvCache` says."""
        if self._kv_cache is KvCache.KEEP and not self._groups.is_empty():
            self._groups.forget_drafts()
            self._groups.leave_cached_prefixes()
            return
        is_recomputed = self._kv_cache is KvCache.RECOMPUTE
        running = [*self._llm.llm_engine.engine_core.engine_core.scheduler.running] if is_recomputed else []
        if not self._llm.reset_prefix_cache(reset_running_requests=is_recomputed):
            raise RuntimeError(f"prefix cache not reset after the refit to policy version {policy_version}")
        self._counts.leave_out(running)
        self._groups.expect_recomputation()

    def token_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Compute the policy's logprob of each token but the first, given all tokens before it, at temperature 1.

        A sleeping engine sleeps again afterwards.
        """
        from vllm import SamplingParams

        was_asleep = self._cache.is_asleep
        self._cache.wake()
        params = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0, detokenize=False)
        outputs = self._groups.aside([{"prompt_token_ids": list(sequence)} for sequence in sequences], params)
        if was_asleep:
            self._cache.sleep()
        return [
            [entry[token].logprob for token, entry in zip(sequence[1:], output.prompt_logprobs[1:], strict=True)]
            for sequence, output in zip(sequences, outputs, strict=True)
        ]

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

    def _verify_in_blocks(self, *, is_on_cpu: bool) -> None:
        """Have the first model runner verify in blocks, on a CPU; the second one was told so at its start."""
        if self.facts()["model runner"] == "V1":
            rule, fix = "must be token where vLLM's first model runner samples on a GPU", "it samples drafts greedily"
            require(is_on_cpu, "draft.verification", rule, "block", fix)
            self._llm.collective_rpc("verify_in_blocks")
