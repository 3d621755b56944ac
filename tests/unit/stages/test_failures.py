"""Each class of failure, made as it is raised, and whether another attempt may outlive it."""

import errno
import importlib
import re
import resource
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.config import ConfigError
from slipstream.learner.checkpoint import CheckpointError, CheckpointStorageError, CheckpointWriteError
from slipstream.records.files import write_atomic
from slipstream.refit.config import ChannelBrokeError, RefitError
from slipstream.stages.certify_losslessness import LosslessnessError
from slipstream.stages.failures import EXPLAINED, HUB, PERMANENT, TRANSIENT, explained, transient
from slipstream.tracking.mlflow_store import TrackingError
from slipstream.workers.calls import LostWorkerError


def _made(name: str, *arguments: Any, **more: Any) -> Callable[[], BaseException]:
    """An exception of a package that is imported when it is made."""
    module, _, kind = name.rpartition(".")
    return lambda: vars(importlib.import_module(module))[kind](*arguments, **more)


def _client_error(code: str) -> Callable[[], BaseException]:
    return _made("botocore.exceptions.ClientError", {"Error": {"Code": code, "Message": "?"}}, "GetObject")


def _hub_error(status: int) -> Callable[[], BaseException]:
    from httpx2 import Request, Response

    return _made("huggingface_hub.errors.HfHubHTTPError", "?", response=Response(status, request=Request("GET", "h")))


def _raised_from(cause: Callable[[], BaseException], make: Callable[[], BaseException]) -> Callable[[], BaseException]:
    def made() -> BaseException:
        error = make()
        error.__cause__ = cause()
        return error

    return made


def _told_of_a_field(cause: Callable[[], BaseException]) -> Callable[[], BaseException]:
    """As `learner.policy_source.locate` and `data.sources.read_rows` tell it."""
    return _raised_from(cause, lambda: ConfigError("policy.model must be a local directory or a reachable hub id"))


def _unreached(why: str) -> Callable[[], BaseException]:
    return lambda: ConnectionError(f"Couldn't reach 'openai/gsm8k' on the Hub ({why})")


_DIST = "torch.distributed"
_DOWNLOAD = _made("flytekit.exceptions.system.FlyteDownloadDataException", "s3://bucket/policy")
_COMES_AGAIN_OR_NOT: dict[str, tuple[Callable[[], BaseException], bool]] = {
    "engine died": (lambda: LostWorkerError("engine 0 died during generate", []), True),
    "actor died": (_made("ray.exceptions.ActorDiedError"), True),
    "node died": (_made("ray.exceptions.NodeDiedError", "10.0.0.2"), True),
    "channel left by another": (lambda: ChannelBrokeError("the sender is gone"), True),
    "nccl, as torch's class": (_made(f"{_DIST}.DistBackendError", "NCCL error: unhandled system error"), True),
    "nccl, as text": (lambda: RuntimeError("ncclRemoteError: A call failed possibly due to a network error"), True),
    "nccl, misused": (_made(f"{_DIST}.DistBackendError", "NCCL error in x.cpp:9, invalid usage"), False),
    "gloo": (lambda: RuntimeError("[/pt/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed"), True),
    "rendezvous": (_made(f"{_DIST}.DistNetworkError", "failed to connect to 10.0.0.2:2300"), True),
    "tracking": (lambda: TrackingError("tracking server http://mlflow: timed out"), True),
    "stale file handle": (lambda: OSError(errno.ESTALE, "Stale file handle"), True),
    "input/output error": (lambda: OSError(errno.EIO, "Input/output error"), True),
    "connection reset": (lambda: ConnectionResetError(errno.ECONNRESET, "reset"), True),
    "time-out": (lambda: TimeoutError(errno.ETIMEDOUT, "timed out"), True),
    "store not reached": (_made("botocore.exceptions.EndpointConnectionError", endpoint_url="http://store"), True),
    "store busy": (_client_error("SlowDown"), True),
    "download failed": (_DOWNLOAD, True),
    "hub not reached": (_made("httpx2.ConnectError", "name resolution"), True),
    "hub broke off": (_made("requests.exceptions.ChunkedEncodingError", "IncompleteRead"), True),
    "hub not reached, as the cache says": (_made("huggingface_hub.errors.LocalEntryNotFoundError", "no file"), True),
    "hub busy": (_hub_error(503), True),
    "hub asks to wait": (_hub_error(429), True),
    "hub refuses": (_hub_error(403), False),
    "hub not to be asked": (_made("huggingface_hub.errors.OfflineModeIsEnabled", "HF_HUB_OFFLINE"), False),
    "hub not reached, as transformers says": (lambda: OSError("We couldn't connect to 'https://huggingface.co'"), True),
    "model not sent": (_told_of_a_field(_made("huggingface_hub.errors.LocalEntryNotFoundError", "no file")), True),
    "data not sent": (_told_of_a_field(_unreached("LocalEntryNotFoundError")), True),
    "data not to be asked for": (_told_of_a_field(_unreached("OfflineModeIsEnabled")), False),
    "no such model": (_told_of_a_field(_hub_error(404)), False),
    "no such file": (_told_of_a_field(lambda: FileNotFoundError(errno.ENOENT, "a.jsonl")), False),
    "no name": (lambda: socket.gaierror(-3, "Temporary failure in name resolution"), True),
    "store refuses": (_client_error("AccessDenied"), False),
    "disk full": (lambda: OSError(errno.ENOSPC, "No space left on device"), False),
    "disk full, as flytekit says": (_raised_from(lambda: OSError(errno.ENOSPC, "No space left"), _DOWNLOAD), False),
    "file missing": (lambda: FileNotFoundError(errno.ENOENT, "arm.json"), False),
    "recipe": (lambda: ConfigError("grpo.group_size must be >= 2, got 1"), False),
    "checkpoint of another recipe": (lambda: CheckpointError("of another run"), False),
    "checkpoints not shared": (lambda: CheckpointStorageError(errno.EIO, "not on shared storage"), False),
    "checkpoint not written": (lambda: CheckpointWriteError(errno.EIO, "could not be written"), False),
    "refit gate": (lambda: RefitError("2 of 300 tensors differ"), False),
    "a bug": (lambda: AttributeError("no such"), False),
}


@pytest.mark.parametrize("name", _COMES_AGAIN_OR_NOT)
def test_a_failure_is_transient_or_not(name: str) -> None:
    make, expected = _COMES_AGAIN_OR_NOT[name]
    assert (transient(make()) is not None) is expected


def test_data_that_the_hub_did_not_send_waits_as_a_model_does() -> None:
    assert transient(_told_of_a_field(_unreached("LocalEntryNotFoundError"))()) == HUB


def test_a_full_disk_says_how_much_is_free_and_where(tmp_path: Path) -> None:
    error = RuntimeError("the download failed")
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "absent" / "model.safetensors"))
    assert transient(error) is None
    said = explained(error)
    assert said is not None
    assert re.search(rf"disk of {tmp_path} must have room for \S+safetensors, got [\d.]+ GiB free of [\d.]+ GiB", said)
    rust = Exception("Error while serializing: I/O error: No space left on device (os error 28)")  # safetensors'
    rust.__cause__ = ConnectionError("flytekit says so of any error")
    assert transient(rust) is None
    assert "got Error while serializing" in (explained(rust) or "")  # of a disk that nobody named, no figure


def test_a_record_that_has_no_room_is_named(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match=re.escape(str(tmp_path / "run.json"))):
            write_atomic(tmp_path / "run.json", b"0" * 8192)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_a_users_error_and_a_verdict_need_no_traceback_and_a_bug_does() -> None:
    assert explained(ConfigError("grpo.group_size must be >= 2, got 1")) == "grpo.group_size must be >= 2, got 1"
    assert explained(LosslessnessError("the run is biased")) == "the run is biased"
    assert explained(AttributeError("no such")) is None


def test_an_actor_whose_constructor_raised_would_do_so_again() -> None:
    from ray.exceptions import ActorDiedError, RayTaskError

    raised = RayTaskError("Engine.__init__", "Traceback: no such model", ValueError("no such model"))
    assert transient(ActorDiedError(raised)) is None


def test_what_a_transient_failure_caused_is_transient_unless_there_is_a_refusal_too() -> None:
    error, lost = RuntimeError("the step failed"), LostWorkerError("engine 0 died", [])
    error.__cause__ = lost
    assert transient(error) == "a process of the run was lost"
    lost.__cause__ = CheckpointError("of another recipe")
    assert transient(lost) is None
    refusal = RefitError("tensors differ")
    refusal.__context__ = LostWorkerError("engine 0 died", [])  # it was handled when the other was raised
    assert transient(refusal) is None


@pytest.mark.parametrize("name", sorted({*PERMANENT, *EXPLAINED, *TRANSIENT}))
def test_every_class_named_is_there_under_that_name(name: str) -> None:
    module, _, kind = name.rpartition(".")
    found = vars(importlib.import_module(module))[kind]
    assert f"{found.__module__}.{found.__qualname__}" == name
