"""What travels between tasks through an object store, and what does not."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from flytekit import FlyteContextManager
from flytekit.core.data_persistence import FileAccessProvider
from flytekit.types.directory import FlyteDirectory

from slipstream.stages.deliverables import deliver
from tasks.deliverables import model_of, records_of
from tests.small import run_context


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[str]:
    """A bucket in memory, which flytekit takes for the object store."""
    uri = f"memory://{uuid.uuid4().hex}"
    context = FlyteContextManager.current_context()
    access = FileAccessProvider(local_sandbox_dir=tmp_path / "pod", raw_output_prefix=f"{uri}/raw")
    with FlyteContextManager.with_context(context.with_file_access(access)):
        yield uri


def _model(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_text("0123456789")
    return directory


def _upload(folder: Path, uri: str) -> FlyteDirectory:
    files = fsspec.filesystem("memory")
    for path in folder.rglob("*"):
        if path.is_file():
            files.pipe_file(f"{uri}/{path.relative_to(folder)}", path.read_bytes())
    return FlyteDirectory.from_source(uri)


def test_records_travel_and_weights_are_found_on_the_root(tmp_path: Path, bucket: str) -> None:
    _model(tmp_path / "draft")
    (tmp_path / "draft.json").write_text("{}")
    context = run_context(tmp_path / "runs")
    handed_on = deliver(context, "draft", tmp_path, records=("draft.json",), weights=("draft",))
    sent = _upload(handed_on, f"{bucket}/draft")
    got, whole = records_of(sent), model_of(context, sent)
    assert sorted(path.name for path in got.rglob("*") if path.is_file()) == ["deliverable.json", "draft.json"]
    assert whole.is_relative_to(tmp_path / "runs")
    assert (whole / "draft" / "model.safetensors").read_text() == "0123456789"
    assert (whole / "draft.json").read_text() == "{}"


def test_a_users_own_model_is_taken_where_it_is_or_fetched_perhaps_without_tensors(tmp_path: Path, bucket: str) -> None:
    local, context = _model(tmp_path / "own"), run_context(tmp_path / "runs")
    assert model_of(context, FlyteDirectory(str(local))) == records_of(FlyteDirectory(str(local))) == local
    own = _upload(local, f"{bucket}/own")
    whole, small = model_of(context, own), records_of(own)
    assert sorted(path.name for path in whole.iterdir()) == ["config.json", "model.safetensors"]
    assert whole.is_relative_to(tmp_path / "runs")
    assert [path.name for path in small.iterdir()] == ["config.json"]
