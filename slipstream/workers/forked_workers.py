"""Ray's workers without GPUs, forked from a process that has imported what they import: 8 s less for an engine.

Ray starts `fork_client` in place of a worker's Python. It asks the `Manager`, a thread of the process that runs the
block `forked_workers`, which passes the request and the client's files on to a `fork_server`, and that server forks the
worker, in the namespaces and with the environment of the client. None of our own modules is imported before the fork,
and there is a server for each environment that libraries read while they are imported. It starts with the first worker
that asks, and ends with the block. A process that has set CUDA up cannot be forked, so on hosts with GPUs workers are
started as Ray does.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from slipstream.workers import fork_client, fork_server

DIRECTORY = "SLIPSTREAM_FORKED_WORKERS"
"""Variable with the directory of the sockets."""

HOOK = "RAY_RUNTIME_ENV_HOOK"
"""Variable with the name of a function that Ray calls in whoever connects to it."""

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

FORKING = (DIRECTORY, HOOK)
"""Variables of a driver whose workers are forked."""


def fork_workers(runtime_env: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the runtime environment of a job, with the client in place of its Python. Ray's hook."""
    return {**(runtime_env or {}), "py_executable": shlex.join(client_command(Path(os.environ[DIRECTORY])))}


def client_command(sockets: Path) -> list[str]:
    """Return the command of a client without the script that is to run; the standard library starts in 20 ms."""
    return [sys.executable, "-I", "-S", fork_client.__file__, str(sockets)]


@contextmanager
def forked_workers() -> Iterator[None]:
    """Fork all workers of the local instances of Ray that this process and its children start in the block.

    Nothing changes on a host with NVIDIA GPUs, on a cluster's Ray, and inside another such block.
    """
    if DIRECTORY in os.environ or os.environ.get("RAY_ADDRESS") or Path("/proc/driver/nvidia/gpus").is_dir():
        yield
        return
    with managed() as directory:
        os.environ |= {DIRECTORY: str(directory), HOOK: f"{__name__}.{fork_workers.__name__}"}
        try:
            yield
        finally:
            for name in FORKING:
                del os.environ[name]


def forking_process() -> int | None:
    """Return the process that all forked workers of this one's driver descend from; None: workers are not forked."""
    return int(Path(os.environ[DIRECTORY], "pid").read_text()) if DIRECTORY in os.environ else None


@contextmanager
def managed(modules: Mapping[bool, Sequence[str]] = _MODULES) -> Iterator[Path]:
    """Make a directory where clients are answered for the span of the block."""
    with tempfile.TemporaryDirectory(prefix="slipstream-forked-", dir="/var/tmp") as directory:  # hosts see it too
        manager = Manager(Path(directory), modules)
        Path(directory, "pid").write_text(str(os.getpid()))
        try:
            yield Path(directory)
        finally:
            manager.close()


class Manager:
    """Starts servers and passes requests on to them. A thread answers."""

    def __init__(self, directory: Path, modules: Mapping[bool, Sequence[str]]) -> None:
        """Answer from now on; `modules` are imported for workers that are an engine's, and for those that are not."""
        self._directory, self._modules = directory, modules
        self._servers: dict[str, tuple[subprocess.Popen[bytes], socket.socket]] = {}
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listening.bind(str(directory / "manager"))
        self._listening.listen(64)
        threading.Thread(target=self._answer_all, daemon=True).start()

    def close(self) -> None:
        """End the servers; a worker that still runs ends with its Ray."""
        self._listening.close()
        for server, requests in self._servers.values():
            requests.close()
            server.kill()
            server.wait()

    def _answer_all(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return  # closed
            with connection, suppress(OSError):  # a server that has ended: nobody answers the client
                request, files, _, _ = socket.recv_fds(connection, fork_server.MOST_BYTES, 2)
                with ExitStack() as sent:
                    for file in files:
                        sent.callback(os.close, file)
                    if request:
                        server = self._server(json.loads(request)["environment"])
                        socket.send_fds(server, [request], [*files, connection.fileno()])

    def _server(self, environment: Mapping[str, str]) -> socket.socket:
        """Return the socket to the server for that environment, which is started if there is none."""
        read = {name: value for name, value in environment.items() if name.startswith(_READ) and name not in _NOT_READ}
        key = hashlib.sha256(json.dumps(read, sort_keys=True).encode()).hexdigest()[:12]
        if key not in self._servers:
            self._servers[key] = _start(self._directory / f"{key}.log", read, self._modules[_ENGINE in read])
        return self._servers[key][1]


def _start(log: Path, read: Mapping[str, str], modules: Sequence[str]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    rest = {name: value for name, value in os.environ.items() if not name.startswith((*_READ, *_NOT_READ))}
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # each message is a request
    with theirs, log.open("w") as output:
        server = subprocess.Popen(
            [sys.executable, fork_server.__file__, str(theirs.fileno()), *modules],
            env={**rest, **read, **_ASKED},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[theirs.fileno()],
        )
    return server, ours
