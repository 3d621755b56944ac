"""SGLang's half of an engine: a process of SGLang's own Python environment, which `sglang_engine` starts and calls.

The two environments hold different versions of torch. A message between them is therefore a line of JSON on a socket,
and weights are read from safetensors files.

SGLang runs the model in a child process of this one, its scheduler. Three things are added there, all on a CPU:

- The tensors are fingerprinted where they are, by a method that SGLang's `collective_rpc` calls. Its own
  `get_weights_by_name` is for tests and returns the beginning of a tensor.
- Requests keep their seeds. SGLang 0.5.23 reads seeds in deterministic inference alone, which needs an accelerator.
- Seeded rows are drawn by `draw`. SGLang's own function computes its random numbers in a compiled kernel, which is not
  there, and in 32 bits. Top-p, top-k and min-p are drawn elsewhere in SGLang, and refused by the adapter.

Legend: `B` rows of a batch, `V` tokens of the vocabulary.
Source: sglang 0.5.23, `srt/entrypoints/engine.py`, `srt/layers/sampler.py`, `srt/sampling/sampling_batch_info.py`.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import safe_open
from torch import Tensor, nn

from slipstream.refit.fingerprint import GAMMA, HeldWeights, Turn, held_whole, mixed, part_fingerprints, weight_totals
from slipstream.storage import safetensors_files


class SglangProcess:
    """Running SGLang engine; each public method answers the call of its name."""

    def __init__(self, **arguments: Any) -> None:
        """Start SGLang with these arguments of its `ServerArgs`."""
        from sglang.srt.entrypoints.engine import (  # pyright: ignore[reportMissingImports]  # make sglang-setup has it
            Engine,
        )

        class SeededEngine(Engine):
            run_scheduler_process_func = staticmethod(run_scheduler)

        self._engine: Any = SeededEngine(**arguments)

    def generate(self, input_ids: list[list[int]], sampling_params: list[dict[str, Any]]) -> dict[str, Any]:
        """Sample a response to each prompt; returns tokens, logprobs and the end of each, and the time."""
        started_s = time.perf_counter()
        outputs = self._engine.generate(input_ids=input_ids, sampling_params=sampling_params, return_logprob=True)
        ended_s = time.perf_counter()
        return {"responses": [_response(each["meta_info"]) for each in outputs], "span_s": [started_s, ended_s]}

    def token_logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        """Compute the logprob of each token but the first, at temperature 1."""
        params = {"temperature": 1.0, "max_new_tokens": 1, "sampling_seed": 0}
        outputs = self._engine.generate(
            input_ids=sequences,
            sampling_params=[params] * len(sequences),
            return_logprob=True,
            logprob_start_len=[0] * len(sequences),
        )
        return [[entry[0] for entry in each["meta_info"]["input_token_logprobs"][1:]] for each in outputs]

    def load(self, path: str) -> str:
        """Load a safetensors file, or those of a directory, and flush the cache; returns the digest of the bytes."""
        digest = xxhash.xxh3_64()
        tensors: list[tuple[str, Tensor]] = []
        for file in safetensors_files(Path(path)):
            with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
                digest.update(content)
            with safe_open(file, framework="pt") as opened:
                tensors += [(name, opened.get_tensor(name)) for name in opened.keys()]  # noqa: SIM118
        _require_done(self._engine.begin_weight_update())
        _require_done(self._engine.update_weights_from_tensor(tensors, flush_cache=True))
        _require_done(self._engine.end_weight_update())
        return digest.hexdigest()

    def weights(self, index: int, count: int) -> dict[str, Any]:
        """Type and fingerprint of each tensor of a `Turn`, or the reason why a tensor is `hidden`."""
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "weights.json"
            self._engine.collective_rpc(write_weights.__name__, path=str(path), index=index, count=count)
            return json.loads(path.read_text())

    def close(self) -> None:
        """Stop SGLang's processes."""
        self._engine.shutdown()


def _response(meta: dict[str, Any]) -> dict[str, Any]:
    entries = meta["output_token_logprobs"]
    return {
        "token_ids": [entry[1] for entry in entries],
        "logprobs": [entry[0] for entry in entries],
        "ended_by": meta["finish_reason"]["type"],
        "num_retractions": meta["num_retractions"],
    }


def _require_done(answer: tuple[bool, str]) -> None:
    done, message = answer
    if not done:
        raise RuntimeError(f"SGLang refused an update of weights: {message}")


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """Run SGLang's scheduler with seeds, draws from them, and the fingerprints."""
    from sglang.srt.layers import sampler  # pyright: ignore[reportMissingImports]  # as above
    from sglang.srt.managers import scheduler  # pyright: ignore[reportMissingImports]
    from sglang.srt.sampling.sampling_batch_info import (  # pyright: ignore[reportMissingImports]
        SamplingBatchInfo,
    )

    unseeded = SamplingBatchInfo.from_schedule_batch

    def seeded(batch: Any, vocab_size: int) -> Any:
        info = unseeded(batch, vocab_size)
        seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64)
        return info

    SamplingBatchInfo.from_schedule_batch = staticmethod(seeded)
    sampler.sampling_from_probs_torch = draw
    setattr(scheduler.Scheduler, write_weights.__name__, write_weights)
    scheduler.run_scheduler_process(*args, **kwargs)


def draw(probs: Tensor, sampling_seed: Tensor, positions: Tensor) -> Tensor:
    """Draw a token a row of [B, V], which depends on the row's probabilities, seed and position alone: [B] int32.

    The smallest of independent exponential numbers with the rates p is that of a token with its probability p. The
    names of the arguments are those of SGLang's function in whose place it is called.
    """
    keys_B1 = mixed(sampling_seed + GAMMA * mixed(positions.long() + 1))[:, None]
    columns_V = GAMMA * torch.arange(1, probs.shape[1] + 1)
    bits_BV = (mixed(keys_B1 + columns_V) >> 11) & ((1 << 53) - 1)
    uniform_BV = (bits_BV.double() + 0.5) * 2.0**-53
    return (-uniform_BV.log() / probs.double()).argmin(1).to(torch.int32)


def write_weights(scheduler: Any, path: str, index: int, count: int) -> None:
    """Write type and fingerprint of each tensor of a turn to a file; a method of SGLang's scheduler."""
    turn = Turn(index=index, count=count)
    try:
        held = [each for each in held_weights(scheduler.tp_worker.model_runner.model) if turn.takes(each.parts[0].name)]
        found: dict[str, Any] = {"dtypes": {each.parts[0].name: each.parts[0].dtype for each in held}}
        found["fingerprints"] = weight_totals([part_fingerprints(held)])
    except LookupError as error:
        found = {"hidden": str(error.args[0])}
    Path(path).write_text(json.dumps(found))


def held_weights(model: nn.Module) -> Iterator[HeldWeights]:
    """Yield the checkpoint's tensors in the memory of a dense model on one rank; raises LookupError for another."""
    for path, module in model.named_modules():  # a module with two names, such as tied embeddings, comes once
        for own, parameter in module.named_parameters(recurse=False):
            start = 0
            for name, size in _parts(path, own, module, parameter):
                yield held_whole(name, parameter.detach()[start : start + size])
                start += size


def _parts(path: str, own: str, module: Any, parameter: Tensor) -> Sequence[tuple[str, int]]:
    """Names of the checkpoint's tensors that make up the rows of a parameter, with their numbers of rows."""
    parent, _, leaf = path.rpartition(".")
    if parameter.dim() > 2 or own not in ("weight", "bias"):
        raise LookupError(f"{path} holds {own} in an order that only SGLang knows")
    if leaf == "qkv_proj":
        kv = module.num_kv_heads * module.head_size
        sizes = {"q_proj": module.num_heads * module.head_size, "k_proj": kv, "v_proj": kv}
    elif leaf == "gate_up_proj":
        sizes = dict(zip(("gate_proj", "up_proj"), module.output_sizes, strict=True))
    elif leaf in ("embed_tokens", "lm_head"):
        return [(f"{path}.{own}", module.org_vocab_size)]  # padded behind it
    else:
        return [(f"{path}.{own}", len(parameter))]
    if sum(sizes.values()) != len(parameter):
        raise LookupError(f"{path} has {len(parameter)} rows, not those of {sizes}")
    return [(f"{parent}.{name}.{own}", size) for name, size in sizes.items()]


def main() -> None:
    """Answer the calls that come on the socket of the first argument, the start first, until it is closed."""
    engine: SglangProcess | None = None
    calls: dict[str, Callable[..., Any]] = {}
    with socket.socket(fileno=int(sys.argv[1])) as connection, connection.makefile("rw", encoding="utf-8") as stream:
        os.set_inheritable(connection.fileno(), False)
        for line in stream:
            call = json.loads(line)
            try:
                if engine is None:
                    engine = SglangProcess(**call["arguments"])
                    named = (engine.generate, engine.token_logprobs, engine.load, engine.weights)
                    calls = {method.__name__: method for method in named}
                    answer = {"value": version("sglang")}
                else:
                    answer = {"value": calls[call["name"]](**call["arguments"])}
            except Exception as error:  # noqa: BLE001  # the caller raises it
                answer = {"error": f"{type(error).__name__}: {error}"}
            stream.write(json.dumps(answer) + "\n")
            stream.flush()
    if engine is not None:
        engine.close()
