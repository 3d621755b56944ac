"""Tasks run as their container runs them, without a container: inputs.pb in, outputs.pb or error.pb out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

ErrorDocument = Callable[..., tuple[str, str]]


@pytest.fixture
def error_document() -> ErrorDocument:
    """Runs a task with inputs in a directory; kind and message of the error that it leaves."""
    return _error_document


def _error_document(task: Any, inputs: Mapping[str, Any], directory: Path) -> tuple[str, str]:
    from flyteidl.core import errors_pb2
    from flytekit.bin.entrypoint import _dispatch_execute, setup_execution
    from flytekit.core.type_engine import TypeEngine
    from flytekit.core.utils import load_proto_from_file, write_proto_to_file

    with setup_execution(str(directory / "raw"), str(directory / "meta")) as ctx:
        literals = TypeEngine.dict_to_literal_map(ctx, dict(inputs), task.python_interface.inputs)
        write_proto_to_file(literals.to_flyte_idl(), str(directory / "inputs.pb"))
        _dispatch_execute(ctx, lambda: task, str(directory / "inputs.pb"), str(directory / "meta"))
    assert not (directory / "meta" / "outputs.pb").exists()
    document = load_proto_from_file(errors_pb2.ErrorDocument, str(directory / "meta" / "error.pb"))
    return type(document.error).Kind.Name(document.error.kind), document.error.message
