"""Strict configs: dataclasses that pydantic validates, with errors that name field, rule, value and fix.

Every config class of the library stands beside the code that it configures; this file only knows how to read one. A
field's type has its range; the docstring below it describes it, in JSON schemas and in docs/recipe.md too.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import operator
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import pydantic
import yaml
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

T = TypeVar("T")

LARGEST = 2**31 - 1
"""Largest number of a config but its seeds: engines count in 32 bits, and no clock waits for more seconds."""
_LARGEST_SEED = 2**63 - 1  # generators and Flyte take no more
_YES, _NO = ("true", "yes", "on"), ("false", "no", "off")
_Parser: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C: several times as fast, and the same values


class ConfigError(ValueError):
    """A value that the user gave and that breaks a rule."""


class _BrokenRuleError(ConfigError):
    """A broken rule of a section, which knows only the name that its class has: `text` begins below it."""

    def __init__(self, path: str, text: str) -> None:
        super().__init__(_join(path, text))
        self.text = text


class _SafeLoader(_Parser):
    """Plain values alone, and of unquoted words only what YAML 1.1 and 1.2 read alike.

    `off`, `no`, `010`, `12:30:00` and `2026-11-25` are the words that were typed: YAML 1.1 makes False, 8, 45000 and a
    date of them. A key that stands twice in a mapping is an error; one that overrides a merged one (`<<`) is none.
    """

    yaml_implicit_resolvers: typing.ClassVar[dict[str, Any]] = {}

    def construct_document(self, node: yaml.Node) -> Any:
        _check_keys(node, "", set())
        return super().construct_document(node)


for _tag, _form in {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?(?:0|[1-9][0-9_]{0,99}|0x[0-9a-fA-F]{1,16})",
    "float": r"[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+][0-9]+)?|\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
    "merge": r"<<",
}.items():
    _SafeLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_form})\Z"), None)


def require(condition: bool, field: str, rule: str, value: object, fix: str = "") -> None:
    """Raise a `ConfigError` that reads `<field> <rule>, got <value>; <fix>` unless `condition` holds."""
    if not condition:
        raise ConfigError(f"{field} {rule}, got {value!r}" + (f"; {fix}" if fix else ""))


def _not_a_switch(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("must be of type float")
    return value


def _switch(value: Any) -> Any:
    word = value.lower() if isinstance(value, str) else None
    return word in _YES if word in _YES + _NO else value


NUMBER = BeforeValidator(_not_a_switch)
"""Last part of the type of a field that holds a float: pydantic takes `true` for 1.0."""
SWITCH = BeforeValidator(_switch)
"""Last part of the type of a field that may hold a switch: `off` is text, which is true to whoever tests it."""

Int = Annotated[int, Field(strict=True, le=LARGEST)]
PositiveInt = Annotated[Int, Field(ge=1)]
NonNegativeInt = Annotated[Int, Field(ge=0)]
Seed = Annotated[int, Field(strict=True, ge=0, le=_LARGEST_SEED)]
PositiveFloat = Annotated[float, Field(gt=0, le=LARGEST), NUMBER]
NonNegativeFloat = Annotated[float, Field(ge=0, le=LARGEST), NUMBER]
Fraction = Annotated[float, Field(gt=0, lt=1), NUMBER]
"""Floats in (0, 1)."""
Rate = Annotated[float, Field(gt=0, le=1), NUMBER]
"""Floats in (0, 1]."""
Probability = Annotated[float, Field(ge=0, le=1), NUMBER]
"""Floats in [0, 1]."""
Text = Annotated[str, Field(min_length=1)]
Switch = Annotated[bool, Field(strict=True), SWITCH]
"""Booleans, also in the words of YAML 1.1: `on`, `off`, `yes`, `no`."""


class Fix(str):
    """Advice that an error of a field ends with; it stands in the field's `Annotated`."""

    __slots__ = ()


class rule:  # noqa: N801  # reads as `Annotated[str, rule("must ...", ...)]`
    """A rule that no type and no range says, for `Annotated`; an error has its text.

    A JSON schema has it as `keywords`, or, without any, in the field's description.
    """

    def __init__(self, text: str, holds: Callable[[Any], bool], **keywords: Any) -> None:
        self.text, self._holds, self.keywords = text, holds, keywords

    def _check(self, value: Any) -> Any:
        if not self._holds(value):
            raise ValueError(self.text)
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: pydantic.GetCoreSchemaHandler) -> Any:
        """Validate by the type first, then by the rule."""
        return AfterValidator(self._check).__get_pydantic_core_schema__(source, handler)

    def __get_pydantic_json_schema__(self, core: Any, handler: pydantic.GetJsonSchemaHandler) -> dict[str, Any]:
        """Add the keywords."""
        return {**handler(core), **self.keywords}


class Defaults:
    """Defaults of a section that several fields share, for the `Annotated` of one of these fields.

    They lie under what a mapping gives; fields without any keep the defaults of their class.
    """

    def __init__(self, **values: Any) -> None:
        self.values = values

    def _fill(self, value: Any) -> Any:
        return {**self.values, **value} if isinstance(value, Mapping) else value

    def __get_pydantic_core_schema__(self, source: Any, handler: pydantic.GetCoreSchemaHandler) -> Any:
        """Complete a mapping before it is validated."""
        return BeforeValidator(self._fill).__get_pydantic_core_schema__(source, handler)

    def __get_pydantic_json_schema__(self, core: Any, handler: pydantic.GetJsonSchemaHandler) -> dict[str, Any]:
        """Add the defaults."""
        return {**handler(core), "default": self.values}


def section() -> Any:
    """Give a field that holds a section, with its `Defaults` if it has any, the section without changes."""
    return Field(default_factory=dict, validate_default=True)


@typing.dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field, Field))
class Checked:
    """A frozen config dataclass that pydantic validates whenever one is made, `dataclasses.replace` included.

    `path` is the config's name in errors.
    """

    if typing.TYPE_CHECKING:
        __dataclass_fields__: typing.ClassVar[dict[str, dataclasses.Field[Any]]]
    _path = ""

    def __init_subclass__(cls, *, path: str = "") -> None:
        cls._path = path
        dataclass(cls, frozen=True, kw_only=True, config=_STRICT)
        validate = cls.__init__

        def init(self: Any, **values: Any) -> None:
            try:
                validate(self, **values)
            except ValidationError as error:
                raise _refusal(cls, _problems(error)[0], path) from None

        cls.__init__ = init

    def __post_init__(self) -> None:
        self._check()

    def _require(self, condition: bool, field: str, rule: str, fix: str = "") -> None:
        """Refuse the value of `field`, a name of the config or one below it, unless `condition` holds."""
        value = operator.attrgetter(field)(self)
        try:
            require(condition, field, rule, value.value if isinstance(value, enum.Enum) else value, fix)
        except ConfigError as error:
            raise _BrokenRuleError(self._path, str(error)) from None

    def _check(self) -> None:
        """Refuse values that do not go together, where a config has such rules."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: pydantic.GetJsonSchemaHandler) -> dict[str, Any]:
        """Describe each field in a JSON schema by the docstring below it."""
        schema = handler(core)
        properties = handler.resolve_ref_schema(schema)["properties"]
        for name, hint in get_type_hints(cls, include_extras=True).items():
            if "description" in properties.get(name, {}):
                rules = [part for part in _parts(hint) if isinstance(part, rule) and not part.keywords]
                text = " ".join(properties[name]["description"].split())
                meaning, *who = re.split(r"(?<=\.) (?=Set )", text, maxsplit=1)
                properties[name]["description"] = " ".join([meaning, *(f"It {each.text}." for each in rules), *who])
        return schema


_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


def from_mapping(cls: type[T], values: Mapping[str, Any], path: str = "") -> T:
    """Build the dataclass `cls` from plain `values`, as YAML or JSON gives them; a nested config is a nested mapping.

    Args:
        path: dotted name of `values` inside the recipe, used in errors.
    Raises:
        ConfigError: an unknown key (the nearest known one is named), a missing field, a value of the wrong type,
            or a rule of the config class that does not hold.
    """
    try:
        return _adapter(cls).validate_python((values,))[0]
    except ValidationError as error:
        raise _refusal(cls, _problems(error, depth=1)[0], path) from None


@cache
def _adapter(cls: type) -> TypeAdapter[tuple[Any]]:
    """Validate a tuple of one `cls`: pydantic gives a dataclass of the standard library no config of its own."""
    return TypeAdapter(typing.cast(Any, types.GenericAlias(tuple, (cls,))), config=_STRICT)


def to_mapping(config: Any, *, exclude_defaults: bool = False) -> dict[str, Any]:
    """Plain JSON-ready mapping of a config: enums as their values, tuples as lists."""
    dump = _adapter(type(config)).dump_python
    return dump((config,), mode="json", warnings=False, exclude_defaults=exclude_defaults)[0]


def merge(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the leaves of `override` laid over it; mappings merge, everything else replaces."""
    merged = dict(base)
    for key, value in override.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def read_yaml(text: str) -> Any:
    """Read YAML, as `_SafeLoader` says; a `yaml.YAMLError` where the text is none, or a key stands twice."""
    try:
        return yaml.load(text, Loader=_SafeLoader)
    except (ValueError, LookupError, AttributeError, RecursionError) as error:  # a value that its tag cannot have
        raise yaml.YAMLError(f"{type(error).__name__}: {error}") from error


def read_mapping(path: Path, what: str) -> dict[str, Any]:
    """Read the mapping that a YAML file in UTF-8 holds; `what` is the file's name in errors, as in `recipe`."""
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
    """Refuse keys that the config `cls` does not have, here and in the configs below it; values are not looked at."""
    try:
        _adapter(cls).validate_python((values,))
    except ValidationError as error:
        for problem in _problems(error, depth=1):
            is_section = problem["type"] == "dataclass_type" and problem["input"] is not None
            if problem["type"] in _UNKNOWN or is_section:
                raise _refusal(cls, problem, path) from None


_LEAST_LIKENESS = 0.5  # of an unknown key to the name that its error suggests
_UNKNOWN = ("unexpected_keyword_argument", "invalid_key")
_BOUND = {
    "greater_than": "> {gt}",
    "greater_than_equal": ">= {ge}",
    "less_than": "< {lt}",
    "less_than_equal": "<= {le}",
}
_TYPES = {"int": "int", "float": "float", "bool": "bool", "string": "str"}
_RULES = {
    "missing": "is required",
    "enum": "must be one of {expected}",
    "literal_error": "must be one of {expected}",
    "finite_number": "must be a finite number",
    "multiple_of": "must be a multiple of {multiple_of}",
    "too_short": "must not be empty",
    "string_too_short": "must not be empty",
    "dataclass_type": "must be a mapping of field to value",
    "dict_type": "must be a mapping",
    "tuple_type": "must be a list",
    "value_error": "{error}",
    **{kind: f"must be {rule}" for kind, rule in _BOUND.items()},
    **{f"{kind}_{what}": f"must be of type {name}" for kind, name in _TYPES.items() for what in ("type", "parsing")},
}
"""Rules by the type of pydantic's error, which gives the values in braces; for another error pydantic has the words."""


def _problems(error: ValidationError, *, depth: int = 0) -> list[Any]:
    """Everything that pydantic found wrong `depth` levels down, unknown keys first: they explain what is missing."""
    found = [{**each, "loc": each["loc"][depth:]} for each in error.errors(include_url=False)]
    return sorted(found, key=lambda problem: problem["type"] not in _UNKNOWN)


def _refusal(cls: type, problem: Mapping[str, Any], path: str) -> ConfigError:
    """An error of pydantic's about a `cls` at `path`, as field, rule, value and fix."""
    kind, loc, value, context = problem["type"], problem["loc"], problem["input"], problem.get("ctx", {})
    broken = context.get("error")
    if isinstance(broken, _BrokenRuleError) and (loc or path):
        return ConfigError(_join(_dotted(path, loc), broken.text))
    if isinstance(broken, ConfigError):
        return broken
    if kind in _UNKNOWN:
        return _unknown_key(cls, loc[:-1], str(loc[-1]), path)
    shown = {key: f"{each:.15g}" if isinstance(each, float) else str(each) for key, each in context.items()}
    if "expected" in shown:
        shown["expected"] = shown["expected"].replace("'", "").replace(" or ", ", ")
    text = f"must fit: {problem['msg']}" if kind not in _RULES else _RULES[kind].format(**shown)
    declared = _declared(cls, loc)
    fix = "" if kind.endswith("_type") else next((each for each in declared if isinstance(each, Fix)), "")
    if kind == "missing":
        value, fix = None, "set it"
    elif kind == "string_type" and isinstance(value, (bool, int, float)):
        fix = "put it in quotes"
    elif kind in _BOUND and type(None) in declared and isinstance(loc[-1], str) and not fix:
        text += " or null"
    return ConfigError(f"{_dotted(path, loc)} {text}, got {value!r}" + (f"; {fix}" if fix else ""))


def _unknown_key(cls: type, loc: Sequence[int | str], key: str, path: str) -> ConfigError:
    config = next(filter(_is_config, _declared(cls, loc)))
    known = [field.name for field in dataclasses.fields(config)]
    near = max(_names(config), key=lambda name: _likeness(key, name))
    is_near = _likeness(key, near) >= _LEAST_LIKENESS
    fix = f"did you mean {_dotted(path, (*loc, near))!r}?" if is_near else f"known: {', '.join(known)}"
    return ConfigError(f"unknown key {_dotted(path, (*loc, key))!r}; {fix}")


def _likeness(key: str, name: str) -> float:
    """Return the likeness of a key to a known name, or to the last part of one below it; 1 if they are equal."""
    words = (name,) if "." not in name else (name.rpartition(".")[2], name.replace(".", "_"))
    best = max(difflib.SequenceMatcher(None, word, key).ratio() for word in words)
    return best if "." not in name else 0.9 * best * (best >= 0.8)


def _names(config: type) -> list[str]:
    """Names of the fields of a config and, with dots, of the configs below it, the nearer ones first."""
    found, waiting = list[str](), [("", config)]
    for path, each in waiting:
        for name, hint in get_type_hints(each, include_extras=True).items():
            if name in each.__dataclass_fields__:
                found.append(_join(path, name))
                waiting += [(found[-1], below) for below in filter(_is_config, _parts(hint))][:1]
    return found


def _declared(cls: type, loc: Sequence[int | str]) -> list[Any]:
    """Every part of the type of the field at `loc`: members of unions, items of lists, what `Annotated` adds."""
    parts: list[Any] = [cls]
    for name in loc:
        config = next(filter(_is_config, parts), None)
        hints = {} if config is None else get_type_hints(config, include_extras=True)
        parts = list(_parts(hints[name])) if name in hints else parts
    return parts


def _is_config(part: Any) -> bool:
    return isinstance(part, type) and dataclasses.is_dataclass(part)


def _parts(hint: Any) -> Iterator[Any]:
    yield hint
    for each in get_args(hint):
        yield from _parts(each)


def _dotted(path: str, loc: Sequence[int | str]) -> str:
    """The name of what stands at `loc` below `path`: `data.train[0].path`."""
    if loc[-1:] == ("[key]",):
        return f"a key of {_dotted(path, loc[:-2])}"
    for part in loc:
        path = f"{path}[{part}]" if isinstance(part, int) else _join(path, part)
    return path or "recipe"


def _check_keys(node: yaml.Node, path: str, seen: set[int]) -> None:
    """Refuse a key that stands twice in a mapping, at any depth; `seen` has the ids of nodes that are checked."""
    if id(node) in seen:  # an alias is the very node of its anchor
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            _check_keys(item, f"{path}[{number}]", seen)
    elif isinstance(node, yaml.MappingNode):
        lines: dict[tuple[str, str], int] = {}
        for key, item in node.value:
            name, line = _join(path, str(key.value)), key.start_mark.line + 1
            if (first := lines.get((key.tag, name))) is not None:
                raise yaml.YAMLError(
                    f"the key {name!r} stands twice, in lines {first} and {line}; leave one of them out"
                )
            lines[key.tag, name] = line
            _check_keys(item, name, seen)


def parse_overrides(items: Iterable[str]) -> dict[str, Any]:
    """The nested mapping of overrides as people type them, each field once: `grpo.group_size=16`, the value in YAML.

    Whether the fields exist and take such values is for whoever reads the mapping.
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
