"""Strict configs: frozen dataclasses read from plain mappings, with errors that name field, rule, value and fix.

Every config class of the library stands beside the code that it configures; this file only knows how to read one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import enum
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

T = TypeVar("T")

LARGEST = 2**31 - 1
"""Of the numbers of a recipe but its seeds: engines count in 32 bits, and no clock waits for more seconds."""
_LARGEST_SEED = 2**63 - 1  # generators and Flyte take no more
_YES, _NO = ("true", "yes", "on"), ("false", "no", "off")
_Parser: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C: several times as fast, and the same values


class ConfigError(ValueError):
    """A value that the user gave and that breaks a rule."""


class _SafeLoader(_Parser):
    """Plain values alone, and of unquoted words only what YAML 1.1 and 1.2 read alike.

    `off`, `no`, `010`, `12:30:00` and `2026-11-25` are the words that were typed: YAML 1.1 makes False, 8, 45000 and a
    date of them. A key that stands twice in a mapping is an error; one that overrides a merged one (`<<`) is none.
    """

    yaml_implicit_resolvers: typing.ClassVar[dict[str, Any]] = {}

    def construct_document(self, node: yaml.Node) -> Any:
        _check_keys(node)
        return super().construct_document(node)


for _tag, _form, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(?:0|[1-9][0-9_]{0,99}|0x[0-9a-fA-F]{1,16})", "-+0123456789"),
    (
        "float",
        r"[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+][0-9]+)?|\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?|[-+]?\.(?:inf|Inf|INF)"
        r"|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("merge", r"<<", "<"),
):
    _SafeLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_form})\Z"), list(_first))


def require(condition: bool, field: str, rule: str, value: object, fix: str = "") -> None:
    """Raise a `ConfigError` that reads `<field> <rule>, got <value>; <fix>` unless `condition` holds."""
    if not condition:
        raise ConfigError(f"{field} {rule}, got {value!r}" + (f"; {fix}" if fix else ""))


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """A rule for the values of one field, which stands beside its type: `Annotated[int, ge(1)]`."""

    text: str
    holds: Callable[[Any], bool]
    fix: str = ""


def gt(bound: float, fix: str = "") -> Rule:
    """Numbers above `bound`."""
    return Rule(f"must be > {bound}", lambda value: value > bound, fix)


def ge(bound: float, fix: str = "") -> Rule:
    """Numbers from `bound` on."""
    return Rule(f"must be >= {bound}", lambda value: value >= bound, fix)


def within(interval: str, fix: str = "") -> Rule:
    """Numbers of an interval as mathematics writes it: `(0, 1]` holds 1 and not 0."""
    low, high = map(float, interval[1:-1].split(","))
    above = operator.le if interval[0] == "[" else operator.lt
    below = operator.le if interval[-1] == "]" else operator.lt
    return Rule(f"must lie in {interval}", lambda value: above(low, value) and below(value, high), fix)


EVEN = Rule("must be even, for RoPE", lambda value: value % 2 == 0)


PositiveInt = Annotated[int, gt(0)]
PositiveFloat = Annotated[float, gt(0)]
NonNegativeInt = Annotated[int, ge(0)]
NonNegativeFloat = Annotated[float, ge(0)]
Fraction = Annotated[float, within("(0, 1)")]


class Checked:
    """A config dataclass that refuses, as soon as it is made, values that break a rule of its fields.

    `path` is the config's name in errors. A null, where the type allows it, breaks no rule.
    """

    __slots__ = ()
    _path = ""

    def __init_subclass__(cls, *, path: str | None = None) -> None:
        cls._path = cls._path if path is None else path  # a dataclass with slots is made twice, then without a path

    def __post_init__(self) -> None:
        for name, is_optional, rule in _rules(type(self)):
            value = getattr(self, name)
            if value is not None:
                text = f"{rule.text} or null" if is_optional and not rule.fix else rule.text
                require(rule.holds(value), _join(self._path, name), text, value, rule.fix)
        self._check()

    def _require(self, condition: bool, field: str, rule: str, fix: str = "") -> None:
        """Refuse the value of `field`, a name of the config or one below it, unless `condition` holds."""
        value = operator.attrgetter(field)(self)
        require(condition, _join(self._path, field), rule, value.value if isinstance(value, enum.Enum) else value, fix)

    def _check(self) -> None:
        """Refuse values that do not go together, where a config has such rules."""


@cache
def _rules(cls: type) -> tuple[tuple[str, bool, Rule], ...]:
    """The rules of a config: the field's name, and whether it may be null."""
    found: list[tuple[str, bool, Rule]] = []
    for name, hint in get_type_hints(cls, include_extras=True).items():
        is_optional = type(None) in get_args(_hints(cls)[name])
        for part in (hint, *get_args(hint)):  # a whole type or, as in `PositiveInt | None`, a part of a union
            if get_origin(part) is Annotated:
                found += [(name, is_optional, rule) for rule in part.__metadata__ if isinstance(rule, Rule)]
    return tuple(found)


def from_mapping(cls: type[T], values: Mapping[str, Any], path: str = "") -> T:
    """Build the config `cls` from plain `values`, refusing unknown keys and wrong types.

    Args:
        values: as YAML or JSON gives them; a nested config is a nested mapping.
        path: dotted name of `values` inside the recipe, used in errors.
    Raises:
        ConfigError: an unknown key (the nearest known one is named), a missing field, a value of the wrong type,
            or a rule of the config class that does not hold.
    """
    fields = _known_fields(cls, values, path)
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
    """Read YAML, as `_SafeLoader` says.

    Raises:
        yaml.YAMLError: the text is none, or a key stands twice in a mapping.
    """
    try:
        return yaml.load(text, Loader=_SafeLoader)
    except (ValueError, LookupError, AttributeError, RecursionError) as error:  # a value that its tag cannot have
        raise yaml.YAMLError(f"{type(error).__name__}: {error}") from error


def read_mapping(path: Path, what: str) -> dict[str, Any]:
    """Read the mapping that a YAML file holds.

    Args:
        what: the file's name in errors, as in `recipe`.
    Raises:
        ConfigError: the file cannot be read, is not text in UTF-8, is not YAML or holds something else.
    """
    try:
        values = read_yaml(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{what} {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{what} {path} must be text in UTF-8, got {error}; save it as UTF-8") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{what} {path} is not YAML: {' '.join(str(error).split())}") from error
    got = "an empty file" if values is None else type(values).__name__
    require(isinstance(values, dict), f"{what} {path}", "must hold a mapping of field to value", got)
    return typing.cast(dict[str, Any], values)


def check_known(cls: type, values: Any, path: str) -> None:
    """Refuse keys that the config `cls` does not have, here and in the configs below it; values are not looked at.

    Raises:
        ConfigError: an unknown key (the nearest known one is named), or a section that is no mapping.
    """
    _known_fields(cls, values, path)
    for key, value in values.items():
        hint = _hints(cls)[key]
        items = value if isinstance(value, (list, tuple)) else [value]
        for nested in (each for each in (hint, *get_args(hint)) if dataclasses.is_dataclass(each)):
            for item in items:
                if item is not None:
                    check_known(typing.cast(type, nested), item, _join(path, key))


def require_sizes(config: Any, path: str = "") -> None:
    """Refuse numbers of a config, or of those below it, that no run could have.

    Raises:
        ConfigError: a seed outside [0, 2**63), or another number beyond `LARGEST`.
    """
    for name, value in _numbers(config, path):
        if name.rpartition(".")[2] == "seed":
            require(0 <= value <= _LARGEST_SEED, name, "must lie in [0, 2**63)", value)
        else:
            require(abs(value) <= LARGEST, name, f"must be at most {LARGEST}", value)


def _numbers(value: Any, path: str) -> Iterator[tuple[str, float]]:
    """Every number of a config and of what it holds, by its dotted name."""
    if dataclasses.is_dataclass(value):
        for f in dataclasses.fields(value):
            yield from _numbers(getattr(value, f.name), _join(path, f.name))
    elif isinstance(value, (tuple, dict)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _numbers(item, f"{path}[{key}]")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, value


def _check_keys(root: yaml.Node) -> None:
    """Refuse a key that stands twice in a mapping, at any depth."""
    seen: set[int] = set()  # an alias is the very node of its anchor
    waiting = [(root, "")]
    while waiting:
        node, path = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        below: list[tuple[yaml.Node, str]] = []
        if isinstance(node, yaml.SequenceNode):
            below = [(item, f"{path}[{number}]") for number, item in enumerate(node.value)]
        elif isinstance(node, yaml.MappingNode):
            lines: dict[tuple[str, str], int] = {}
            for key, item in node.value:
                name, line = str(key.value), key.start_mark.line + 1
                if (key.tag, name) in lines:
                    both = f"in lines {lines[key.tag, name]} and {line}"
                    raise yaml.YAMLError(f"the key {_join(path, name)!r} stands twice, {both}; leave one of them out")
                lines[key.tag, name] = line
                below.append((item, _join(path, name)))
        waiting += reversed(below)


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
        except yaml.YAMLError as error:
            why = " ".join(str(error).split())
            raise ConfigError(f"overrides must have a YAML value after '=', got {item!r} ({why}); quote it") from None
        section = values
        for part in parts[:-1]:
            section = section.setdefault(part, {})
            require(isinstance(section, dict), "overrides", "must set each field once", item, "leave one of them out")
        require(parts[-1] not in section, "overrides", "must set each field once", item, "leave one of them out")
        section[parts[-1]] = value
    return values


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _known_fields(cls: type, values: Any, path: str) -> dict[str, dataclasses.Field[Any]]:
    """The fields of a config by name, where `values` is a mapping of some of them and of nothing else."""
    require(isinstance(values, Mapping), path or "recipe", "must be a mapping of field to value", values)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    for key in values:
        if key not in fields:
            near = difflib.get_close_matches(str(key), list(fields), n=1, cutoff=0.5)
            fix = f"did you mean {_join(path, near[0])!r}?" if near else f"known: {', '.join(fields)}"
            raise ConfigError(f"unknown key {_join(path, str(key))!r}; {fix}")
    return fields


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
        of_key, of_item = get_args(hint)
        return {
            _coerce(of_key, key, f"a key of {path}"): _coerce(of_item, item, _join(path, key))
            for key, item in value.items()
        }
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
    if hint is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        # YAML 1.1 reads `1e-4` (no dot) as a string: a learning rate is the value that people write so.
        with contextlib.suppress(ValueError, OverflowError):
            value = float(value)
    if hint is bool and isinstance(value, str) and value.lower() in _YES + _NO:
        value = value.lower() in _YES
    ok = isinstance(value, hint) and not (hint is int and isinstance(value, bool))
    is_number = isinstance(value, (bool, int, float))
    fix = "put it in quotes" if hint is str and is_number else ""
    require(ok, path, f"must be of type {hint.__name__}", value, fix)
    require(not isinstance(value, float) or math.isfinite(value), path, "must be a finite number", value)
    return value
