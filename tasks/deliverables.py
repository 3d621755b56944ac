"""Folders that travel between tasks: what a task fetches of an input and what it hands on (`stages.deliverables`)."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from flytekit import FlyteContextManager
from flytekit.types.directory import FlyteDirectory

from slipstream.stages import deliverables
from slipstream.stages.context import RunContext

logger = logging.getLogger(__name__)

_TENSORS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def handed_on(
    context: RunContext, node: str, directory: Path, *, records: Sequence[str], weights: Sequence[str] = ()
) -> FlyteDirectory:
    """The output of a task whose stage wrote `directory`; arguments are those of `deliver`."""
    return FlyteDirectory(str(deliverables.deliver(context, node, directory, records=records, weights=weights)))


def records_of(directory: FlyteDirectory) -> Path:
    """The records of an input, as the stage that made it wrote them; of a model that a user brought all but tensors."""
    folder = _Folder(directory)
    return folder.fetched(lambda name: folder.is_deliverable or not name.endswith(_TENSORS))


def model_of(context: RunContext, directory: FlyteDirectory) -> Path:
    """An input as the stage that made it wrote it, with its weights, on storage that the whole run sees."""
    folder = _Folder(directory)
    if folder.is_deliverable:
        return deliverables.assemble(context, folder.fetched(lambda name: name == deliverables.MANIFEST))
    if not folder.is_remote:
        return Path(folder.uri)
    name = hashlib.sha256(folder.uri.encode()).hexdigest()[:16]
    target = Path(context.root) / context.execution / "received" / name
    if not target.is_dir():
        with deliverables.put(target) as part:
            folder.fetch(part)
    return target


class _Folder:
    """A folder in the object store, or on this machine."""

    def __init__(self, directory: FlyteDirectory) -> None:
        """`directory`: an input, fetched or not."""
        self.uri = (directory.remote_source or str(directory.path)).rstrip("/")
        self._access = FlyteContextManager.current_context().file_access
        self.is_remote = self._access.is_remote(self.uri)
        self.is_deliverable = self._access.exists(f"{self.uri}/{deliverables.MANIFEST}")  # a stage made it

    def fetched(self, wanted: Callable[[str], bool]) -> Path:
        """Where it lies on this machine, once the files with wanted names are there."""
        if not self.is_remote:
            return Path(self.uri)
        target = Path(self._access.get_random_local_directory())
        files = self._access.get_filesystem_for_path(self.uri)
        base = str(files._strip_protocol(self.uri))  # as `find` gives paths
        names = [path.removeprefix(base).lstrip("/") for path in files.find(self.uri)]
        for name in filter(wanted, names):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            self._access.get_data(f"{self.uri}/{name}", str(target / name))
        logger.info("received %d bytes of %s", deliverables.num_bytes(target), self.uri)
        return target

    def fetch(self, target: Path) -> None:
        """Copy all of it to a path."""
        target.parent.mkdir(parents=True, exist_ok=True)
        self._access.get_data(self.uri, str(target), is_multipart=True)
        logger.info("received %d bytes of %s", deliverables.num_bytes(target), self.uri)
