"""The tags that say where a task ran and from what code."""

from __future__ import annotations

import subprocess
from pathlib import Path

from slipstream.stages.runs import checkout_commit, origin_tags


def test_a_pod_is_tagged_from_its_environment() -> None:
    environment = {
        "SLIPSTREAM_GIT_COMMIT": "abc123",
        "SLIPSTREAM_NODE": "gb200-07",
        "FLYTE_INTERNAL_IMAGE": "registry/slipstream:v1",
        "FLYTE_EXECUTION_URL": "https://flyte/console/x",
    }
    assert origin_tags(environment, gpu="GB200") == {
        "git.commit": "abc123",
        "mlflow.source.git.commit": "abc123",
        "image": "registry/slipstream:v1",
        "node": "gb200-07",
        "gpu": "GB200",
        "flyte.execution_url": "https://flyte/console/x",
    }


def test_what_is_not_known_has_no_tag() -> None:
    assert set(origin_tags({"SLIPSTREAM_GIT_COMMIT": "abc123"})) == {"git.commit", "mlflow.source.git.commit", "node"}


def test_a_checkout_is_named_by_its_commit_and_by_whether_files_differ(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=n", "-c", "user.email=e@example.org")
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (tmp_path / "__init__.py").write_text("")
    git("add", ".")
    git("commit", "-qm", "first")
    commit = git("rev-parse", "--short=12", "HEAD")
    assert checkout_commit(tmp_path) == commit
    (tmp_path / "__init__.py").write_text("changed")
    assert checkout_commit(tmp_path) == f"{commit}-dirty"
    installed = tmp_path / "venv" / "slipstream"  # a package that lies in somebody else's repository
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    assert checkout_commit(installed) == ""


def test_outside_a_repository_there_is_no_commit(tmp_path: Path) -> None:
    assert checkout_commit(tmp_path) == ""
