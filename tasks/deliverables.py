"""Directories and recipes between tasks: what a task fetches of an input and hands on (`stages.deliverables`)."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from flytekit import FlyteContextManager
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from slipstream.recipe import Recipe, load_recipe
from slipstream.stages import deliverables
from slipstream.stages.context import RunContext

logger = logging.getLogger(__name__)

_TENSORS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def handed_on(
    context: RunContext, node: str, directory: Path, *, records: Sequence[str], weights: Sequence[str] = ()
) -> FlyteDirectory:
    """Return a task's output from the directory that its stage wrote; the arguments are those of `deliver`."""
    return FlyteDirectory(str(deliverables.deliver(context, node, directory, records=records, weights=weights)))


def recipe_of(file: FlyteFile) -> Recipe:
    """Fetch the resolved recipe of a run, and read it."""
    return load_recipe(os.fspath(file))


def records_of(directory: FlyteDirectory) -> Path:
    """Fetch the records of an input; of a user's model all files but tensors."""
    folder = _Folder(directory)
    return folder.fetched(lambda name: folder.is_deliverable or not name.endswith(_TENSORS))


def model_of(context: RunContext, directory: FlyteDirectory) -> Path:
    """Fetch an input with its weights to the shared storage of the run."""
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
    """Directory in the object store or on this machine."""

    def __init__(self, directory: FlyteDirectory) -> None:
        """Wrap an input of a task, whether flytekit has downloaded it or not."""
        self.uri = (directory.remote_source or str(directory.path)).rstrip("/")
        self._access = FlyteContextManager.current_context().file_access
        self.is_remote = self._access.is_remote(self.uri)
        self.is_deliverable = self._access.exists(f"{self.uri}/{deliverables.MANIFEST}")  # True: a stage wrote it

    def fetched(self, wanted: Callable[[str], bool]) -> Path:
        """Download the files with wanted names; returns the local directory."""
        if not self.is_remote:
            return Path(self.uri)
        target = Path(self._access.get_random_local_directory())
        files = self._access.get_filesystem_for_path(self.uri)
        base = str(files._strip_protocol(self.uri))  # prefix of the paths that `find` returns
        names = [path.removeprefix(base).lstrip("/") for path in files.find(self.uri)]
        for name in filter(wanted, names):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            self._access.get_data(f"{self.uri}/{name}", str(target / name))
        logger.info("received %d bytes of %s", deliverables.num_bytes(target), self.uri)
        return target

    def fetch(self, target: Path) -> None:
        """Download the whole directory to a path."""
        target.parent.mkdir(parents=True, exist_ok=True)
        self._access.get_data(self.uri, str(target), is_multipart=True)
        logger.info("received %d bytes of %s", deliverables.num_bytes(target), self.uri)
