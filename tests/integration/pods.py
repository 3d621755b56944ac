"""Tasks as a cluster runs them: a process each from `pyflyte-execute`, an S3 server between them, small /dev/shm.

`Cluster.execute` walks a compiled workflow as Flyte's propeller does: it resolves each node's bindings, runs its task
in a pod, and uses another attempt where the error document, or its absence, says so.

A pod's process is forked from a server that has imported the packages which tasks import, 10 s each time else. None of
our modules is imported before the fork, and none here: each is read under the pod's own environment, as in a container.
"""

from __future__ import annotations

import ctypes
import getpass
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.forked.processes import environment_of, fork_server

REPOSITORY = Path(__file__).resolve().parents[2]
_BUCKET = "flyte"
_START = "start-node"  # whose outputs are the workflow's inputs
_MAX_LOST = 3  # pods of a node that the propeller replaces beside the task's own retries: its default
_LOST = "LOST"
_OFTEN_S = 0.02
_CLONE_NEWNS = 0x00020000  # of sched.h


@dataclass(frozen=True, kw_only=True)
class Pod:
    command: tuple[str, ...]  # pyflyte-execute and its arguments
    working: Path
    log: Path
    environment: Mapping[str, str]
    has_small_shm: bool  # 64 MiB, as a container has unless it asks for more; takes root


@dataclass(frozen=True, kw_only=True)
class Running:
    pod: Pod
    process: BaseProcess

    @classmethod
    def start(cls, pod: Pod) -> Running:
        pod.log.touch()  # a watcher may read it before the pod writes
        process = fork_server().Process(target=_execute, args=(pod,), daemon=True)
        process.start()
        return cls(pod=pod, process=process)

    def wait_until(self, is_so: Callable[[], bool], *, every_s: float = _OFTEN_S) -> bool:
        """Wait for something to happen; False if the pod ended before."""
        while self.process.is_alive():
            if is_so():
                return True
            time.sleep(every_s)
        return False

    def says(self, text: str) -> bool:
        return text in self.pod.log.read_text()

    def kill(self) -> None:
        """End it as a node does that goes away: it writes no last word."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)


def ray_processes(title: str, *, of: Running) -> list[int]:
    """A pod's processes of Ray that call themselves `title`, as in `EngineProcess.generate` while that method runs."""
    mark = str(of.pod.working).encode()
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if says(int(path.name), title) and mark in environment_of(path):
                found.append(int(path.name))
        except OSError:
            continue  # it ended meanwhile
    return found


def says(pid: int, title: str) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(f"ray::{title}".encode())
    except OSError:
        return False


def _execute(pod: Pod) -> None:
    assert not {"slipstream", "tasks"} & sys.modules.keys(), "a pod imports our modules itself"
    with pod.log.open("w") as log:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(log.fileno(), stream.fileno())
    os.chdir(pod.working)
    os.environ.clear()
    os.environ.update(pod.environment)
    tempfile.tempdir = None  # read from the environment again
    if pod.has_small_shm:
        _small_shm()
    from flytekit.bin.entrypoint import execute_task_cmd

    sys.path[:0] = pod.environment["PYTHONPATH"].split(os.pathsep)
    sys.argv = list(pod.command)
    execute_task_cmd()


def _small_shm() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    for command in (["--make-rprivate", "/"], ["-t", "tmpfs", "-o", "size=64m", "shm", "/dev/shm"]):
        subprocess.run(["mount", *command], check=True)


Watcher = Callable[[Running], None]
"""Is told of a pod as soon as it runs, and may kill it or what it started."""


class TaskFailed(Exception):  # noqa: N818  # a task did, not this
    """A task of a workflow failed for good."""


@dataclass(frozen=True)
class Attempt:
    execution: str
    node: str
    number: int
    kind: str  # "", "RECOVERABLE", "NON_RECOVERABLE", or "LOST" without any document
    message: str
    log: str


@dataclass
class Cluster:
    """A cluster that runs pods, and a record of their attempts."""

    client: Any  # boto3's, of the S3 server
    endpoint: str
    directory: Path  # empty: working directories and logs of pods go there
    execution: str
    environment: dict[str, str] = field(default_factory=dict)
    ray_address: str = ""  # of a Ray that outlives the pods; empty: each starts its own
    own_ray: frozenset[str] = frozenset()  # nodes whose pods start their own all the same
    num_at_once: int = 2  # pods; each starts on one core, for as long as it works
    attempts: list[Attempt] = field(default_factory=list)

    def execute(self, workflow: Any, inputs: Mapping[str, Any], *, last: str = "") -> dict[str, dict[str, Any]]:
        """Run each node of `workflow` as soon as its inputs are there; outputs as literals, by node and name.

        Args:
            last: the node to stop after, in the order in which they are written; empty runs all.
        Raises:
            TaskFailed: a task failed, and no attempt is left.
        """
        from flytekit.core.context_manager import FlyteContextManager
        from flytekit.core.type_engine import TypeEngine

        context = FlyteContextManager.current_context()
        known = workflow.python_interface.inputs_with_defaults
        given = {name: inputs.get(name, default) for name, (_, default) in known.items()}
        types = {name: kind for name, (kind, _) in known.items()}
        return self._walk(workflow, dict(TypeEngine.dict_to_literal_map(context, given, types).literals), "", last)

    def _walk(self, workflow: Any, given: dict[str, Any], prefix: str, last: str) -> dict[str, dict[str, Any]]:
        """Run the nodes of a workflow, nested ones in turn; outputs of all nodes, by the id that names their pods."""
        literals, found = {_START: given}, {}
        ids = [node.id for node in workflow.nodes]
        own = last.partition("-0-")[0]
        waiting = workflow.nodes[: ids.index(own) + 1] if last else list(workflow.nodes)
        running: dict[Future[dict[str, Any]], str] = {}
        with ThreadPoolExecutor(self.num_at_once) as pool:
            while waiting or running:
                for node in [node for node in waiting if _is_ready(node, literals)]:
                    waiting.remove(node)
                    bound = {binding.var: _resolved(binding.binding, literals) for binding in node.bindings}
                    if hasattr(node.flyte_entity, "output_bindings"):  # a nested workflow
                        inside = last.partition("-0-")[2] if node.id == own else ""
                        name = f"{prefix}{node.id}-0-"
                        found |= self._walk(node.flyte_entity, bound, name, inside)
                        literals[node.id] = {} if inside else _outputs(node.flyte_entity, found, name)
                    else:
                        name = prefix + node.id
                        running[pool.submit(self.run, node.flyte_entity, bound, node=name)] = node.id
                for done in wait(running, return_when=FIRST_COMPLETED).done if running else ():
                    id_ = running.pop(done)
                    literals[id_] = found[prefix + id_] = done.result()
        return found

    def run(
        self, task: Any, inputs: Mapping[str, Any], *, node: str, watchers: Sequence[Watcher] = ()
    ) -> dict[str, Any]:
        """Run one task with all attempts that it has; its outputs as literals.

        Args:
            watchers: what is done while the first, second, ... attempt runs.
        """
        from flyteidl.core.literals_pb2 import LiteralMap as Proto
        from flytekit.models.literals import LiteralMap

        prefix = f"metadata/{self.execution}/{node}"
        self._write(f"{prefix}/data/inputs.pb", LiteralMap(dict(inputs)).to_flyte_idl().SerializeToString())
        num_left = {_LOST: _MAX_LOST, "RECOVERABLE": task.metadata.retries, "NON_RECOVERABLE": 0}
        for number in itertools.count():
            attempt = self._attempt(task, node, number, watchers[number] if number < len(watchers) else None)
            self.attempts.append(attempt)
            if not attempt.kind:
                written = self._read(f"{prefix}/data/{number}/outputs.pb")
                return dict(LiteralMap.from_flyte_idl(Proto.FromString(written)).literals)
            if not num_left[attempt.kind]:
                raise TaskFailed(f"{node}: {attempt.kind}: {attempt.message or attempt.log[-3000:]}")
            num_left[attempt.kind] -= 1
        raise AssertionError("the last attempt returns or raises")

    def uploaded_bytes(self, node: str) -> int:
        """Count the bytes that the pods of a node have put into the object store."""
        return sum(self._sizes(f"raw/{node}/").values())

    def fetched(self, literal: Any) -> dict[str, bytes]:
        """The files of a directory that a task handed on, by name; also of one that might have been None."""
        literal = literal.scalar.union.value if literal.scalar.union else literal
        prefix = literal.scalar.blob.uri.removeprefix(f"s3://{_BUCKET}/") + "/"
        return {key.removeprefix(prefix): self._read(key) for key in self._sizes(prefix)}

    def _sizes(self, prefix: str) -> dict[str, int]:
        """Bytes of the objects whose keys begin so."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=_BUCKET, Prefix=prefix)
        return {item["Key"]: item["Size"] for page in pages for item in page.get("Contents", [])}

    def _attempt(self, task: Any, node: str, number: int, watcher: Watcher | None) -> Attempt:
        from flyteidl.core.errors_pb2 import ErrorDocument

        prefix = f"metadata/{self.execution}/{node}/data/{number}"
        environment = {} if node in self.own_ray or not self.ray_address else {"RAY_ADDRESS": self.ray_address}
        command = _command(task, node, number, self.execution)
        status, log = self._pod(command, task, f"{node}-{number}", environment, watcher)
        kind, message = _LOST, f"exit status {status}"
        names = self._sizes(prefix)
        if f"{prefix}/outputs.pb" in names:
            kind, message = "", ""
        elif f"{prefix}/error.pb" in names:
            error = ErrorDocument.FromString(self._read(f"{prefix}/error.pb")).error
            kind, message = type(error).Kind.Name(error.kind), error.message
        return Attempt(self.execution, node, number, kind, message, log)

    def _pod(
        self, command: Sequence[str], task: Any, name: str, environment: dict[str, str], watcher: Watcher | None
    ) -> tuple[int | None, str]:
        working = self.directory / self.execution / name
        working.mkdir(parents=True)
        scratch = tempfile.mkdtemp(prefix="pod", dir="/tmp")  # short: sockets lie in it
        pod = Pod(
            command=tuple(command),
            working=working,
            log=working.parent / f"{name}.log",
            environment=self._environment(task, working) | environment | {"TMPDIR": scratch},
            has_small_shm=os.geteuid() == 0 and not environment,  # Ray's processes are not the pod's otherwise
        )
        try:
            running = Running.start(pod)
            if watcher is not None:
                watcher(running)
            running.process.join()
            return running.process.exitcode, pod.log.read_text()
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _environment(self, task: Any, working: Path) -> dict[str, str]:
        module, _, task_name = task.name.rpartition(".")
        identity = {"PROJECT": "p", "DOMAIN": "d", "NAME": f"{module}.{task_name}", "VERSION": "v"}
        return {
            **os.environ,
            **{f"FLYTE_INTERNAL_TASK_{part}": value for part, value in identity.items()},
            "FLYTE_INTERNAL_EXECUTION_PROJECT": "p",
            "FLYTE_INTERNAL_EXECUTION_DOMAIN": "d",
            "FLYTE_INTERNAL_EXECUTION_ID": self.execution,
            "FLYTE_AWS_ENDPOINT": self.endpoint,
            "FLYTE_AWS_ACCESS_KEY_ID": "key",
            "FLYTE_AWS_SECRET_ACCESS_KEY": "secret",
            # Else each pod would have torch compile what vLLM samples with, for 20 s.
            "TORCHINDUCTOR_CACHE_DIR": str(Path("/tmp") / f"torchinductor_{getpass.getuser()}"),
            # With the working directory, as every process that the pod starts has it too, and is known by it.
            "PYTHONPATH": os.pathsep.join(filter(None, (str(REPOSITORY), str(working), os.environ.get("PYTHONPATH")))),
            **self.environment,
        }

    def _write(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=_BUCKET, Key=key, Body=data)

    def _read(self, key: str) -> bytes:
        return self.client.get_object(Bucket=_BUCKET, Key=key)["Body"].read()


@contextmanager
def cluster(directory: Path, execution: str) -> Iterator[Cluster]:
    """An S3 server with an empty bucket, and a cluster that uses it."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        endpoint = "http://{}:{}".format(*server.get_host_and_port())
        keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
        # All servers of a process share their buckets: what another test left would pass for this one's outputs.
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/moto-api/reset", method="POST"), timeout=30).close()
        client = boto3.client("s3", endpoint_url=endpoint, **keys)
        client.create_bucket(Bucket=_BUCKET)
        yield Cluster(client=client, endpoint=endpoint, directory=directory, execution=execution)
    finally:
        server.stop()


def _command(task: Any, node: str, number: int, execution: str) -> list[str]:
    """The container's command as it is registered, with what the propeller puts into it."""
    from flytekit.configuration import Image, ImageConfig, SerializationSettings

    image = Image(name="default", fqn="slipstream", tag="test")
    settings = SerializationSettings(ImageConfig(default_image=image, images=[image]), "p", "d", "v")
    data = f"s3://{_BUCKET}/metadata/{execution}/{node}/data"
    values = {
        "{{.input}}": f"{data}/inputs.pb",
        "{{.outputPrefix}}": f"{data}/{number}",
        "{{.rawOutputDataPrefix}}": f"s3://{_BUCKET}/raw/{node}/{number}",
        "{{.checkpointOutputPrefix}}": f"s3://{_BUCKET}/checkpoints/{node}/{number}",
        "{{.prevCheckpointPrefix}}": "",
    }
    words: list[str] = task.get_default_command(settings)
    assert words[0] == "pyflyte-execute"
    return [values.get(word, word) for word in words]


def _is_ready(node: Any, literals: Mapping[str, Any]) -> bool:
    return all(upstream.id in literals for upstream in node.upstream_nodes)


def _outputs(workflow: Any, found: Mapping[str, Mapping[str, Any]], prefix: str) -> dict[str, Any]:
    """Outputs of a nested workflow whose nodes have run."""
    inner = {name.removeprefix(prefix): outputs for name, outputs in found.items() if name.startswith(prefix)}
    return {binding.var: _resolved(binding.binding, inner) for binding in workflow.output_bindings}


def _resolved(binding: Any, literals: Mapping[str, Mapping[str, Any]]) -> Any:
    """The literal that a node's input is bound to."""
    from flytekit.models.literals import Literal, LiteralCollection

    if binding.promise is not None:
        literal = literals[binding.promise.node_id or _START][binding.promise.var]
        for attribute in binding.promise.attr_path:
            literal = literal.collection.literals[attribute]
        return literal
    if binding.collection is not None:
        return Literal(
            collection=LiteralCollection([_resolved(item, literals) for item in binding.collection.bindings])
        )
    return Literal(scalar=binding.scalar)
