"""Where a task runs and from what code: the tags by which runs of different days can be told apart."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path

import slipstream
from slipstream.kubernetes.profile import NODE_VARIABLE

COMMIT_VARIABLE = "SLIPSTREAM_GIT_COMMIT"
"""Set in an image when it is built: an image holds no repository."""

_IMAGE_VARIABLE = "FLYTE_INTERNAL_IMAGE"  # set by flytepropeller and flytekit
_URL_VARIABLE = "FLYTE_EXECUTION_URL"  # set by flytepropeller where the console's address is configured
_GIT_TIMEOUT_S = 5.0


def origin_tags(environment: Mapping[str, str] = os.environ, *, gpu: str = "") -> dict[str, str]:
    """Tags of commit, image, node, GPU and Flyte execution; what is not known has none.

    Args:
        gpu: the accelerators' type, of a task that uses some.
    """
    commit = environment.get(COMMIT_VARIABLE) or checkout_commit(Path(slipstream.__file__).parent)
    tags = {
        "git.commit": commit,
        "mlflow.source.git.commit": commit,  # MLflow shows this one as the run's version
        "image": environment.get(_IMAGE_VARIABLE, ""),
        "node": environment.get(NODE_VARIABLE) or platform.node(),
        "gpu": gpu,
        "flyte.execution_url": execution_url(environment),
    }
    return {name: value for name, value in tags.items() if value}


def execution_url(environment: Mapping[str, str] = os.environ) -> str:
    """Where Flyte's console shows this task's execution; empty outside a cluster."""
    return environment.get(_URL_VARIABLE, "")


def checkout_commit(directory: Path) -> str:
    """The commit that `directory` is checked out at, `-dirty` if files differ from it; empty outside a repository."""
    try:
        _git(directory, "ls-files", "--error-unmatch", "__init__.py")  # not a package that lies in another repository
        return _git(directory, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(directory: Path, *arguments: str) -> str:
    command = ["git", "-C", str(directory), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_GIT_TIMEOUT_S).stdout.strip()
