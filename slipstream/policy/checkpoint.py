"""The learner's checkpoint: one safetensors file a rank and one JSON file, each with its digest, nothing unpickled.

Names: `model.X` the parameter, `main.X` its float32 master, `exp_avg.X` and `exp_avg_sq.X` of AdamW or
`momentum_buffer.X` of Muon, `rng.cpu` and `rng.cuda`. Every data-parallel rank holds the same state, so only the first
of them writes. A checkpoint belongs to its parallel layout; to change that, go through the HF format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from megatron.core import parallel_state
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.policy import parallel
from slipstream.policy.directories import existing_directory, replaced_directory
from slipstream.policy.errors import CheckpointError

_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
_STATE = "state.json"
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """A checkpoint in memory: this rank's tensors, and JSON that all ranks share."""

    tensors: dict[str, Tensor]
    meta: dict[str, Any]


def tensors_of(model: torch.nn.Module, optimizer: MegatronOptimizer | None) -> dict[str, Tensor]:
    """Everything of a rank that the next update depends on."""
    tensors = {"rng.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["rng.cuda"] = torch.cuda.get_rng_state()
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        if optimizer is None:
            continue
        main = _main(parameter)
        if main is not parameter:
            tensors[f"main.{name}"] = main.detach()
        state = _state_of(optimizer, main).get(main, {})  # empty before the first update
        tensors.update({f"{moment}.{name}": state[moment] for moment in _MOMENTS if moment in state})
    return tensors


def restore(
    model: torch.nn.Module, optimizer: MegatronOptimizer | None, tensors: Mapping[str, Tensor], *, num_updates: int
) -> None:
    """Put back what `tensors_of` took.

    Raises:
        ValueError: `tensors` are of another model, dtype or layout.
    """
    expected = {f"model.{name}": parameter for name, parameter in model.named_parameters()}
    wrong = [
        name
        for name, parameter in expected.items()
        if name not in tensors or tensors[name].shape != parameter.shape or tensors[name].dtype != parameter.dtype
    ]
    extra = [name for name in tensors if name.startswith("model.") and name not in expected]
    if wrong or extra:
        first = (wrong + extra)[0]
        raise ValueError(f"the checkpoint is of another model: {first} differs in presence, shape or dtype")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"model.{name}"])
            if optimizer is not None:
                _restore_optimizer(optimizer, name, parameter, tensors, num_updates)
    torch.set_rng_state(tensors["rng.cpu"])
    if torch.cuda.is_available() and "rng.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["rng.cuda"])


def save(path: Path, state: State) -> None:
    """Write the checkpoint, collectively; `path` is replaced only when every rank has written its part."""
    with replaced_directory(path, is_main=parallel.is_main_rank(), barrier=parallel.barrier) as directory:
        if parallel_state.get_data_parallel_rank() == 0:
            file = directory / _rank_file()
            save_file({k: v.contiguous() for k, v in state.tensors.items()}, file)
            _digest_path(file).write_text(_digest(file))
        if parallel.is_main_rank():
            file = directory / _STATE
            file.write_text(json.dumps(state.meta, allow_nan=False))
            _digest_path(file).write_text(_digest(file))


def load(path: Path) -> State:
    """Read this rank's part of a checkpoint.

    Raises:
        CheckpointError: a file is missing, cut short or altered.
    """
    path = existing_directory(path)
    for file in (path / _STATE, path / _rank_file()):
        if not file.is_file() or not _digest_path(file).is_file():
            raise CheckpointError(f"checkpoint {path} is not whole: {file.name} or its digest is missing")
        if _digest(file) != _digest_path(file).read_text():
            raise CheckpointError(
                f"checkpoint {path} is damaged: {file.name} does not have the digest it was saved with"
            )
    return State(tensors=load_file(path / _rank_file()), meta=json.loads((path / _STATE).read_text()))


def _digest(file: Path) -> str:
    digest = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _digest_path(file: Path) -> Path:
    return file.with_name(file.name + ".xxh3")


def _main(parameter: torch.nn.Parameter) -> Tensor:
    """The float32 tensor that the optimizer steps: Megatron hangs it on a parameter of lower precision."""
    return parameter if parameter.dtype is torch.float32 else parameter.main_param  # type: ignore[attr-defined]


def _state_of(optimizer: MegatronOptimizer, main: Tensor) -> dict[Tensor, Any]:
    """The state of that one of the chained optimizers which steps `main`."""
    chained = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    for each in chained:
        if any(parameter is main for group in each.optimizer.param_groups for parameter in group["params"]):
            return each.optimizer.state
    raise LookupError("a parameter that no optimizer steps")


def _restore_optimizer(
    optimizer: MegatronOptimizer,
    name: str,
    parameter: torch.nn.Parameter,
    tensors: Mapping[str, Tensor],
    num_updates: int,
) -> None:
    main = _main(parameter)
    state = _state_of(optimizer, main)
    if main is not parameter:
        main.copy_(tensors[f"main.{name}"])
    state.pop(main, None)
    if num_updates > 0:
        saved = {moment: tensors.get(f"{moment}.{name}") for moment in _MOMENTS}
        state[main] = {k: moment.to(main.device, copy=True) for k, moment in saved.items() if moment is not None}
        if "exp_avg" in state[main]:
            state[main]["step"] = torch.tensor(float(num_updates), device=main.device)


def _rank_file() -> str:
    shard = parallel.current_shard()
    return f"tensor_{shard.tensor_rank:03d}_pipeline_{shard.pipeline_rank:03d}.safetensors"
