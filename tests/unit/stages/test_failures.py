"""Each class of failure, made as it is raised, and whether another attempt may outlive it."""

from __future__ import annotations

import errno
import importlib
from collections.abc import Callable

import pytest

from slipstream.config import ConfigError
from slipstream.learner.checkpoint import CheckpointError, CheckpointStorageError, CheckpointWriteError
from slipstream.refit.config import ChannelBrokeError, RefitError
from slipstream.stages.certify_losslessness import LosslessnessError
from slipstream.stages.failures import PERMANENT, TRANSIENT, transient
from slipstream.tracking.mlflow_store import TrackingError
from slipstream.train.acceptance_guard import AcceptanceCollapse
from slipstream.workers.calls import LostWorkerError


def _client_error(code: str) -> Exception:
    from botocore.exceptions import ClientError

    return ClientError({"Error": {"Code": code, "Message": "?"}}, "GetObject")


def _endpoint_error() -> Exception:
    from botocore.exceptions import EndpointConnectionError

    return EndpointConnectionError(endpoint_url="http://store")


def _download_error() -> Exception:
    from flytekit.exceptions.system import FlyteDownloadDataException

    return FlyteDownloadDataException("s3://bucket/policy")


def _actor_died() -> Exception:
    from ray.exceptions import ActorDiedError

    return ActorDiedError()


def _node_died() -> Exception:
    from ray.exceptions import NodeDiedError

    return NodeDiedError("10.0.0.2")


def _dist(name: str, message: str) -> Exception:
    from torch import distributed

    return vars(distributed)[name](message)


_COMES_AGAIN_OR_NOT: dict[str, tuple[Callable[[], BaseException], bool]] = {
    "engine died": (lambda: LostWorkerError("engine 0 died during generate", []), True),
    "actor died": (_actor_died, True),
    "node died": (_node_died, True),
    "channel left by another": (lambda: ChannelBrokeError("the sender is gone"), True),
    "nccl, as torch's class": (lambda: _dist("DistBackendError", "NCCL error: unhandled system error"), True),
    "nccl, as text": (lambda: RuntimeError("ncclRemoteError: A call failed possibly due to a network error"), True),
    "nccl, misused": (lambda: _dist("DistBackendError", "NCCL error in x.cpp:9, invalid usage"), False),
    "gloo": (lambda: RuntimeError("[/pt/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed"), True),
    "rendezvous": (lambda: _dist("DistNetworkError", "failed to connect to 10.0.0.2:2300"), True),
    "tracking": (lambda: TrackingError("tracking server http://mlflow: timed out"), True),
    "stale file handle": (lambda: OSError(errno.ESTALE, "Stale file handle"), True),
    "input/output error": (lambda: OSError(errno.EIO, "Input/output error"), True),
    "connection reset": (lambda: ConnectionResetError(errno.ECONNRESET, "reset"), True),
    "time-out": (lambda: TimeoutError(errno.ETIMEDOUT, "timed out"), True),
    "store not reached": (_endpoint_error, True),
    "store busy": (lambda: _client_error("SlowDown"), True),
    "download failed": (_download_error, True),
    "store refuses": (lambda: _client_error("AccessDenied"), False),
    "object missing": (lambda: _client_error("NoSuchKey"), False),
    "disk full": (lambda: OSError(errno.ENOSPC, "No space left on device"), False),
    "file missing": (lambda: FileNotFoundError(errno.ENOENT, "arm.json"), False),
    "recipe": (lambda: ConfigError("grpo.group_size must be >= 2, got 1"), False),
    "checkpoint of another recipe": (lambda: CheckpointError("of another run"), False),
    "checkpoints not shared": (lambda: CheckpointStorageError(errno.EIO, "not on shared storage"), False),
    "checkpoint not written": (lambda: CheckpointWriteError(errno.EIO, "could not be written"), False),
    "refit gate": (lambda: RefitError("2 of 300 tensors differ"), False),
    "acceptance collapsed": (lambda: AcceptanceCollapse("acceptance fell to 1.0"), False),
    "biased": (lambda: LosslessnessError("the run is biased"), False),
    "loss not finite": (lambda: FloatingPointError("nan"), False),
    "out of memory": (lambda: MemoryError(), False),
    "a bug": (lambda: AttributeError("no such"), False),
}


@pytest.mark.parametrize("name", _COMES_AGAIN_OR_NOT)
def test_a_failure_is_transient_or_not(name: str) -> None:
    make, expected = _COMES_AGAIN_OR_NOT[name]
    assert (transient(make()) is not None) is expected


def test_an_actor_whose_constructor_raised_would_do_so_again() -> None:
    from ray.exceptions import ActorDiedError, RayTaskError

    raised = RayTaskError("Engine.__init__", "Traceback: no such model", ValueError("no such model"))
    assert transient(ActorDiedError(raised)) is None


def test_what_a_transient_failure_caused_is_transient() -> None:
    error = RuntimeError("the step failed")
    error.__cause__ = LostWorkerError("engine 0 died", [])
    assert transient(error) == "a process of the run was lost"


def test_a_refusal_among_the_causes_makes_all_of_it_permanent() -> None:
    error = LostWorkerError("learner rank 1 died during save_checkpoint", [])
    error.__cause__ = CheckpointError("of another recipe")
    assert transient(error) is None


def test_a_worker_lost_while_the_refusal_is_raised_does_not_excuse_it() -> None:
    with pytest.raises(RefitError) as caught:
        try:
            raise LostWorkerError("engine 0 died", [])
        except LostWorkerError:
            raise RefitError("tensors differ")  # noqa: B904  # raised while the other is handled: that is the case
    assert transient(caught.value) is None


@pytest.mark.parametrize("name", sorted({*PERMANENT, *TRANSIENT}))
def test_every_class_named_is_there_under_that_name(name: str) -> None:
    module, _, kind = name.rpartition(".")
    found = vars(importlib.import_module(module))[kind]
    assert f"{found.__module__}.{found.__qualname__}" == name
