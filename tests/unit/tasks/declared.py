"""The tasks as they are declared, and run as their container runs them: inputs.pb in, outputs.pb or error.pb out."""

import importlib
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flytekit.core.python_function_task import PythonFunctionTask

import tasks


def declared_tasks() -> dict[str, PythonFunctionTask]:
    """Every task that a module of `tasks` defines, by its name without the module's: a pod meets nothing else."""
    modules = (importlib.import_module(f"tasks.{module.name}") for module in pkgutil.iter_modules(tasks.__path__))
    entities = (entity for module in modules for entity in vars(module).values())
    found = {entity.name: entity for entity in entities if isinstance(entity, PythonFunctionTask)}
    return {name.rpartition(".")[2]: found[name] for name in sorted(found)}


def write_inputs(inputs: Mapping[str, Any], kinds: Mapping[str, Any], path: Path) -> str:
    """Write inputs of these types as a container finds them."""
    from flytekit.core.context_manager import FlyteContextManager
    from flytekit.core.type_engine import TypeEngine

    literals = TypeEngine.dict_to_literal_map(FlyteContextManager.current_context(), dict(inputs), dict(kinds))
    path.write_bytes(literals.to_flyte_idl().SerializeToString())
    return str(path)


def dispatched(task: Any, inputs: Mapping[str, Any], directory: Path, *, raw: str = "") -> Path:
    """Run a task as its container does, without a container; the directory of what it leaves."""
    from flytekit.bin.entrypoint import _dispatch_execute, setup_execution

    meta = directory / "meta"
    with setup_execution(raw or str(directory / "raw"), str(meta)) as context:
        path = write_inputs(inputs, task.python_interface.inputs, directory / "inputs.pb")
        _dispatch_execute(context, lambda: task, path, str(meta))
    return meta


def error_in(path: Path) -> tuple[str, str]:
    """Kind and message of the error that a task left."""
    from flyteidl.core.errors_pb2 import ErrorDocument

    error = ErrorDocument.FromString(path.read_bytes()).error
    return type(error).Kind.Name(error.kind), error.message
