"""A recipe: everything that determines a run, composed of the component configs and checked as a whole.

A recipe file is sparse: it overrides the defaults that stand on the dataclasses' fields.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from slipstream.catalog import CONFIGS, SimulatorConfig
from slipstream.config import Checked, check_known, from_mapping, merge, read_mapping, require, to_mapping
from slipstream.data.config import DATA_KINDS, SYNTHETIC, DataConfig
from slipstream.drafts.config import DraftConfig, DraftOnline
from slipstream.drafts.length import TuningConfig
from slipstream.drafts.methods import DraftMethod
from slipstream.engine.config import Backend, EngineConfig, SamplingConfig
from slipstream.evaluation import EvaluationConfig
from slipstream.grpo.config import Correction, GrpoConfig, LoopConfig, OptimizerMethod
from slipstream.learner.architecture import Architecture, aux_layer_ids, require_adaptable, require_routes
from slipstream.learner.config import SCRATCH, LearnerConfig, PolicyConfig
from slipstream.losslessness.config import LosslessnessConfig
from slipstream.records.files import write_atomic
from slipstream.refit.config import Channel, RefitConfig
from slipstream.rewards.config import BUILT_IN, RewardConfig
from slipstream.tracking.config import TrackingConfig, check_experiment, is_sqlite, sqlite_path, sqlite_uri
from slipstream.types import LoopMode, Quantization, Workload
from slipstream.workers.placement.config import Layout, PlacementConfig, PlacementMode
from slipstream.workers.placement.memory import MemoryEstimate, estimate, known_shape, require_even, resolved_channel

_WORKLOADS = "workloads"
_BASE = "base"
_PATHS = {
    *(f"data.{name}.path" for name in ("train", "draft_in_domain", "draft_general", "validation")),
    *("policy.model", "draft.model", "tracking.uri", "reward.function", "reward.functions.function"),
}
"""Fields whose values may be paths; those of a list's items have no index."""
_NO_PATHS = (SYNTHETIC, SCRATCH)
_GPU_MEMORY = 0.95  # the share of a GPU that engines can have between them
OPERATION = ("num_kept_idle", "start_timeout_s", "answer_timeout_s", "max_restarts")
"""Fields of engine and learner that say how they are run, and change nothing that they compute."""
_NO_INFLUENCE = ("name", "placement", "tracking", "tuning", "evaluation", "losslessness", "refit", "simulator")


class Recipe(Checked):
    """One experiment. Both arms of it share every field."""

    name: str
    """Name of the experiment, in MLflow too."""
    workload: Workload = Workload.RL_ZERO
    """Start of RL: a base model, or one that reasons. Set by launches (`--workload`), which then read `workloads`."""
    policy: PolicyConfig
    """Model that is trained."""
    learner: LearnerConfig
    """Training of the policy."""
    engine: EngineConfig
    """vLLM engines, the same in both arms."""
    sampling: SamplingConfig
    """Sampling of rollouts."""
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    """Nodes and GPUs."""
    data: DataConfig
    """Prompts and problems."""
    draft: DraftConfig = field(default_factory=DraftConfig)
    """Draft and its training."""
    tuning: TuningConfig = field(default_factory=TuningConfig)
    """Sweep of draft lengths."""
    grpo: GrpoConfig
    """Steps, loss and optimizer of the policy."""
    loop: LoopConfig = field(default_factory=LoopConfig)
    """Overlap of generation and training."""
    evaluation: EvaluationConfig
    """Accuracy on the validation problems."""
    losslessness: LosslessnessConfig = field(default_factory=LosslessnessConfig)
    """Certificate that speculation changes no distribution."""
    refit: RefitConfig = field(default_factory=RefitConfig)
    """Transfer of new weights to the engines."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """Verification of answers."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """MLflow and the comparison with earlier executions."""
    simulator: SimulatorConfig | None = None
    """Projection of the run to other machines, and sizes for the estimate of memory; null leaves both out."""

    def _check(self) -> None:
        check_experiment(self.name, "name")
        uneven = [size for size in self.tuning.batch_sizes if size % self.grpo.group_size]
        rule = f"must be multiples of grpo.group_size {self.grpo.group_size}"
        require(not uneven, "tuning.batch_sizes", rule, uneven)
        self._check_devices()
        self._check_online()
        self._check_loop()
        self._check_quantization()
        self._check_turns()
        self._check_lengths()
        self._check_sampling()
        self._check_scratch()
        self._check_placement()
        self._check_backend()

    def _check_lengths(self) -> None:
        """Sequences that must fit an engine, a micro-batch and the policy's positions, drafts in flight included."""
        longest_k, is_dflash = max(self.tuning.candidate_ks), self.draft.method is DraftMethod.DFLASH
        fits = not is_dflash or longest_k <= self.draft.pretrain.ttt_steps
        rule = f"must be >= the longest of tuning.candidate_ks, {longest_k}, with draft.method dflash"
        fix = "its blocks are that long: raise it, or shorten tuning.candidate_ks"
        self._require(fits, "draft.pretrain.ttt_steps", rule, fix)
        longest_prompt, longest_response = self.data.max_prompt_tokens, self.sampling.max_response_tokens
        # In flight are a last token with k drafts, and vLLM drafts for nobody in a batch in which one sequence has
        # no room for k more (and a block's first token): then a rollout would depend on the others' lengths.
        spare = max(2 * longest_k - 1 + is_dflash, longest_k + 1)
        for section, sampling in (("sampling", self.sampling), ("evaluation.sampling", self.evaluation.sampling)):
            response = sampling.max_response_tokens
            needed = longest_prompt + response + spare
            self._require(
                needed <= self.engine.max_model_len,
                "engine.max_model_len",
                f"must hold data.max_prompt_tokens {longest_prompt} + {section}.max_response_tokens "
                f"{response} + {spare} for drafts of k {longest_k} = {needed} tokens",
                "raise it, or lower one of the others: where a sequence nears max_model_len, vLLM stops drafting for "
                "its whole batch, and one that ends there with k+1 tokens in flight crashes the engine",
            )
        fits = self.reward.overlong.buffer_tokens <= longest_response
        rule = f"must be at most sampling.max_response_tokens {longest_response}"
        fix = "the penalty begins that many tokens before the limit"
        self._require(fits, "reward.overlong.buffer_tokens", rule, fix)
        longest = longest_prompt + longest_response
        rule = f"must hold one whole sequence of {longest} tokens"
        self._require(longest <= self.learner.max_tokens_per_microbatch, "learner.max_tokens_per_microbatch", rule)

    def _check_sampling(self) -> None:
        """Rollouts that training can learn from are drawn from the policy's whole distribution."""
        drawn = self.sampling
        fix = "greedy rollouts of a group are all equal and teach nothing"
        self._require(drawn.temperature > 0, "sampling.temperature", "must be > 0 for training", fix)
        rule = "must leave the policy's distribution whole in training"
        fix = "the learner's logprobs know no truncation: set top_p 1.0 and top_k 0"
        is_whole = drawn.top_p == 1.0 and drawn.top_k == 0
        require(is_whole, "sampling.top_p and sampling.top_k", rule, (drawn.top_p, drawn.top_k), fix)

    def _check_scratch(self) -> None:
        """A policy that is trained from random weights must have what engine and draft read of it."""
        scratch = self.policy.scratch
        if scratch is None:
            return
        rule = f"must be <= policy.scratch.max_position_embeddings {scratch.max_position_embeddings}"
        if self.policy.rope is not None:
            rule += f", which policy.rope extends to {self.policy.scratch_positions}"
        self._require(self.engine.max_model_len <= self.policy.scratch_positions, "engine.max_model_len", rule)
        if self.draft.reads("eagle3") or self.draft.reads("dflash"):  # the second takes vLLM's default
            ids = self.draft.eagle3.aux_hidden_state_layer_ids if self.draft.reads("eagle3") else None
            aux_layer_ids(ids, scratch.shape.num_layers)
        rule, layers = f"must be 1 with draft.method {self.draft.method}", scratch.num_mtp_layers
        needs_mtp = self.draft.method is DraftMethod.MTP
        self._require(layers > 0 or not needs_mtp, "policy.scratch.num_mtp_layers", rule, "or choose another method")

    @property
    def layout(self) -> Layout:
        """Layout of learner and engines over GPUs."""
        return Layout(
            placement=self.placement,
            parallel=self.learner.parallel,
            engine_tensor=self.engine.tensor_parallel_size,
            num_engines=self.engine.num_engines,
            num_engine_sets=max(self.tuning.max_live_engines, self.engine.num_kept_idle + 1),
            num_learners=self.learner.num_kept_idle + 1,
        )

    @property
    def swept_engine(self) -> EngineConfig:
        """Settings of the engines that tuning compares."""
        share = self.tuning.gpu_memory_utilization
        return self.engine if share is None else replace(self.engine, gpu_memory_utilization=share)

    @property
    def refit_channel(self) -> Channel:
        """The channel that a refit on GPUs takes; `auto` stays so without GPUs."""
        return resolved_channel(self.refit.channel, self.layout)

    def memory(self) -> MemoryEstimate | None:
        """Estimate of a GPU's memory; None without GPUs, and where hardware or a dense model's shape is not known."""
        shape = known_shape(self.policy, self.simulator)
        is_sparse = isinstance(shape, Architecture) and shape.experts is not None
        if shape is None or is_sparse or self.simulator is None or not self.layout.has_gpus:
            return None
        return estimate(
            shape,
            self.simulator.hardware,
            learner=self.learner,
            engine=self.engine,
            draft=self.draft,
            layout=self.layout,
            longest_k=max(self.tuning.candidate_ks),
            has_reference=self.grpo.loss.kl_coefficient > 0,
            method=self.grpo.optimizer.method,
            lora=self.policy.lora,
        )

    def _check_placement(self) -> None:
        """Layouts that do not divide the policy, channels that do not fit them, and GPUs too small for its states."""
        shape = known_shape(self.policy, self.simulator)
        if shape is not None:
            require_even(shape, self.learner.parallel, engine_tensor=self.engine.tensor_parallel_size)
            if self.policy.lora is not None:
                require_adaptable(shape, self.policy.lora)
            if self.grpo.router_replay:
                require_routes(shape)
        resolved_channel(self.refit.channel, self.layout)
        memory = self.memory()
        if memory is not None:
            memory.require_states()

    def _check_devices(self) -> None:
        """Refuse settings that the accelerators or their number do not allow."""
        live, own = self.tuning.max_live_engines, self.tuning.gpu_memory_utilization
        is_on_gpus = self.engine.kv_cache_gib is None
        fits = not is_on_gpus or live * self.swept_engine.gpu_memory_utilization <= _GPU_MEMORY
        field_ = "engine.gpu_memory_utilization" if own is None else "tuning.gpu_memory_utilization"
        fix = "tuning compares engines that live at once"
        fix += "; tuning.gpu_memory_utilization is for these engines alone" if own is None else ""
        self._require(fits, field_, f"must be at most {_GPU_MEMORY} / tuning.max_live_engines {live}", fix)
        has_gpus = self.placement.gpus_per_node > 0 and not self.placement.logical_gpus
        rule = f"must be {'null with' if has_gpus else 'given without'} GPUs"
        fix = "it is the memory of engines on CPUs, which placement.gpus_per_node 0 has"
        self._require(is_on_gpus == has_gpus, "engine.kv_cache_gib", rule, fix)
        is_served = is_on_gpus or self.refit.channel not in (Channel.NCCL, Channel.IPC)
        rule = "must do without CUDA: engine.kv_cache_gib is for engines on CPUs"
        self._require(is_served, "refit.channel", rule, "set auto")
        is_served = is_on_gpus or not self.grpo.router_replay
        rule = "must be false with engines on CPUs (engine.kv_cache_gib)"
        fix = "vLLM returns the routes of its model runner for GPUs alone"
        self._require(is_served, "grpo.router_replay", rule, fix)
        is_served = self.policy.lora is None or self.grpo.optimizer.method is OptimizerMethod.ADAMW
        fix = "it steps whole matrices, not their factors: take adamw"
        self._require(is_served, "grpo.optimizer.method", "must be adamw with policy.lora", fix)
        where = self.learner.parallel
        is_whole = where.pipeline == where.context == 1 and not where.sequence_parallel
        rule = "must have pipeline 1, context 1 and sequence_parallel false with draft.method mtp"
        fix = "the MTP layer reads whole states, and the embeddings beside them: split by tensor and data"
        self._require(is_whole or self.draft.method is not DraftMethod.MTP, "learner.parallel", rule, fix)

    def _check_online(self) -> None:
        """Refuse updates with fewer rollouts than data-parallel ranks, or than updates of the draft beside them."""
        num_ranks = self.learner.parallel.data
        num_rollouts = self.grpo.prompts_per_step * self.grpo.group_size // self.grpo.updates_per_step
        rule = f"must be at most the {num_rollouts} rollouts of an update"
        fix = "each rank learns from rollouts of its own: lower it or grpo.updates_per_step, or sample more rollouts"
        self._require(num_ranks <= num_rollouts, "learner.parallel.data", rule, fix)
        fits = self.draft.online.when is DraftOnline.OFF or self.draft.online.updates * num_ranks <= num_rollouts
        rule += f" / {num_ranks} data-parallel ranks"
        self._require(fits, "draft.online.updates", rule, "each learns from rollouts of its own")

    def _check_loop(self) -> None:
        """Generation and training at the same time need engines of their own, and work for all of them."""
        extra = self.grpo.dynamic_sampling.max_extra_batches
        rule = f"must be false with grpo.dynamic_sampling.max_extra_batches {extra}"
        fix = "it weighs one generation a step against another: leave out one of them"
        self._require(not self.draft.autopilot or not extra, "draft.autopilot", rule, fix)
        if self.loop.is_synchronous:
            return
        grpo, engine, mode = self.grpo, self.engine, f"with loop.mode {self.loop.mode.value}"
        fix = "the routes of rollouts that wait for training are not kept: set loop.mode synchronous"
        self._require(not grpo.router_replay, "grpo.router_replay", f"must be false {mode}", fix)
        fix = "there prompts are submitted before the rewards of others are known: set loop.mode synchronous"
        self._require(not extra, "grpo.dynamic_sampling.max_extra_batches", f"must be 0 {mode}", fix)
        fix = "there learner and engines work at the same time: leave it out, or set loop.mode synchronous"
        self._require(not self.placement.takes_turns, "placement.memory", f"must be 'shared' {mode}", fix)
        has_own = not self.layout.has_gpus or self.placement.mode is PlacementMode.SPLIT
        fix = "learner and engines that share a GPU work in turn: set split, or loop.mode synchronous"
        self._require(has_own, "placement.mode", f"must be split {mode}", fix)
        rule = f"must be at most grpo.prompts_per_step {grpo.prompts_per_step} {mode}"
        fix = "a group runs on one engine, and the others would have no work"
        self._require(engine.num_engines <= grpo.prompts_per_step, "engine.num_engines", rule, fix)
        rule = f"must be at most engine.max_num_seqs {engine.max_num_seqs} {mode}"
        fix = "a group runs on one engine, and whoever waits for room there grows old"
        self._require(grpo.group_size <= engine.max_num_seqs, "grpo.group_size", rule, fix)
        is_weighed = self.draft.autopilot and self.loop.mode is LoopMode.IN_FLIGHT
        fix = "it weighs one generation against another, and here none ends: set loop.mode one_step_off"
        self._require(not is_weighed, "draft.autopilot", f"must be false {mode}", fix)
        if (lag := self.loop.max_off_policy_steps) > 0:
            reason = "rollouts are of older policies than the one that learns"
            self._require_correction(f"loop.max_off_policy_steps {lag}", reason)

    def _require_correction(self, beside: str, reason: str) -> None:
        """Refuse rollouts of another policy than the one that learns, unless the loss says how it corrects for them."""
        loss = self.grpo.loss
        is_given = loss.corrects is not Correction.NONE or loss.correction is Correction.NONE
        fix = "set token or sequence with a cap, grpo.loss.truncated_importance_sampling, or none in so many words"
        self._require(is_given, "grpo.loss.correction", f"must be given with {beside}", f"{reason}: {fix}")

    def _check_quantization(self) -> None:
        """Refuse what engines cannot quantize, and rollouts of another policy that nobody corrects for."""
        kind = self.engine.quantization
        if kind is Quantization.NONE:
            return
        quantized = f"engine.quantization {kind}"
        self._require_correction(quantized, "the policy that samples differs from the one that learns")
        fix = "the MTP layer is a layer of the policy, and vLLM would quantize it too"
        is_apart = self.draft.method is not DraftMethod.MTP
        self._require(is_apart, "draft.method", f"must not be mtp with {quantized}", fix)
        num_ranks = self.learner.parallel.tensor
        divides = self.engine.tensor_parallel_size % num_ranks == 0
        rule = f"must be a multiple of learner.parallel.tensor {num_ranks} with {quantized}"
        fix = "the judge of a certificate rounds inputs as each rank of an engine does"
        self._require(divides, "engine.tensor_parallel_size", rule, fix)
        shape = known_shape(self.policy, self.simulator)
        is_dense = not isinstance(shape, Architecture) or shape.experts is None
        rule = "must be none for a mixture of experts"
        self._require(is_dense, "engine.quantization", rule, "vLLM's kernels of experts have layouts of their own")

    def _check_backend(self) -> None:
        """Refuse what SGLang's engine cannot do, or was not seen to do."""
        if self.engine.backend is Backend.VLLM:
            return
        where, drawn = self.refit.channel, self.evaluation.sampling
        fix = "it computes on CPUs, reads new weights from files, and gives the logprobs of the whole distribution"
        for is_served, field_, rule in (
            (self.engine.kv_cache_gib is not None, "engine.kv_cache_gib", "must be given"),
            (self.engine.tensor_parallel_size == 1, "engine.tensor_parallel_size", "must be 1"),
            (self.engine.quantization is Quantization.NONE, "engine.quantization", "must be none"),
            (self.loop.is_synchronous, "loop.mode", "must be synchronous"),
            (where in (Channel.AUTO, Channel.SHARED_MEMORY), "refit.channel", "must be auto or shared_memory"),
            (drawn.top_p == 1.0, "evaluation.sampling.top_p", "must be 1.0"),
            (drawn.top_k == 0, "evaluation.sampling.top_k", "must be 0"),
        ):
            self._require(is_served, field_, f"{rule} with engine.backend sglang", fix)

    def _check_turns(self) -> None:
        """Where learner and engines free memory in turn, nothing may be kept idle beside them."""
        if not self.placement.takes_turns:
            return
        rule = f"must be 0 with placement.memory {self.placement.memory.value!r}"
        fix = "nobody's turn ever comes to what is kept for later stages, and it holds memory"
        for section, kept in (("engine", self.engine.num_kept_idle), ("learner", self.learner.num_kept_idle)):
            self._require(kept == 0, f"{section}.num_kept_idle", rule, fix)

    def fingerprint(self) -> str:
        """Hash of all that the trained weights depend on; number of steps, checkpoints and tracking are left out."""
        values = to_mapping(self)
        for section in _NO_INFLUENCE:
            values.pop(section)
        for key in ("num_steps", "checkpoint_every_steps"):
            values["grpo"].pop(key)
        for section in ("engine", "learner"):
            for key in OPERATION:
                values[section].pop(key)
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def load_recipe(name: str, *, workload: Workload | None = None, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe alone of what `resolve_recipe` resolves."""
    return resolve_recipe(name, workload=workload, overrides=overrides)[0]


def resolve_recipe(
    name: str, *, workload: Workload | None = None, overrides: Mapping[str, Any] | None = None
) -> tuple[Recipe, dict[str, str]]:
    """Read `configs/<name>.yaml`, or the file `name`, lay the workload's section and `overrides` over it, check all.

    A recipe file may start from another one (`base: tiny`) and say only what it changes, and may hold
    `workloads: {rl_think: {...}}`: overrides that belong to one workload. What a file gives lies over all of its base,
    the base's sections of workloads among it. Relative paths of
    data, models and databases become absolute: those of the file against its directory, those of `overrides` against
    the working directory.

    Returns:
        The recipe, and for each field that has no default value or was given one: the dotted name, and who gave it
        (`recipe`, `recipe, workloads.<name>` or `launch`).
    """
    values = _read_recipe(recipe_path(name))
    by_workload = values.pop(_WORKLOADS)
    given = {"workload": workload.value} if workload is not None else {}
    launched = absolute_paths(merge(overrides or {}, given), Path.cwd())
    chosen = merge(values, launched).get("workload", Workload.RL_ZERO.value)
    section = by_workload.get(str(chosen), {})
    layers = {"recipe": values, f"recipe, workloads.{chosen}": section, "launch": launched}
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for label, layer in layers.items():
        merged = merge(merged, layer)
        origins |= dict.fromkeys(leaves(layer), label)
    policy = merged.get("policy")
    if isinstance(policy, dict) and policy.get("model", SCRATCH) != SCRATCH:
        merged["policy"] = policy | {"scratch": None}  # what a base says of its own policy
    return from_mapping(Recipe, merged), origins


def recipe_path(name: str) -> Path:
    """The file of a recipe that is named, or given as a path; there must be one."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else CONFIGS / f"{name}.yaml"
    known = ", ".join(sorted(p.stem for p in CONFIGS.glob("*.yaml")))
    require(os.path.isfile(path), "recipe", "must name a recipe file", name, f"known recipes: {known}")
    return path


def _read_recipe(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a recipe file over its base, with absolute paths and a mapping for each workload that has a section.

    Every workload's section is checked, though another workload is run. `above` are the files that start from this one.
    """
    values = read_mapping(path, "recipe")
    base = values.pop(_BASE, None)
    require(base is None or "name" in values, "name", f"must be given beside {_BASE}", None, "runs are found by it")
    sections = values.get(_WORKLOADS) or {}
    require(isinstance(sections, dict), _WORKLOADS, "must be a mapping of workload to what it changes", sections)
    sections = {name: section or {} for name, section in sections.items()}
    for name, section in sections.items():
        where = f"{_WORKLOADS}.{name}"
        require(name in list(Workload), where, "must be of a known workload", name, f"known: {', '.join(Workload)}")
        check_known(Recipe, section, where)
        rule = "must be left out: the section is of that workload"
        require("workload" not in section, f"{where}.workload", rule, section.get("workload"))
    sections = {name: absolute_paths(section, path.parent) for name, section in sections.items()}
    own = {**absolute_paths(values, path.parent), _WORKLOADS: sections}
    if base is None:
        return own
    require(isinstance(base, str), _BASE, "must name a recipe", base)
    file = recipe_path(str(path.parent / base) if base.endswith((".yaml", ".yml")) else base)
    above = (*above, path.resolve())
    require(file.resolve() not in above, _BASE, "must not lead back to the recipe itself", base)
    below = _read_recipe(file, above)
    return merge({**below, _WORKLOADS: _without(below[_WORKLOADS], dict.fromkeys(below[_WORKLOADS], values))}, own)


def _without(section: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out of a base's section of a workload what the recipe upon it gives, which holds for every workload."""
    return {
        key: _without(value, given[key]) if key in given else value
        for key, value in section.items()
        if key not in given or (isinstance(value, Mapping) and isinstance(given[key], Mapping))
    }


def absolute_paths(values: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """`values` with the relative paths among them made absolute, against `base`; what is of a wrong type stays."""

    def absolute(value: Any, name: str) -> Any:
        if isinstance(value, Mapping):
            return {key: absolute(each, f"{name}.{key}" if name else key) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [absolute(each, name) for each in value]
        is_built_in = name.startswith("reward.") and value in BUILT_IN  # whatever lies beside the recipe
        return _absolute_path(value, base) if name in _PATHS and not is_built_in else value

    return absolute(values, "")


def _absolute_path(value: Any, base: Path) -> Any:
    """A path as an absolute one; a hub id, a server's address and what is no text stay as they are."""
    if not isinstance(value, str) or not value or value in _NO_PATHS:
        return value
    if is_sqlite(value):
        return sqlite_uri(Path(os.path.abspath(base / os.path.expanduser(sqlite_path(value)))))
    is_path = value.startswith((".", "~")) or Path(value.partition(":")[0]).suffix in (*DATA_KINDS, ".py")
    if "://" in value or not (is_path or os.path.exists(base / value)):
        return value
    return os.path.abspath(base / os.path.expanduser(value))


def write_recipe(recipe: Recipe, path: Path, origins: Mapping[str, str] | None = None) -> Path:
    """Write the whole recipe, defaults included; `origins`, as of `resolve_recipe`, are comments behind the fields."""
    text = yaml.safe_dump(to_mapping(recipe), sort_keys=False, width=math.inf)
    if origins is not None:
        lines = text.splitlines()
        for name, line in _field_lines(text).items():
            lines[line] += f"  # {origins[name]}" if name in origins else ""
        text = "\n".join(["# Behind each field stands who gave it this value; others have their defaults.", *lines, ""])
    write_atomic(path, text.encode())
    return path


def _field_lines(text: str) -> dict[str, int]:
    """The line on which each field of a recipe ends, or begins where it is a list."""

    def walk(node: yaml.MappingNode, path: str) -> Iterator[tuple[str, int]]:
        for key, value in node.value:
            name = f"{path}{key.value}"
            if isinstance(value, yaml.MappingNode) and value.value:
                yield from walk(value, f"{name}.")
            else:
                yield name, (value.end_mark if isinstance(value, yaml.ScalarNode) else key.start_mark).line

    node = yaml.compose(text, Loader=yaml.SafeLoader)
    assert isinstance(node, yaml.MappingNode)
    return dict(walk(node, ""))


def parameters(recipe: Recipe) -> dict[str, str]:
    """Every field of the experiment as text, as a tracking server takes them: lists are JSON."""
    values = _of_the_experiment(recipe)
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}


def difference(recipe: Recipe, other: Recipe) -> tuple[str, Any, Any] | None:
    """The first field that two recipes do not share, and both its values; None if they are the same experiment."""
    ours, theirs = _of_the_experiment(recipe), _of_the_experiment(other)
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            return name, ours.get(name), theirs.get(name)
    return None


def _of_the_experiment(recipe: Recipe) -> dict[str, Any]:
    """Every field under its dotted name, but where the run is tracked."""
    values = leaves(to_mapping(recipe))
    return {name: value for name, value in values.items() if not name.startswith("tracking.")}


def leaves(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Every value under its dotted name."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{path}.{key}" if path else key
        found |= leaves(value, name) if isinstance(value, Mapping) else {name: value}
    return found


class _Untitled(GenerateJsonSchema):
    """JSON schemas whose fields have no titles: those would repeat their names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def recipe_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a whole recipe, for docs/recipe.md."""
    return {"$schema": GenerateJsonSchema.schema_dialect, **TypeAdapter(Recipe).json_schema(schema_generator=_Untitled)}


def recipe_file_schema() -> dict[str, Any]:
    """JSON schema of a recipe file, for editors: a whole one, or with `base` the name of another and what it changes.

    Its sections require no field, for a base, a default or the recipe of a workload's section may give it;
    `slipstream check` names the fields that nobody gives.
    """
    whole = recipe_schema()
    schema = _without_required(whole)
    changes = {name: each for name, each in schema["properties"].items() if name != "workload"}
    schema["$defs"]["Changes"] = {"type": "object", "properties": changes, "additionalProperties": False}
    sections = {each.value: {"anyOf": [{"$ref": "#/$defs/Changes"}, {"type": "null"}]} for each in Workload}
    schema["properties"] |= {
        _BASE: {
            "type": "string",
            "minLength": 1,
            "description": "Recipe that this one starts from: a name, or a path.",
        },
        _WORKLOADS: {
            "type": ["object", "null"],
            "description": "Changes of the recipe that belong to one workload.",
            "properties": sections,
            "additionalProperties": False,
        },
    }
    return {**schema, "anyOf": [{"required": [_BASE, "name"]}, {"required": whole["required"]}]}


def _without_required(schema: Any) -> Any:
    """A copy of a schema in which nothing is required."""
    if isinstance(schema, list):
        return [_without_required(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _without_required(value) for key, value in schema.items() if key != "required"}
