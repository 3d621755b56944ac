"""Tasks as a cluster runs them: a process each from `pyflyte-execute`, an S3 server between them, small /dev/shm.

`Cluster.execute` walks a compiled workflow as Flyte's propeller does: it resolves each node's bindings, runs its task
in a pod, and uses another attempt where the error document, or its absence, says so.
"""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
_BUCKET = "flyte"
_START = "start-node"  # whose outputs are the workflow's inputs
_SMALL_SHM = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=64m shm /dev/shm && exec "$@"', "sh")


class TaskFailed(Exception):  # noqa: N818  # a task did, not this
    """A task of a workflow failed for good."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One pod."""

    node: str
    number: int
    kind: str  # "", "RECOVERABLE", "NON_RECOVERABLE", or "LOST" without any document
    message: str
    log: str
    elapsed_s: float


@dataclass
class Cluster:
    """Where pods run, and what they did."""

    client: Any  # boto3's, of the S3 server
    endpoint: str
    directory: Path  # empty: working directories and logs of pods go there
    execution: str
    environment: dict[str, str] = field(default_factory=dict)
    attempts: list[Attempt] = field(default_factory=list)

    def execute(self, workflow: Any, inputs: Mapping[str, Any], *, last: str = "") -> dict[str, dict[str, Any]]:
        """Run the nodes of `workflow`, one after the other; outputs of each node as literals, by node and name.

        Args:
            last: the node to stop after; empty runs all.
        Raises:
            TaskFailed: a task failed, and no attempt is left.
        """
        from flytekit.core.context_manager import FlyteContextManager
        from flytekit.core.type_engine import TypeEngine

        context = FlyteContextManager.current_context()
        known = workflow.python_interface.inputs_with_defaults
        given = {name: inputs.get(name, default) for name, (_, default) in known.items()}
        types = {name: kind for name, (kind, _) in known.items()}
        literals = {_START: dict(TypeEngine.dict_to_literal_map(context, given, types).literals)}
        for node in workflow.nodes:
            bound = {binding.var: _resolved(binding.binding, literals) for binding in node.bindings}
            literals[node.id] = self.run(node.flyte_entity, bound, node=node.id)
            if node.id == last:
                break
        return literals

    def run(self, task: Any, inputs: Mapping[str, Any], *, node: str) -> dict[str, Any]:
        """Run one task with all attempts that it has; its outputs as literals."""
        from flyteidl.core.literals_pb2 import LiteralMap as Proto
        from flytekit.models.literals import LiteralMap

        prefix = f"metadata/{self.execution}/{node}"
        self._write(f"{prefix}/data/inputs.pb", LiteralMap(dict(inputs)).to_flyte_idl().SerializeToString())
        for number in range(task.metadata.retries + 1):
            attempt = self._attempt(task, node, number)
            self.attempts.append(attempt)
            if not attempt.kind:
                written = self._read(f"{prefix}/data/{number}/outputs.pb")
                return dict(LiteralMap.from_flyte_idl(Proto.FromString(written)).literals)
            if attempt.kind == "NON_RECOVERABLE":
                break
        last = self.attempts[-1]
        raise TaskFailed(f"{node}: {last.kind}: {last.message or last.log[-3000:]}")

    def uploaded_bytes(self, node: str) -> int:
        """What the pods of a node have put into the object store."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=_BUCKET, Prefix=f"raw/{node}/")
        return sum(item["Size"] for page in pages for item in page.get("Contents", []))

    def fetched(self, literal: Any) -> dict[str, bytes]:
        """The files of a directory that a task handed on, by name."""
        prefix = literal.scalar.blob.uri.removeprefix(f"s3://{_BUCKET}/") + "/"
        found = self.client.list_objects_v2(Bucket=_BUCKET, Prefix=prefix).get("Contents", [])
        return {item["Key"].removeprefix(prefix): self._read(item["Key"]) for item in found}

    def _attempt(self, task: Any, node: str, number: int) -> Attempt:
        from flyteidl.core.errors_pb2 import ErrorDocument

        prefix = f"metadata/{self.execution}/{node}/data/{number}"
        start_s = time.perf_counter()
        status, log = self._pod(_command(task, node, number, self.execution), task, f"{node}-{number}")
        elapsed_s = time.perf_counter() - start_s
        kind, message = "LOST", f"exit status {status}"
        names = {item["Key"] for item in self.client.list_objects_v2(Bucket=_BUCKET, Prefix=prefix).get("Contents", [])}
        if f"{prefix}/outputs.pb" in names:
            kind, message = "", ""
        elif f"{prefix}/error.pb" in names:
            error = ErrorDocument.FromString(self._read(f"{prefix}/error.pb")).error
            kind, message = type(error).Kind.Name(error.kind), error.message
        return Attempt(node=node, number=number, kind=kind, message=message, log=log, elapsed_s=elapsed_s)

    def _pod(self, command: list[str], task: Any, name: str) -> tuple[int, str]:
        """Run a container's command; its exit status and what it wrote."""
        working = self.directory / self.execution / name
        working.mkdir(parents=True)
        scratch = tempfile.mkdtemp(prefix="pod", dir="/tmp")  # short: sockets lie in it
        module, _, task_name = task.name.rpartition(".")
        identity = {"PROJECT": "p", "DOMAIN": "d", "NAME": f"{module}.{task_name}", "VERSION": "v"}
        environment = {
            **os.environ,
            **{f"FLYTE_INTERNAL_TASK_{part}": value for part, value in identity.items()},
            "FLYTE_INTERNAL_EXECUTION_PROJECT": "p",
            "FLYTE_INTERNAL_EXECUTION_DOMAIN": "d",
            "FLYTE_INTERNAL_EXECUTION_ID": self.execution,
            "FLYTE_AWS_ENDPOINT": self.endpoint,
            "FLYTE_AWS_ACCESS_KEY_ID": "key",
            "FLYTE_AWS_SECRET_ACCESS_KEY": "secret",
            "TMPDIR": scratch,
            # Else each pod would have torch compile what vLLM samples with, for 20 s.
            "TORCHINDUCTOR_CACHE_DIR": str(Path("/tmp") / f"torchinductor_{getpass.getuser()}"),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH")))),
            **self.environment,
        }
        isolated = _SMALL_SHM if os.geteuid() == 0 else ()
        try:
            with (working.parent / f"{name}.log").open("w+") as log:
                done = subprocess.run(
                    [*isolated, *command],
                    cwd=working,
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    check=False,
                )
                log.seek(0)
                return done.returncode, log.read()
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

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
    program, *arguments = [values.get(word, word) for word in words]
    return [str(Path(sys.executable).with_name(program)), *arguments]


def _resolved(binding: Any, literals: Mapping[str, Mapping[str, Any]]) -> Any:
    """The literal that a node's input is bound to."""
    from flytekit.models.literals import Literal, LiteralCollection

    if binding.promise is not None:
        return literals[binding.promise.node_id or _START][binding.promise.var]
    if binding.collection is not None:
        return Literal(
            collection=LiteralCollection([_resolved(item, literals) for item in binding.collection.bindings])
        )
    return Literal(scalar=binding.scalar)
