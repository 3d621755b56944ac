"""The rollout engine on vLLM: exact speculative sampling of the policy, refit in place, counters read as deltas.

One `VllmEngine` a process (deleting one of two breaks the other): `slipstream.workers` gives each one of its own.
"""

from __future__ import annotations

import glob
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from slipstream.config import require
from slipstream.engine.acceptance import AcceptanceCounters, acceptance_between
from slipstream.engine.config import EngineConfig, SamplingConfig
from slipstream.engine.protocol import Portion, Trace, WeightFiles
from slipstream.engine.requests import GroupRequest, group_requests
from slipstream.engine.vllm_groups import CacheMemory, Drafting, Drawn, GroupsUnderWay, group_of, trace_of
from slipstream.grpo.loop_config import KvCache
from slipstream.imports import uncollected
from slipstream.records.steps import ScheduleEntry
from slipstream.refit.channel import Location
from slipstream.refit.config import Channel, EngineState
from slipstream.refit.fingerprint import Turn, weight_totals
from slipstream.types import Dtype, Prompt, RolloutGroup

_PROBE = "slipstream.engine.vllm_plugin.EngineProbe"


def engine_arguments(config: EngineConfig, *, is_in_flight: bool, can_sleep: bool = False) -> dict[str, Any]:
    """vLLM's arguments that follow from the recipe, with those of the device.

    An engine that `can_sleep` has its memory from an allocator that can give parts of it back; vLLM has one for GPUs.

    On a GPU vLLM schedules asynchronously by default: while one step's tokens come out the next step runs already, with
    the old weights where a refit comes in between. On a CPU it never does.
    """
    arguments = {
        "dtype": config.dtype.value,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "enforce_eager": config.enforce_eager,
        "tensor_parallel_size": config.tensor_parallel_size,
    }
    if config.kv_cache_gib is None:
        scheduling = {"async_scheduling": False} if is_in_flight else {}
        sleeping = {"enable_sleep_mode": True} if can_sleep else {}
        return {**arguments, "gpu_memory_utilization": config.gpu_memory_utilization, **scheduling, **sleeping}
    return {
        **arguments,
        "kv_cache_memory_bytes": int(config.kv_cache_gib * 2**30),
        # After each chunk but a prompt's last, vLLM 0.32 takes a seeded request's draw back by its generator's offset;
        # a CPU's generator has none, and the engine would end there.
        "enable_chunked_prefill": False,
    }


@contextmanager
def loadable(model: Path) -> Iterator[Path]:
    """The directory `model` by a name under which vLLM finds its weights: it searches them by a glob pattern."""
    if glob.escape(str(model)) == str(model):
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="slipstream-model-") as directory:
        link = Path(directory) / "model"
        link.symlink_to(model.absolute(), target_is_directory=True)
        yield link


def without_gpu() -> str:
    """Why vLLM would generate on the CPU in this process; empty if it would not.

    It is asked, not torch: its workers may be forked from this process, which must leave CUDA alone.
    """
    from vllm.platforms import current_platform

    return f"vLLM would generate on {current_platform.device_name!r}" if current_platform.is_cpu() else ""


def stop_token_ids(policy: Path) -> tuple[int, ...]:
    """End-of-sequence tokens of config.json and, where there is one, generation_config.json."""
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = policy / name
        if path.is_file():
            eos = json.loads(path.read_text()).get("eos_token_id")
            ids.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
    require(bool(ids), "policy.model", "must name an eos_token_id in its config.json", str(policy))
    return tuple(sorted(ids))


def sampling_params(sampling: SamplingConfig, stop_tokens: Sequence[int]) -> Any:
    """vLLM's sampling parameters."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_response_tokens,
        stop_token_ids=list(stop_tokens),
        logprobs=0,  # of the sampled token alone
        flat_logprobs=True,
        detokenize=False,
    )


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
        is_in_flight: bool = False,
        can_sleep: bool = False,
    ) -> None:
        """Start the engine.

        Args:
            policy: model directory in Hugging Face format.
            speculative_config: vLLM's own, None for autoregressive decoding.
            executor: of the engine's workers: `uni`, `mp` or `ray`; None leaves vLLM its choice.
            is_in_flight: it may be refitted while rollouts are under way.
            can_sleep: it may be told to `sleep`.
        Raises:
            RuntimeError: the process samples with a broken sampler.
        """
        assert config.dtype is not Dtype.AUTO, "the stage settles what auto stands for"
        os.environ.update(process_environment(config))
        with uncollected():  # vLLM collects garbage seven times while it starts
            from vllm import LLM

            from slipstream.engine.weight_transfer import BACKEND

        self._stop_token_ids = stop_token_ids(policy)
        with ExitStack() as links:
            if speculative_config is not None and "model" in speculative_config:
                draft = links.enter_context(loadable(Path(speculative_config["model"])))
                speculative_config = {**speculative_config, "model": str(draft)}
            self._llm: Any = LLM(
                str(links.enter_context(loadable(policy))),
                distributed_executor_backend=executor,
                skip_tokenizer_init=True,
                disable_log_stats=False,  # the acceptance counters live there
                logprobs_mode="processed_logprobs",  # at temperature != 1 raw ones are of another distribution
                speculative_config=speculative_config,
                weight_transfer_config={"backend": BACKEND},
                worker_extension_cls=_PROBE,
                seed=0,  # of what no rollout sees: each has a seed of its own
                **engine_arguments(config, is_in_flight=is_in_flight, can_sleep=can_sleep),
            )
        self._has_draft = speculative_config is not None and "model" in speculative_config  # with weights of its own
        self._is_draft_updating = False
        self.policy_version = self.draft_version = self.num_prefix_cache_resets = 0
        self.policy_digest = self.draft_digest = ""
        self._check_sampler()
        self._drafting = None if speculative_config is None else Drafting(self._llm)
        self._cache = CacheMemory(self._llm)
        self._max_model_len = config.max_model_len
        self._is_updating = False  # from the first new weight until the versions are adopted
        self._kv_cache: KvCache | None = None
        self._groups = GroupsUnderWay(self._llm.llm_engine, max_num_seqs=config.max_num_seqs)
        self._groups.adopt(self._versions)
        self._at_work: Callable[[], AbstractContextManager[None]] = nullcontext

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
            self._start_over()
        try:
            return self._run(requests, sampling, lambda _: room_for is not None and self._groups.has_room(room_for))
        except BaseException:
            self._groups.drop()
            raise

    def run_in_flight(self, kv_cache: KvCache | None) -> None:
        """From now on rollouts outlive new weights, with what `kv_cache` says of theirs; None: they do not.

        Whatever is under way is dropped.

        Raises:
            ConfigError: vLLM schedules asynchronously: tokens that it drew before a refit would come out after it.
        """
        self._groups.drop()
        batches = self._llm.llm_engine.engine_core.engine_core.batch_queue
        rule = "needs engines that have no step under way between two others"
        require(kv_cache is None or batches is None, "loop.kv_cache", rule, kv_cache, "start them as is_in_flight")
        self._kv_cache = kv_cache

    def submit(self, requests: Sequence[GroupRequest], *, sampling: SamplingConfig) -> None:
        """Queue groups behind those that are under way; `GroupRequest.index` is unique over a training."""
        self._require_in_flight()
        self._start(requests, sampling)

    def advance(self, *, max_s: float, stops_at_first: bool = True) -> Portion:
        """Run until a group is complete, until `max_s` seconds have passed, or until nothing is under way.

        Args:
            stops_at_first: False goes on for `max_s`, and returns all groups that were completed.
        """
        self._require_in_flight()
        end_s = time.perf_counter() + max_s
        return self._run((), None, lambda done: bool(done and stops_at_first) or time.perf_counter() >= end_s)

    def restart(self, seeds: Mapping[int, Sequence[int]]) -> int:
        """Start the unfinished rollouts of these groups anew with these seeds, one a place in the group; how many."""
        self._require_in_flight()
        return sum(self._groups.restart(index, of_group) for index, of_group in seeds.items())

    def _start(self, requests: Sequence[GroupRequest], sampling: SamplingConfig) -> None:
        self._check_lengths([request.prompt for request in requests], sampling)
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
        """Start `requests` and take steps until all is done, or as `is_over` of the groups so far says."""
        self._cache.wake()
        before = self._counters()
        started_s = time.perf_counter()
        done: list[tuple[int, RolloutGroup]] = []
        if sampling is not None:
            self._start(requests, sampling)
        with self._at_work():
            while not self._groups.is_empty():
                done += [(request.index, group_of(request, drawn)) for request, drawn in self._groups.step()]
                if is_over(done):
                    break
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

    def sleep(self) -> None:
        """Free the memory of the key-value cache until something is generated; see `CacheMemory`.

        What a generation that failed may have left is forgotten. Weights may come and be compared meanwhile.
        """
        self._start_over()
        self._cache.sleep()

    def around_work(
        self, at_work: Callable[[], AbstractContextManager[None]], before_iteration: Callable[[], None] | None
    ) -> None:
        """Generate within a block of `at_work`, with `before_iteration` called before each iteration in it."""
        self._at_work = at_work
        self._groups.before_step = before_iteration

    def _start_over(self) -> None:
        """Forget what an earlier call that failed may have left; nobody waits for it."""
        rule = "must be complete before another call generates"
        require(self._kv_cache is None or self._groups.is_empty(), "groups that were submitted", rule, "some under way")
        self._groups.drop()
        self._groups.take_running()

    def _require_in_flight(self) -> None:
        assert self._kv_cache is not None, "run_in_flight comes first"
        if self._is_updating:
            raise RuntimeError("an engine must adopt the weights that it received before it goes on: no step mixes two")

    def draft_by(self, schedule: Sequence[ScheduleEntry]) -> None:
        """Draft by another table from the next generation on; only an engine that started with one can.

        Raises:
            ConfigError: the engine does not speculate, or started without a table.
        """
        self._start_over()
        require(self._drafting is not None, "draft.length", "needs an engine that speculates", None)
        assert self._drafting is not None
        self._drafting.draft_by(schedule)

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
        """Sample as `generate` does, and tell which tokens came out of the engine together: for the certificate.

        Args:
            refits: weights to take while the rollouts are under way, in turn and over again, in an engine that runs in
                flight; when all is drawn it takes the last of them.
            steps_between: steps from one of them to the next.
        Returns:
            One trace a rollout, prompt by prompt.
        """
        self._start_over()
        self._cache.wake()
        found: dict[int, Sequence[Drawn]] = {}
        try:
            self._start(group_requests(prompts, group_size=group_size, seed=seed), sampling)
            for step in itertools.count():
                if self._groups.is_empty():
                    break
                if refits and step % steps_between == 0:
                    self._take(refits[step // steps_between % len(refits)])
                found.update((request.index, drawn) for request, drawn in self._groups.step())
            if refits:
                self._take(refits[-1])
        except BaseException:
            self._groups.drop()  # or they would come out of the next call
            raise
        return [trace_of(prompts[index], drawn) for index in range(len(prompts)) for drawn in found[index]]

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
        """Devices of the engine's workers."""
        return self._llm.collective_rpc("location")

    def join_channel(self, channel: Channel, settings: dict[str, Any]) -> None:
        """Get ready to receive over `channel`; `settings` are what its sender says. Files can be read at any time."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        init = {"channel": channel, "settings": settings}
        self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init))

    def start_update(self, *, is_draft: bool) -> None:
        """Begin an update of the policy, or of the draft; no step is taken until `adopt`."""
        if self._kv_cache is None:
            self._groups.drop()  # what a generation that failed in another engine left here: nobody waits for it
        rule = "needs an engine whose draft has weights of its own"
        require(self._has_draft or not is_draft, "refit.draft", rule, is_draft)
        self._llm.collective_rpc("abandon_update")  # that of a refit in which another engine was lost
        (self._llm.start_draft_weight_update if is_draft else self._llm.start_weight_update)()
        self._is_draft_updating, self._is_updating = is_draft, True

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

    def state(self) -> EngineState:
        """Versions and counters that every refit must move."""
        return EngineState(
            policy_version=self.policy_version,
            policy_digest=self.policy_digest,
            draft_version=self.draft_version if self._has_draft else None,
            draft_digest=self.draft_digest,
            num_prefix_cache_resets=self.num_prefix_cache_resets,
        )

    def adopt(self, *, policy_version: int, draft_version: int | None) -> EngineState:
        """Call what was received by these versions, and let nothing start from prefixes that were cached before.

        What is under way goes on with the new weights, in an engine that runs in flight.

        Args:
            draft_version: None if the draft stayed as it was.
        Raises:
            RuntimeError: vLLM could not reset the prefix cache; the engine must not be used further.
        """
        self.policy_version = policy_version
        if draft_version is not None:
            self.draft_version = draft_version
        self._leave_cache()
        self.num_prefix_cache_resets += 1
        self._groups.adopt(self._versions)
        self._is_updating = False
        return self.state()

    def _leave_cache(self) -> None:
        """Leave the cache of the old weights, as `KvCache` says."""
        if self._kv_cache is KvCache.KEEP and not self._groups.is_empty():
            self._groups.forget_drafts()
            self._groups.leave_cached_prefixes()
        elif not self._llm.reset_prefix_cache(reset_running_requests=self._kv_cache is KvCache.RECOMPUTE):
            raise RuntimeError(f"prefix cache not reset after the refit to policy version {self.policy_version}")
        else:
            self._groups.expect_recomputation()

    def token_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Logprob of each token but the first, given those before it, at temperature 1; from the policy alone.

        An engine whose cache sleeps has it asleep again afterwards.
        """
        from vllm import SamplingParams

        was_asleep = self._cache.is_asleep
        self._cache.wake()
        params = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0, detokenize=False)
        prompts: list[Any] = [{"prompt_token_ids": list(sequence)} for sequence in sequences]
        outputs = self._groups.aside(prompts, params)
        if was_asleep:
            self._cache.sleep()
        found = []
        for sequence, output in zip(sequences, outputs, strict=True):
            entries: Any = output.prompt_logprobs
            found.append([entry[token].logprob for token, entry in zip(sequence[1:], entries[1:], strict=True)])
        return found

    def _read(self, path: Path, *, is_draft: bool) -> None:
        self.start_update(is_draft=is_draft)
        self.update(Channel.SHARED_MEMORY, {"path": str(path)})
        self.finish_update()

    def _take(self, weights: WeightFiles) -> None:
        self.refit(
            weights.policy,
            policy_version=weights.policy_version,
            draft=weights.draft,
            draft_version=weights.draft_version,
        )

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
    def _versions(self) -> tuple[int, int | None]:
        return self.policy_version, self.draft_version if self._has_draft else None
