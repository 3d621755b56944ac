"""Weights under Hugging Face names: reading and writing model directories, and the shards of a rank.

Shards are gathered into whole tensors, or described as parts of them, so that a fingerprint needs no gathering.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from slipstream.learner import parallel
from slipstream.learner.architecture import Architecture
from slipstream.learner.checkpoint.boxes import bands
from slipstream.learner.weights import (
    Layout,
    MappingTable,
    ParameterMapping,
    Shard,
    hf_from_shards,
    mappings,
    rows_of_parts,
)
from slipstream.refit.fingerprint import HeldWeights, WeightPart
from slipstream.storage import replaced_directory, safetensors_files

_MODEL_FILES = ("config.json", "model.safetensors.index.json", "generation_config.json")


@contextlib.contextmanager
def open_weights(path: Path) -> Iterator[Callable[[str], Tensor]]:
    """Open a model directory of one or several files; yields a function that reads a full tensor by name.

    Raises:
        FileNotFoundError: there is no safetensors file; other formats are pickles, and unpickling runs their code.
    """
    with contextlib.ExitStack() as stack:
        by_name = {}
        for file in safetensors_files(path):
            handle = stack.enter_context(safe_open(file, framework="pt"))
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
    """Write config, weights and a copy of the tokenizer's files atomically: after an error `path` is unchanged.

    At most `max_file_bytes` of the weights are in host memory at once.
    """
    with replaced_directory(path) as directory:
        for file in sorted(tokenizer_dir.iterdir()):
            if file.is_file() and file.suffix != ".safetensors" and file.name not in _MODEL_FILES:
                shutil.copy2(file, directory / file.name)
        (directory / "config.json").write_text(json.dumps(config, indent=2))
        _write_weights(directory, weights, max_file_bytes)


def _write_weights(directory: Path, weights: Iterable[tuple[str, Tensor]], max_file_bytes: int) -> None:
    """Write one file if the weights fit, else several and an index; files get their names once all are counted."""
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
    """Group copies in host memory into batches of at most `max_bytes`; a larger tensor is a batch of its own."""
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
    """Describe a rank's Megatron parameters, given by name, as parts of Hugging Face tensors.

    Each element is described once over all ranks: replicated parameters by the first rank that holds them, a tied
    output layer as the embedding.
    """
    for mapping in _answered_for(arch, shard):
        tensor = parameters[mapping.megatron]
        dtype = str(tensor.dtype).removeprefix("torch.")
        parts, split = _layout(mapping, arch, shard, tuple(tensor.shape), dtype)
        yield HeldWeights(tensor=tensor, parts=parts, split=split)


def gathered_weights(
    parameters: Mapping[str, Tensor], arch: Architecture, shard: Shard, *, table: MappingTable = mappings
) -> Iterator[tuple[str, Tensor]]:
    """Gather all tensors of `table`, whole on every rank; collective."""
    given: set[str] = set()
    for stage, holder, mapping in _places(arch, shard, table):
        if given.issuperset(mapping.hf):
            continue  # the last stage's copy of a tied embedding
        given.update(mapping.hf)
        tensors = None
        if stage == shard.pipeline_rank:
            own = parameters[mapping.megatron].detach()
            if mapping.is_expert:
                own = parallel.from_expert_rank(holder, own)
            shards = parallel.tensor_parallel_shards(own)
            tensors = hf_from_shards(mapping, shards, arch)
        yield from parallel.from_pipeline_stage(stage, tensors)


def _places(arch: Architecture, shard: Shard, table: MappingTable) -> Iterator[tuple[int, int, ParameterMapping]]:
    """Every parameter of a table, with the pipeline stage and the expert-parallel rank that hold it."""
    for stage in range(shard.pipeline_size):
        for holder in range(shard.expert_size):
            for mapping in table(arch, replace(shard, pipeline_rank=stage, expert_rank=holder)):
                if holder == 0 or mapping.is_expert:
                    yield stage, holder, mapping


@cache
def _answered_for(arch: Architecture, shard: Shard) -> tuple[ParameterMapping, ...]:
    return tuple(each for each in mappings(arch, shard) if not (shard.is_model_copy(each) or shard.is_copy(each)))


@cache  # every refit asks for the same layouts of hundreds of tensors
def _layout(
    mapping: ParameterMapping, arch: Architecture, shard: Shard, shape: tuple[int, ...], dtype: str
) -> tuple[tuple[WeightPart, ...], Callable[[Tensor], list[Tensor]]]:
    """Parts of a parameter, and a function that splits a tensor of one value a row into those of each part."""
    dim = 1 if mapping.layout is Layout.ROW else 0
    parts = []
    for name in mapping.hf:
        boxes = [band.box for band in bands(mapping, shape, arch, shard) if band.name == name]
        length = sum(box.shape[dim] for box in boxes)
        parts.append(WeightPart(name=name, dim=dim, start=boxes[0].offset[dim], length=length, dtype=dtype))
    return tuple(parts), partial(rows_of_parts, mapping, arch=arch, shard=shard)
