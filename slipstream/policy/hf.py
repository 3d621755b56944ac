"""Model directories in Hugging Face format: safetensors in, safetensors out."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from slipstream.config import require
from slipstream.policy.directories import replaced_directory

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


def save_model(path: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor], tokenizer_dir: Path) -> None:
    """Write config, weights and a copy of the tokenizer's files, atomically: `path` is whole or as it was before."""
    with replaced_directory(path) as directory:
        for file in sorted(tokenizer_dir.iterdir()):
            if file.is_file() and file.suffix != ".safetensors" and file.name not in _MODEL_FILES:
                shutil.copy2(file, directory / file.name)
        (directory / "config.json").write_text(json.dumps(config, indent=2))
        tensors = {name: tensor.contiguous() for name, tensor in weights.items()}
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
