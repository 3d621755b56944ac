"""Where clients learn which server forks their worker. It starts with the first that asks, and ends with the tests."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.forked.client import received

_HERE = Path(__file__).parent
# Not Ray: when it is imported it reads what it tells each worker by environment variables.
_OF_LEARNERS = (
    "transformers.models.qwen3.modeling_qwen3",
    "megatron.core.models.gpt",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "speculators.models.eagle3.core",
)
_OF_ENGINES = (
    "transformers.models.qwen3.modeling_qwen3",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.models.llama_eagle3",
    "vllm.v1.spec_decode.eagle",
    "vllm.v1.worker.cpu_worker",
)
_MODULES = {True: _OF_ENGINES, False: _OF_LEARNERS}
_ENGINE = "VLLM_ENABLE_V1_MULTIPROCESSING"  # in their environment alone
# What libraries read while they are imported.
_READ = ("OMP_", "MKL_", "KMP_", "OPENBLAS_", "VLLM_", "TORCH", "PYTORCH_", "LD_", "CUDA_", "HF_", "TRANSFORMERS_")
_READ += ("TOKENIZERS_", "ATEN_", "ONEDNN_", "DNNL_", "GLOO_", "NCCL_", "PYTHON", "LANG", "LC_")
# Whoever asks torch for CUDA while it is imported must not set it up: a process forked from one that did has none.
_ASKED = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
_NOT_READ = ("PYTHONPATH", "TORCHINDUCTOR_CACHE_DIR")  # the worker's own counts, or it is read later


@contextmanager
def managed(modules: Mapping[bool, Sequence[str]] = _MODULES) -> Iterator[Path]:
    """A directory where clients are answered for the span of the block."""
    with tempfile.TemporaryDirectory(prefix="slipstream-forked-", dir="/var/tmp") as directory:  # hosts see it too
        manager = Manager(Path(directory), modules)
        try:
            yield Path(directory)
        finally:
            manager.close()


class Manager:
    """Starts servers and says where they listen. A thread answers."""

    def __init__(self, directory: Path, modules: Mapping[bool, Sequence[str]] = _MODULES) -> None:
        """`modules` are imported for those that are an engine's and for those that are not."""
        self._directory, self._modules = directory, modules
        self._servers: dict[str, subprocess.Popen[bytes]] = {}
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(str(directory / "manager"))
        self._listening.listen(64)
        threading.Thread(target=self._answer_all, daemon=True).start()

    def close(self) -> None:
        """End the servers; a worker that still runs ends with its Ray."""
        self._listening.close()
        for server in self._servers.values():
            server.kill()
            server.wait()

    def _answer_all(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return  # closed
            path = self._server(json.loads(received(connection))["environment"])
            threading.Thread(target=self._answer, args=(connection, path), daemon=True).start()

    def _server(self, environment: Mapping[str, str]) -> Path:
        """The socket of the server for workers of that environment; this thread starts it, and it ends with it."""
        read = {name: value for name, value in sorted(environment.items()) if _is_read(name)}
        path = self._directory / hashlib.sha256(json.dumps(read).encode()).hexdigest()[:12]
        if path.name not in self._servers:
            self._servers[path.name] = _start(path, read, self._modules[_ENGINE in read])
        return path

    def _answer(self, connection: socket.socket, path: Path) -> None:
        """Name the socket as soon as the server listens; nothing if it ended."""
        with connection:
            while not path.exists() and self._servers[path.name].poll() is None:
                time.sleep(0.02)
            with suppress(BrokenPipeError):  # a Ray that gave its worker up does not wait for the name
                connection.sendall(str(path).encode())


def _start(path: Path, read: Mapping[str, str], modules: Sequence[str]) -> subprocess.Popen[bytes]:
    rest = {name: value for name, value in os.environ.items() if not name.startswith((*_READ, *_NOT_READ))}
    with path.with_suffix(".log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, str(_HERE / "server.py"), str(path), *modules],
            env={**rest, **read, **_ASKED},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def _is_read(name: str) -> bool:
    return name.startswith(_READ) and name not in _NOT_READ
