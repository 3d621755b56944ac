"""Model directories in Hugging Face format: safetensors in, safetensors out."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from slipstream.config import require
from slipstream.learner.directories import replaced_directory

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
