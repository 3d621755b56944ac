"""Strict configs: frozen dataclasses read from plain mappings, with errors that name field, rule, value and fix.

Every config class of the library stands beside the code that it configures; this file only knows how to read one.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import types
import typing
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

T = TypeVar("T")

_SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class ConfigError(ValueError):
    """A value that the user gave and that breaks a rule."""


def require(condition: bool, field: str, rule: str, value: object, fix: str = "") -> None:
    """Raise a `ConfigError` that reads `<field> <rule>, got <value>; <fix>` unless `condition` holds."""
    if not condition:
        raise ConfigError(f"{field} {rule}, got {value!r}" + (f"; {fix}" if fix else ""))


def from_mapping(cls: type[T], values: Mapping[str, Any], path: str = "") -> T:
    """Build the config `cls` from plain `values`, refusing unknown keys and wrong types.

    Args:
        values: as YAML or JSON gives them; a nested config is a nested mapping.
        path: dotted name of `values` inside the recipe, used in errors.
    Raises:
        ConfigError: an unknown key (the nearest known one is named), a missing field, a value of the wrong type,
            or a rule of the config class that does not hold.
    """
    require(isinstance(values, Mapping), path or "recipe", "must be a mapping of field to value", values)
    fields = {f.name: f for f in dataclasses.fields(typing.cast(Any, cls)) if f.init}
    for key in values:
        if key not in fields:
            raise ConfigError(_unknown_key(key, fields, path))
    hints = _hints(cls)
    kwargs = {key: _coerce(hints[key], value, _join(path, key)) for key, value in values.items()}
    missing = [
        name
        for name, f in fields.items()
        if name not in kwargs and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    require(not missing, _join(path, missing[0]) if missing else path, "is required", None, "set it")
    return cls(**kwargs)


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def to_mapping(config: Any) -> dict[str, Any]:
    """Plain JSON-ready mapping of a config: enums as their values, tuples as lists."""
    return {f.name: _plain(getattr(config, f.name)) for f in dataclasses.fields(config)}


def merge(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the leaves of `override` laid over it; mappings merge, everything else replaces."""
    merged = dict(base)
    for key, value in override.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def read_yaml(text: str) -> Any:
    """What a text in YAML says, by the parser in C where PyYAML has it: several times as fast, and the same values.

    Raises:
        yaml.YAMLError: it is none.
    """
    return yaml.load(text, Loader=_SafeLoader)


def parse_overrides(items: Iterable[str]) -> dict[str, Any]:
    """The nested mapping of overrides as people type them: `grpo.group_size=16`, the value in YAML.

    Whether the fields exist and take such values is for whoever reads the mapping.

    Raises:
        ConfigError: an item of another form, or two that set the same field.
    """
    values: dict[str, Any] = {}
    for item in items:
        name, equals, text = item.partition("=")
        parts = name.strip().split(".")
        well_formed = bool(equals) and all(part.isidentifier() for part in parts)
        require(well_formed, "overrides", "must read field=value", item, "as in grpo.group_size=16")
        try:
            value = read_yaml(text)
        except yaml.YAMLError:
            raise ConfigError(f"overrides must have a YAML value after '=', got {item!r}; quote it") from None
        section = values
        for part in parts[:-1]:
            section = section.setdefault(part, {})
            require(isinstance(section, dict), "overrides", "must set each field once", item, "leave one of them out")
        require(parts[-1] not in section, "overrides", "must set each field once", item, "leave one of them out")
        section[parts[-1]] = value
    return values


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _unknown_key(key: str, fields: Mapping[str, Any], path: str) -> str:
    near = difflib.get_close_matches(str(key), list(fields), n=1, cutoff=0.5)
    fix = f"did you mean {_join(path, near[0])!r}?" if near else f"known: {', '.join(fields)}"
    return f"unknown key {_join(path, str(key))!r}; {fix}"


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_mapping(value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _coerce(hint: Any, value: Any, path: str) -> Any:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _coerce_union(hint, value, path)
    if origin is Literal:
        require(value in get_args(hint), path, f"must be one of {', '.join(map(str, get_args(hint)))}", value)
        return value
    if origin is dict:
        require(isinstance(value, Mapping), path, "must be a mapping", value)
        return {key: _coerce(get_args(hint)[1], item, _join(path, key)) for key, item in value.items()}
    if origin is tuple:
        require(isinstance(value, (list, tuple)), path, "must be a list", value)
        item = get_args(hint)[0]
        return tuple(_coerce(item, v, f"{path}[{i}]") for i, v in enumerate(value))
    if dataclasses.is_dataclass(hint):
        return from_mapping(typing.cast(Any, hint), value, path)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        allowed = [member.value for member in hint]
        require(value in allowed or isinstance(value, hint), path, f"must be one of {', '.join(allowed)}", value)
        return hint(value)
    return _coerce_scalar(hint, value, path)


def _coerce_union(hint: Any, value: Any, path: str) -> Any:
    options = [option for option in get_args(hint) if option is not type(None)]
    if value is None and type(None) in get_args(hint):
        return None
    errors = []
    for option in options:
        try:
            return _coerce(option, value, path)
        except ConfigError as error:
            errors.append(error)
    raise errors[-1]


def _coerce_scalar(hint: Any, value: Any, path: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is float and isinstance(value, str):
        # YAML 1.1 reads `1e-4` (no dot) as a string: a learning rate is the value that people write so.
        try:
            return float(value)
        except ValueError:
            pass
    ok = isinstance(value, hint) and not (hint is int and isinstance(value, bool))
    require(ok, path, f"must be of type {hint.__name__}", value)
    return value
