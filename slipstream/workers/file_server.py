"""The driver's files on other hosts: one agent a node copies a model there, once, in pieces.

A path in a run is the driver's. On storage that all hosts see it is good everywhere; otherwise a process on another
host asks the agent of its node, which fetches the files from the agent of the driver's node through Ray's object
store, keeps them under a key of their content, and hands the copy to whoever asks again.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import xxhash

from slipstream.config import ConfigError
from slipstream.workers.session import actor_environment, on_node, own_node

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 8 << 20  # small beside any object store: one lies there while the next is read
_NUM_AHEAD = 3
_STALLED_S = 120.0  # for one chunk
_opened: dict[str, Any] = {}  # the driver's agents by node
_PREFIX = f"slipstream-files-{os.getuid()}-"


@dataclass(frozen=True, slots=True)
class FileInfo:
    """What tells a file apart from another one of its name."""

    size: int
    modified_ns: int
    digest: str = ""  # only where it was asked for


class NodeStore:
    """The agent of one node. Its copies are gone when it ends, or when the next agent starts there."""

    def __init__(self) -> None:
        _remove_left_over()
        self._root = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._lock = (self._root / "lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)  # the kernel lets go of it with the process
        self._digests: dict[tuple[Path, FileInfo], str] = {}
        self._copies: dict[Path, Path] = {}  # the last one of each path

    def here(self, path: Path, origin: str) -> Path:
        """Where the files of the node `origin` under `path` lie on this node, copied if they must be.

        Raises:
            ConfigError: `origin` has no such files.
            OSError: this node's disk is full.
        """
        source = store_on(origin)
        if files_under(path) == ray.get(source.listing.remote(path), timeout=_STALLED_S):
            return path
        files: dict[str, FileInfo] = ray.get(source.listing.remote(path, with_digests=True))
        target = self._root / _key(files)
        if not target.is_dir():
            self._require_space(path, sum(file.size for file in files.values()))
            partial = target.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            for name, file in files.items():
                _copy(source, path, name, file, partial / name)
            partial.rename(target)
            logger.info("copied %s here from node %s: %d files", path, origin, len(files))
        self._forget_older(path, target)
        return target / path.name

    def listing(self, path: Path, *, with_digests: bool = False) -> dict[str, FileInfo]:
        """Files under `path` by their names below its parent.

        Raises:
            ConfigError: there are none.
        """
        files = files_under(path)
        if not files:
            raise ConfigError(f"{path} must be a file or directory on the driver's host, got nothing there")
        if not with_digests:
            return files
        return {name: self._with_digest(path.parent / name, file) for name, file in files.items()}

    def read(self, path: Path, offset: int) -> bytes:
        """The chunk that starts at `offset`."""
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(_CHUNK_BYTES)

    def _forget_older(self, path: Path, target: Path) -> None:
        """Remove the copy of what `path` held before, unless it is another path's too."""
        older = self._copies.get(path)
        self._copies[path] = target
        if older is not None and older not in self._copies.values():
            shutil.rmtree(older)

    def _with_digest(self, path: Path, file: FileInfo) -> FileInfo:
        if (path, file) not in self._digests:
            digest = xxhash.xxh3_128()
            for chunk in _chunks(path):
                digest.update(chunk)
            self._digests[path, file] = digest.hexdigest()
        return FileInfo(file.size, file.modified_ns, self._digests[path, file])

    def _require_space(self, path: Path, num_bytes: int) -> None:
        free = shutil.disk_usage(self._root).free
        if free < num_bytes:
            raise OSError(
                f"{self._root} must have {num_bytes:,} bytes free for a copy of {path}, has {free:,}: set TMPDIR where "
                "Ray is started on this host, or put the run on storage that all hosts share"
            )


def here(path: Path, origin: str) -> Path:
    """The files of the node `origin` under `path`, for a process of this node. See `NodeStore.here`."""
    if not origin or origin == (own := own_node()):
        return path
    return ray.get(store_on(own).here.remote(path, origin))


def open_stores() -> None:
    """Start an agent on each node of a cluster, for the driver: they live as long as who starts them."""
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    if len(nodes) > 1:
        for node_id in nodes:
            if node_id not in _opened:
                _opened[node_id] = store_on(node_id)


def store_on(node_id: str) -> Any:
    """The agent of a node."""
    options: dict[str, Any] = {"num_cpus": 0, "runtime_env": {"env_vars": actor_environment({})}}
    return (
        ray.remote(NodeStore)
        .options(
            **options, name=f"slipstream-files-{node_id}", get_if_exists=True, scheduling_strategy=on_node(node_id)
        )
        .remote()
    )


def files_under(path: Path) -> dict[str, FileInfo]:
    """The file `path`, or those of that directory, by their names below its parent; none if there is nothing."""
    paths = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    stats = {str(each.relative_to(path.parent)): each.stat() for each in paths if each.is_file()}
    return {name: FileInfo(stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}


def _copy(source: Any, path: Path, name: str, file: FileInfo, target: Path) -> None:
    """Fetch one file, a few chunks ahead of what is written."""
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = xxhash.xxh3_128()
    offsets = iter(range(0, file.size, _CHUNK_BYTES))
    coming: deque[Any] = deque()
    with target.open("wb") as output:
        while True:
            while len(coming) < _NUM_AHEAD and (offset := next(offsets, None)) is not None:
                coming.append(source.read.remote(path.parent / name, offset))
            if not coming:
                break
            chunk: bytes = ray.get(coming.popleft(), timeout=_STALLED_S)
            digest.update(chunk)
            output.write(chunk)
    if digest.hexdigest() != file.digest:
        raise OSError(f"the copy of {path.parent / name} must equal it, got other bytes: did it change meanwhile?")


def _key(files: Mapping[str, FileInfo]) -> str:
    text = "\n".join(f"{name} {file.digest}" for name, file in sorted(files.items()))
    return xxhash.xxh3_128_hexdigest(text.encode())


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk


def _remove_left_over() -> None:
    """Remove the copies of agents that are gone: nobody holds their locks."""
    for directory in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            with (directory / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
        except OSError:  # somebody's, or another agent was faster
            continue
