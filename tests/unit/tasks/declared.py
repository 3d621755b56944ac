"""The tasks as they are declared: read off the registered objects, for a pod meets nothing else."""

from __future__ import annotations

import importlib
import pkgutil

from flytekit.core.python_function_task import PythonFunctionTask

import tasks


def declared_tasks() -> dict[str, PythonFunctionTask]:
    """Every task that a module of `tasks` defines, by its name without the module's."""
    modules = (importlib.import_module(f"tasks.{module.name}") for module in pkgutil.iter_modules(tasks.__path__))
    entities = (entity for module in modules for entity in vars(module).values())
    found = {entity.name: entity for entity in entities if isinstance(entity, PythonFunctionTask)}
    return {name.rpartition(".")[2]: found[name] for name in sorted(found)}
