"""Weights under the names of the Hugging Face checkpoint: model directories, read and written, and what a rank holds.

A rank's shards are gathered whole, or compared with an engine's as they lie.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Module

from slipstream.config import require
from slipstream.learner import parallel
from slipstream.learner.architecture import Architecture
from slipstream.learner.checkpoint.boxes import bands
from slipstream.learner.weights import (
    Layout,
    ParameterMapping,
    Shard,
    hf_from_shards,
    mappings,
    mtp_mappings,
    rows_of_parts,
)
from slipstream.refit.fingerprint import HeldWeights, WeightPart
from slipstream.storage import replaced_directory

_MODEL_FILES = ("config.json", "model.safetensors.index.json", "generation_config.json")


@contextlib.contextmanager
def open_weights(path: Path) -> Iterator[Callable[[str], Tensor]]:
    """A reader of full tensors by name, one file or sharded; tensors are read only when asked for.

    Raises:
        ConfigError: there is no safetensors file; other formats would have to be unpickled, which runs their code.
    """
    index = path / "model.safetensors.index.json"
    with contextlib.ExitStack() as stack:
        files = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else None
        by_name = {}
        for file in files or ["model.safetensors"]:
            require(
                (path / file).is_file(), "policy.model", f"must hold {file}", str(path), "other formats are not read"
            )
            handle = stack.enter_context(safe_open(path / file, framework="pt"))
            by_name.update(dict.fromkeys(handle.keys(), handle))

        def read(name: str) -> Tensor:
            if name not in by_name:
                raise ValueError(f"{path} has no tensor {name}")
            return by_name[name].get_tensor(name)

        yield read


def save_model(
    path: Path,
    config: Mapping[str, Any],
    weights: Iterable[tuple[str, Tensor]],
    tokenizer_dir: Path,
    *,
    max_file_bytes: int = 4 << 30,
) -> None:
    """Write config, weights and a copy of the tokenizer's files, atomically: `path` is whole or as it was before.

    Args:
        weights: taken one after another; no more of them than `max_file_bytes` are held at once, on the host.
    """
    with replaced_directory(path) as directory:
        for file in sorted(tokenizer_dir.iterdir()):
            if file.is_file() and file.suffix != ".safetensors" and file.name not in _MODEL_FILES:
                shutil.copy2(file, directory / file.name)
        (directory / "config.json").write_text(json.dumps(config, indent=2))
        _write_weights(directory, weights, max_file_bytes)


def _write_weights(directory: Path, weights: Iterable[tuple[str, Tensor]], max_file_bytes: int) -> None:
    """One file where they fit; else several, which are named when their number is known, and an index."""
    parts: list[list[str]] = []
    num_bytes = 0
    for part in _batched(weights, max_file_bytes):
        save_file(part, directory / _part_name(len(parts)), metadata={"format": "pt"})
        parts.append(list(part))
        num_bytes += sum(tensor.nbytes for tensor in part.values())
    files = [f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))]
    files = files if len(files) > 1 else ["model.safetensors"]
    for index, file in enumerate(files):
        (directory / _part_name(index)).rename(directory / file)
    if len(files) > 1:
        where = {name: file for names, file in zip(parts, files, strict=True) for name in names}
        index = {"metadata": {"total_size": num_bytes}, "weight_map": where}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _part_name(index: int) -> str:
    return f"part-{index}.safetensors"


def _batched(weights: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Copies on the host, of at most `max_bytes` together or of one tensor."""
    part: dict[str, Tensor] = {}
    held = 0
    for name, tensor in weights:
        if part and held + tensor.nbytes > max_bytes:
            yield part
            part, held = {}, 0
        part[name] = tensor.to("cpu", copy=True).contiguous()
        held += tensor.nbytes
    yield part


def held_weights(parameters: Mapping[str, Tensor], arch: Architecture, shard: Shard) -> Iterator[HeldWeights]:
    """A rank's Megatron parameters, by their names there, as parts of Hugging Face tensors.

    Over all ranks each element comes once: what is replicated on the first rank that has it, a tied output layer as the
    embedding that it is.
    """
    for mapping in _answered_for(arch, shard):
        tensor = parameters[mapping.megatron]
        dtype = str(tensor.dtype).removeprefix("torch.")
        parts, split = _layout(mapping, arch, shard, tuple(tensor.shape), dtype)
        yield HeldWeights(tensor=tensor, parts=parts, split=split)


def gathered_weights(
    parameters: Mapping[str, Tensor], arch: Architecture, shard: Shard, *, only: Container[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """All Hugging Face tensors, whole, on every rank, or those that `only` names; collective."""
    given: set[str] = set()
    for stage, holder, mapping in _places(arch, shard):
        if given.issuperset(mapping.hf):
            continue  # the last stage's copy of a tied embedding
        given.update(mapping.hf)
        if only is not None and not any(name in only for name in mapping.hf):
            continue
        tensors = None
        if stage == shard.pipeline_rank:
            own = parameters[mapping.megatron].detach()
            if mapping.is_expert:
                own = parallel.from_expert_rank(holder, own)
            shards = parallel.tensor_parallel_shards(own)
            tensors = hf_from_shards(mapping, shards, arch)
        yield from parallel.from_pipeline_stage(stage, tensors)


def gathered_mtp_weights(mtp: Module | None, arch: Architecture) -> Iterator[tuple[str, Tensor]]:
    """The Hugging Face tensors of the MTP layer, whole, on every rank; collective. None of a policy without one."""
    parameters = {} if mtp is None else dict(mtp.named_parameters())
    for mapping in mtp_mappings(arch):
        shards = parallel.tensor_parallel_shards(parameters[mapping.megatron].detach())
        yield from hf_from_shards(mapping, shards, arch)


def _places(arch: Architecture, shard: Shard) -> Iterator[tuple[int, int, ParameterMapping]]:
    """Every parameter of the model, with the stage and the rank among those of experts that hold it."""
    for stage in range(shard.pipeline_size):
        for holder in range(shard.expert_size):
            for mapping in mappings(arch, replace(shard, pipeline_rank=stage, expert_rank=holder)):
                if holder == 0 or mapping.is_expert:
                    yield stage, holder, mapping


@cache
def _answered_for(arch: Architecture, shard: Shard) -> tuple[ParameterMapping, ...]:
    def is_copy(mapping: ParameterMapping) -> bool:
        is_tied = mapping.megatron == "output_layer.weight" and arch.tie_word_embeddings
        is_replicated = mapping.layout is Layout.REPLICATED and shard.tensor_rank > 0
        return is_tied or is_replicated or shard.is_copy(mapping)

    return tuple(mapping for mapping in mappings(arch, shard) if not is_copy(mapping))


@cache  # the same at every refit, and of hundreds of tensors
def _layout(
    mapping: ParameterMapping, arch: Architecture, shard: Shard, shape: tuple[int, ...], dtype: str
) -> tuple[tuple[WeightPart, ...], Callable[[Tensor], list[Tensor]]]:
    """The parts in a parameter, and what cuts a value a row into theirs."""
    dim = 1 if mapping.layout is Layout.ROW else 0
    parts = []
    for name in mapping.hf:
        boxes = [band.box for band in bands(mapping, shape, arch, shard) if band.name == name]
        length = sum(box.shape[dim] for box in boxes)
        parts.append(WeightPart(name=name, dim=dim, start=boxes[0].offset[dim], length=length, dtype=dtype))
    if len(parts) == 1:
        return tuple(parts), lambda rows: [rows]
    return tuple(parts), partial(rows_of_parts, mapping, arch=arch, shard=shard)
