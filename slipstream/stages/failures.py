"""Classes of failures: a retry may outlive those of machines, networks and servers, never those of the request itself.

Error classes are named, not imported: a stage that reads a JSON file need not import Ray, torch and an S3 client to say
why it failed. Tests resolve every name, so that a class that moves is noticed.
"""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

PERMANENT = frozenset(
    {
        "huggingface_hub.errors.OfflineModeIsEnabled",
        "slipstream.config.ConfigError",
        "slipstream.learner.checkpoint.CheckpointError",
        "slipstream.learner.checkpoint.CheckpointStorageError",
        "slipstream.learner.checkpoint.CheckpointWriteError",
        "slipstream.refit.config.RefitError",
        "slipstream.stages.certify_losslessness.LosslessnessError",
        "slipstream.train.acceptance_guard.AcceptanceCollapse",
    }
)
"""Errors of recipe, checkpoint, losslessness and refit: a retry would fail alike, or hide the cause."""

EXPLAINED = frozenset(
    {
        "slipstream.config.ConfigError",
        "slipstream.stages.certify_losslessness.LosslessnessError",
        "slipstream.stages.report_speedup.DriftError",
    }
)
"""Errors whose message says all; Flyte's console shows it without the traceback, which stands in the log."""

HUB = "the model hub did not answer"
TRANSIENT = {
    "slipstream.workers.calls.LostWorkerError": "a process of the run was lost",
    "slipstream.refit.config.ChannelBrokeError": "another process left the weights' channel",
    "slipstream.tracking.mlflow_store.TrackingError": "the tracking server did not answer",
    "ray.exceptions.RayActorError": "an actor was lost",
    "ray.exceptions.NodeDiedError": "a node was lost",
    "ray.exceptions.WorkerCrashedError": "a Ray worker was lost",
    "ray.exceptions.LocalRayletDiedError": "a node was lost",
    "ray.exceptions.ObjectLostError": "an object was lost with its node",
    "ray.exceptions.RpcError": "Ray did not answer",
    "torch.distributed.DistBackendError": "a collective operation failed",
    "torch.distributed.DistNetworkError": "a collective operation failed",
    "torch.distributed.DistStoreError": "the processes did not find each other",
    "flytekit.exceptions.system.FlyteDownloadDataException": "the object store did not answer",
    "flytekit.exceptions.system.FlyteUploadDataException": "the object store did not answer",
    "fsspec.exceptions.FSTimeoutError": "the object store did not answer",
    "botocore.exceptions.ConnectionError": "the object store did not answer",
    "botocore.exceptions.HTTPClientError": "the object store did not answer",
    "aiohttp.client_exceptions.ClientConnectionError": "the object store did not answer",
    "httpx2.TransportError": HUB,
    "requests.exceptions.ConnectionError": HUB,
    "requests.exceptions.Timeout": HUB,
    "requests.exceptions.ChunkedEncodingError": HUB,
    "huggingface_hub.errors.LocalEntryNotFoundError": HUB,
    "socket.gaierror": "a name was not resolved",
    "builtins.ConnectionError": "a connection broke",
    "builtins.TimeoutError": "an answer did not come in time",
}
"""Reason why a failure of this class, or of a subclass, may not recur."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_TEXT = re.compile(r"\(os error (?:28|122)\)")  # of safetensors and tokenizers, whose errors are no OSError
_STORAGE = (errno.EIO, errno.EAGAIN, errno.ESTALE)
_HOST = (errno.ENOTCONN, errno.EHOSTDOWN, errno.EHOSTUNREACH)
_NETWORK = (errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET)
_BUSY_CODES = frozenset({"SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout", "503", "500"})
_BUSY_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_NO_ANSWER = re.compile(r"couldn't connect to|can't load .* try again|IncompleteRead", re.IGNORECASE)  # transformers'
_NOT_REACHED = re.compile(r"couldn't reach .* on the hub \((\w+)", re.IGNORECASE)  # datasets'
# gloo's and NCCL's errors often have no class of their own: both name the file or library that failed.
_COLLECTIVE = re.compile(r"\[[^\]]*gloo/[^\]]*\]|\bNCCL (?:error|communicator)|\bncclRemoteError|\bncclSystemError")
_MISUSE = re.compile(r"invalid usage|invalid argument", re.IGNORECASE)  # NCCL's words for an error of its caller


def transient(error: BaseException) -> str | None:
    """Reason why another attempt may succeed where this one failed; None if it would fail alike.

    The causes of an error count as well, and one permanent error among them makes all of it permanent: a worker that
    was lost while a checkpoint was refused does not make the checkpoint better. An error of a field that another one
    caused, as where the hub did not send the model that the field names, is as permanent as that one.
    """
    causes = list(_causes(error))
    if any(map(_is_permanent, causes)):
        return None
    return next((reason for cause in causes if (reason := _reason(cause))), None)


def _is_permanent(error: BaseException) -> bool:
    names = set(_names(error))
    if names & PERMANENT == {"slipstream.config.ConfigError"} and error.__cause__ is not None:
        return transient(error.__cause__) is None
    if _is_full(error):  # flytekit tells of it as of a store that did not answer
        return True
    return bool(names & PERMANENT) and "slipstream.refit.config.ChannelBrokeError" not in names


def explained(error: BaseException) -> str | None:
    """Message of an error that needs no traceback: of a user's input, of a verdict, or of a full disk; else None."""
    full = next(filter(_is_full, _causes(error)), None)
    if full is not None:
        name = full.filename if isinstance(full, OSError) and isinstance(full.filename, str) else None
        folder = next((path for path in Path(name).absolute().parents if path.is_dir()), None) if name else None
        where, free = "that is written to", str(full)
        if folder is not None:
            disk = shutil.disk_usage(folder)
            where, free = f"of {folder}", f"{disk.free / 2**30:.1f} GiB free of {disk.total / 2**30:.1f} GiB"
        return (
            f"the disk {where} must have room for {name or 'what is written'}, got {free}; enlarge it (the profile's "
            "volume claim or ephemeral_storage_gib), or remove entries of the run root's store/"
        )
    return str(error) if EXPLAINED.intersection(_names(error)) else None


def _is_full(error: BaseException) -> bool:
    return error.errno in _FULL if isinstance(error, OSError) else bool(_FULL_TEXT.search(str(error)))


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        if following.__cause__ is not None or following.__suppress_context__:
            following = following.__cause__
        else:
            following = following.__context__


def _reason(error: BaseException) -> str | None:
    """Reason why this error, without its causes, may not recur."""
    names = _names(error)
    if "ray.exceptions.ActorDiedError" in names and error.actor_init_failed:  # type: ignore[attr-defined]  # of Ray's class
        return None  # its constructor raised, and will raise again
    if "botocore.exceptions.ClientError" in names:
        code = error.response.get("Error", {}).get("Code")  # type: ignore[attr-defined]  # of botocore's class
        return "the object store was busy" if code in _BUSY_CODES else None
    status = getattr(getattr(error, "response", None), "status_code", None)  # of requests, httpx and the hub
    if isinstance(status, int):
        return HUB if status in _BUSY_STATUS else None
    if isinstance(error, ConnectionError) and (unreached := _NOT_REACHED.search(str(error))):
        return None if unreached[1] == "OfflineModeIsEnabled" else HUB
    if _MISUSE.search(str(error)) and _COLLECTIVE.search(str(error)):
        return None
    named = next((TRANSIENT[name] for name in names if name in TRANSIENT), None)
    if named is not None:
        return named
    if isinstance(error, OSError) and error.errno in (*_STORAGE, *_HOST, *_NETWORK):
        return "storage or network failed"
    if isinstance(error, OSError) and error.errno is None and _NO_ANSWER.search(str(error)):
        return HUB
    if isinstance(error, RuntimeError) and _COLLECTIVE.search(str(error)):
        return "a collective operation failed"
    return None


def _names(error: BaseException) -> list[str]:
    return [f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__]
