"""A real engine that can be told to fail in the ways that others' engines failed silently. Runs in an actor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from slipstream.engine.config import EngineConfig
from slipstream.engine.vllm_engine import VllmEngine, process_environment
from slipstream.refit.config import EngineState, WeightFiles


class FaultyEngine(VllmEngine):
    """`VllmEngine` with faults; `heal` takes all of them away."""

    _faults: frozenset[str] = frozenset()

    def inject(self, *faults: str) -> None:
        """Fail in these ways from now on."""
        self._faults = frozenset(faults)
        from vllm.v1.sample import rejection_sampler
        from vllm.v1.spec_decode import llm_base_proposer

        from slipstream.engine import vllm_plugin

        vllm_plugin.install()
        if "no sampler fix" in faults:
            rejection_sampler.expand_batch_to_tokens = vllm_plugin.SHIPPED_EXPAND
        if "drafts ignore seeds" in faults:
            llm_base_proposer.compute_probs_and_sample_next_token = vllm_plugin.SHIPPED_DRAFTS
        present = rejection_sampler.rejection_sample
        genuine = getattr(present, "genuine", present)
        rejection_sampler.rejection_sample = _accept_first(genuine) if "accepts the first" in faults else genuine

    def heal(self) -> None:
        self.inject()

    def refit(self, weights: WeightFiles) -> EngineState:
        if "draft not refitted" in self._faults:
            super().refit(replace(weights, draft=None))
            if weights.draft is not None:
                self._state = replace(self._state, draft_version=weights.draft_version)
            return self.state()
        reset = self._llm.reset_prefix_cache
        if "prefix cache kept" in self._faults:
            self._llm.reset_prefix_cache = lambda *args, **kwargs: True  # says so, and does nothing
        try:
            super().refit(weights)
        finally:
            self._llm.reset_prefix_cache = reset
        if "prefix cache reset skipped" in self._faults:
            num_resets = self._state.num_prefix_cache_resets - 1
            self._state = replace(self._state, num_prefix_cache_resets=num_resets)
        return self.state()

    def weight_dtypes(self, *, is_draft: bool) -> dict[str, str]:
        """Return the real dtypes, unless the backend hides the tensors."""
        if "tensors hidden" in self._faults:
            raise LookupError("model.layers.0.mlp.experts.weight is empty: its backend hides it")
        return super().weight_dtypes(is_draft=is_draft)

    def flip(self, name: str) -> None:
        """Flip the lowest bit of the first value of a weight that the engine computes with."""
        self._llm.apply_model(lambda model: _flip(model.get_parameter(name).data))

    def flip_copy(self, copy: str, row: int) -> None:
        """Flip the lowest bit of a value in a DFlash draft's copies of its tensors."""
        runner = self._llm.llm_engine.model_executor.driver_worker.worker.model_runner
        _flip(getattr(runner.get_draft_model().model, copy)[row])

    def check_again(self) -> None:
        """Check the sampler as at the start."""
        self._check_sampler()


def _flip(weight: torch.Tensor) -> None:
    bits = weight.flatten()[:1].view(torch.int32 if weight.dtype is torch.float32 else torch.int16)
    bits ^= 1


def _accept_first(genuine: Any) -> Any:
    """Rejection sampling that accepts the first draft token whatever the policy says."""

    def rejection_sample(
        draft_token_ids: torch.Tensor,
        num_draft_tokens: list[int],
        max_spec_len: int,
        cu_num_draft_tokens: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        output = genuine(draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, *args, **kwargs)
        start = 0
        for row, num in enumerate(num_draft_tokens):
            if num and int(output[row, 0]) != int(draft_token_ids[start]):
                output[row] = -1
                output[row, 0] = draft_token_ids[start]
            start += num
        return output

    rejection_sample.genuine = genuine  # type: ignore[attr-defined]
    return rejection_sample


def started(policy: Path, config: EngineConfig, speculative: Mapping[str, Any] | None) -> tuple[Any, Any]:
    """A speculative engine of this kind as a driver sees it, and the actor that it runs in."""
    import ray

    from slipstream.workers.calls import Deadline, Worker
    from slipstream.workers.engines import RemoteEngine

    environment = {**process_environment(config), "PYTHONPATH": str(Path(__file__).parents[2])}
    remote: Any = ray.remote(FaultyEngine)
    actor = remote.options(num_cpus=0, runtime_env={"env_vars": environment}).remote(
        policy, config=config, speculative_config=speculative
    )
    ray.get(actor.__ray_ready__.remote())
    return RemoteEngine([Worker(actor, "engine 0")], Deadline(300.0, "engine.answer_timeout_s")), actor
