"""Rollout engine on SGLang, on a CPU and without speculation: the side of our own Python environment.

SGLang 0.5.23 pins another torch than vLLM does, so it has an environment of its own. `SglangEngine` starts
`sglang_process` there and calls it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import slipstream
from slipstream.config import require
from slipstream.data.chat import end_token_ids
from slipstream.engine.config import EngineConfig, SamplingConfig
from slipstream.engine.protocol import GroupRequest, Portion
from slipstream.engine.vllm_engine import loadable
from slipstream.refit.channel import Location, here
from slipstream.refit.config import EngineState, WeightFiles
from slipstream.refit.fingerprint import Turn
from slipstream.types import Dtype, FinishReason, Rollout, RolloutGroup

PYTHON = "SLIPSTREAM_SGLANG_PYTHON"
"""Environment variable that names the Python of SGLang's environment."""

_CHECKOUT = Path(slipstream.__file__).resolve().parents[1]
_MAIN = "from slipstream.engine.sglang_process import main; main()"
_BYTES = {Dtype.FLOAT32: 4, Dtype.BFLOAT16: 2}
_SPARE = 2  # positions of the longest sequence that SGLang leaves free


class SglangDiedError(RuntimeError):
    """SGLang's process ended: all that it held is lost."""


def sglang_python() -> Path:
    """Return the Python of SGLang's environment, and refuse a host without one."""
    path = Path(os.environ.get(PYTHON) or _CHECKOUT / ".venv-sglang/bin/python")
    fix = f"run make sglang-setup, or name the Python of an environment with SGLang by {PYTHON}"
    require(path.is_file(), "engine.backend", "must be vllm on a host without SGLang's environment", "sglang", fix)
    return path


def sglang_environment(config: EngineConfig) -> dict[str, str]:
    """Environment variables that SGLang's process must start with, on a CPU."""
    return {
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(config.num_threads),
        "PYTHONPATH": str(_CHECKOUT),
        "SGLANG_USE_CPU_ENGINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCHDYNAMO_DISABLE": "1",  # the first call of a compiled function would wait for a compiler
    }


def sglang_arguments(policy: Path, config: EngineConfig) -> dict[str, Any]:
    """Return SGLang's arguments that follow from the recipe and the policy's config.json."""
    return {
        "attention_backend": "torch_native",  # the others need a GPU, or a CPU with AMX
        "chunked_prefill_size": -1,
        "context_length": config.max_model_len,
        "device": "cpu",
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "disable_radix_cache": True,  # cached prefixes change the shape of a product, and with it the last bits
        "dtype": config.dtype.value,
        "log_level": "error",
        "mem_fraction_static": 0.9,  # of the host's free memory; max_total_tokens says how much of it is the cache
        "max_running_requests": config.max_num_seqs,
        "max_total_tokens": kv_cache_tokens(json.loads((policy / "config.json").read_text()), config),
        "random_seed": 0,
        "skip_tokenizer_init": True,
    }


def kv_cache_tokens(model: dict[str, Any], config: EngineConfig) -> int:
    """Number of tokens whose keys and values fit into `engine.kv_cache_gib`, by a model's config.json."""
    assert config.kv_cache_gib is not None, "the recipe refuses GPUs"
    heads = model["num_attention_heads"]
    size = model.get("head_dim") or model["hidden_size"] // heads
    kv_heads = model.get("num_key_value_heads") or heads
    return int(config.kv_cache_gib * 2**30) // (2 * model["num_hidden_layers"] * kv_heads * size * _BYTES[config.dtype])


class SglangEngine:
    """Running SGLang engine with one version of the policy; it has the methods of `VllmEngine` that a driver calls.

    SGLang's process ends when the socket to it is closed, also by the death of this one.
    """

    def __init__(
        self,
        policy: Path,
        *,
        config: EngineConfig,
        speculative_config: dict[str, Any] | None = None,
        command: Sequence[str] = (),
        is_in_flight: bool = False,
        returns_routes: bool = False,
    ) -> None:
        """Start the engine on a model directory in Hugging Face format; one that would speculate is refused.

        `command` takes the place of `sglang_process` in SGLang's environment; the number of a socket is added to it.
        """
        assert not is_in_flight and not returns_routes, "the recipe refuses them"
        fix = "no speculation was seen on SGLang: train --arms autoregressive"
        require(speculative_config is None, "engine.backend", "must be vllm here", "sglang", fix)
        self._stop_token_ids = end_token_ids(policy)
        self._max_model_len = config.max_model_len
        self._state = EngineState(policy_version=0, policy_digest="", draft_version=None, num_prefix_cache_resets=0)
        arguments = sglang_arguments(policy, config)
        command = command or (str(sglang_python()), "-c", _MAIN)
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                env={**os.environ, **sglang_environment(config)},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )
        self._answers = self._socket.makefile(encoding="utf-8")
        with loadable(policy) as model:
            version = self.call("start", model_path=str(model), **arguments)
        attention, num_tokens = arguments["attention_backend"], str(arguments["max_total_tokens"])
        self._facts = {"SGLang": version, "attention": attention, "KV cache tokens": num_tokens}

    def call(self, name: str, **arguments: Any) -> Any:
        """Call a method of `SglangProcess` and return its answer; raises `SglangDiedError` if the process ended."""
        try:
            self._socket.sendall((json.dumps({"name": name, "arguments": arguments}) + "\n").encode())
            line = self._answers.readline()
        except OSError:  # the connection is broken
            line = ""
        if not line:
            raise SglangDiedError(f"SGLang's process {self._process.pid} ended during {name}; its output says why")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"SGLang failed during {name}: {answer['error']}")
        return answer["value"]

    def close(self) -> None:
        """End SGLang's process, and wait for its end."""
        self._answers.close()
        self._socket.close()
        self._process.wait()

    def generate(
        self,
        requests: Sequence[GroupRequest],
        *,
        sampling: SamplingConfig,
        is_first: bool = True,
        room_for: int | None = None,
    ) -> Portion:
        """Generate all `requests`; none is left for a later call."""
        del is_first, room_for
        longest = max((len(request.prompt.token_ids) for request in requests), default=0)
        needed = longest + sampling.max_response_tokens + _SPARE
        rule = f"must hold the longest prompt {longest} + max_response_tokens {sampling.max_response_tokens} + {_SPARE}"
        require(needed <= self._max_model_len, "engine.max_model_len", rule, self._max_model_len)
        rule, cut = "must be 1.0 and 0 with engine.backend sglang", (sampling.top_p, sampling.top_k)
        require(cut == (1.0, 0), "sampling.top_p and top_k", rule, cut, "its logprobs are those before the cut")
        params = {
            "temperature": sampling.temperature,
            "max_new_tokens": sampling.max_response_tokens,
            "stop_token_ids": list(self._stop_token_ids),
        }
        rows = [(request, seed) for request in requests for seed in request.seeds]
        answer = self.call(
            "generate",
            input_ids=[request.prompt.token_ids for request, _ in rows],
            sampling_params=[{**params, "sampling_seed": seed} for _, seed in rows],
        )
        found = iter(answer["responses"])
        groups = []
        for request in requests:
            rollouts = tuple(self._rollout(request, next(found), sampling) for _ in request.seeds)
            groups.append((request.index, RolloutGroup(prompt=request.prompt, rollouts=rollouts)))
        started_s, ended_s = answer["span_s"]
        return Portion(
            groups=tuple(groups),
            acceptance=None,
            started_s=started_s,
            ended_s=ended_s,
            num_preemptions=sum(each["num_retractions"] for each in answer["responses"]),
        )

    def _rollout(self, request: GroupRequest, response: dict[str, Any], sampling: SamplingConfig) -> Rollout:
        tokens, ended_by = tuple(response["token_ids"]), response["ended_by"]
        is_whole = tokens and (
            tokens[-1] in self._stop_token_ids if ended_by == "stop" else len(tokens) == sampling.max_response_tokens
        )
        if ended_by not in ("stop", "length") or not is_whole:
            raise RuntimeError(f"SGLang must end a response by its stop token or length, got {len(tokens)}, {ended_by}")
        return Rollout(
            prompt_id=request.prompt.id,
            token_ids=tokens,
            rollout_logprobs=tuple(response["logprobs"]),
            finish_reason=FinishReason(ended_by),
            policy_version=self._state.policy_version,
            draft_version=None,
        )

    def refit(self, weights: WeightFiles) -> EngineState:
        """Load the policy's weights, and flush the cache; after an error the engine must not be used further."""
        assert weights.draft is None, "it holds no draft"
        self._state = replace(
            self._state,
            policy_digest=self.call("load", path=str(weights.policy)),
            policy_version=weights.policy_version,
            num_prefix_cache_resets=self._state.num_prefix_cache_resets + 1,
        )
        return self._state

    def state(self) -> EngineState:
        """Return the version, the digest and the counter that a refit changes."""
        return self._state

    def weight_dtypes(self, *, is_draft: bool) -> dict[str, str]:
        """Return the types of the policy's tensors; raises LookupError if the order of one in SGLang is not known."""
        assert not is_draft, "it holds none"
        answer = self.call("weights", index=0, count=1)
        if "hidden" in answer:
            raise LookupError(answer["hidden"])
        return answer["dtypes"]

    def weight_fingerprints(self, *, is_draft: bool, turn: Turn) -> dict[str, int]:
        """Fingerprint the engine's tensors in `turn`, where SGLang holds them."""
        assert not is_draft, "it holds none"
        return self.call("weights", index=turn.index, count=turn.count)["fingerprints"]

    def token_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Compute the policy's logprob of each token but the first, at temperature 1."""
        return self.call("token_logprobs", sequences=[list(sequence) for sequence in sequences])

    def facts(self) -> dict[str, str]:
        """Return what SGLang was started with and decides speed."""
        return self._facts

    def locations(self) -> list[Location]:
        """Return the location of the engine, whose files SGLang reads."""
        return [here()]

    def limit_threads(self, num_threads: object) -> None:
        """Keep all threads: SGLang's process takes no notice of a learner beside it."""

    def run_in_flight(self, kv_cache: object) -> None:
        """Do nothing: no rollout is in flight between two calls."""
        assert kv_cache is None, "the recipe refuses generation in flight"
