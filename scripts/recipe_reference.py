"""Write docs/recipe.md from the schema of recipes; with `--check` fail where the page is stale, for `make check`."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slipstream.config import LARGEST, read_mapping
from slipstream.recipe import CONFIGS, recipe_schema

_PAGE = Path("docs/recipe.md")
_COMMAND = "PYTHONPATH=. python scripts/recipe_reference.py"
_INTRODUCTION = f"""\
# Recipe reference

<!-- Written by `{_COMMAND}` from the config classes; change those. -->

A recipe is a YAML file that says everything a run depends on. It is sparse: a field that it leaves out has its default.
The section `workloads` holds changes that belong to one workload, as `workloads: {{rl_think: {{grpo: {{seed: 1}}}}}}`.
`slipstream check RECIPE` checks a file without running it. `slipstream schema > recipe.schema.json` writes the JSON
schema that the first line of each shipped recipe names: editors with a YAML language server then complete and check.

The last column names the shipped recipes that set a field, or says who sets it and why.
"""
_HEAD = "| field | type | default | meaning | set by |\n|---|---|---|---|---|"

Schema = Mapping[str, Any]
_MAPPINGS = ("chat_template_args", "config", "where")
"""Fields that hold a mapping and are no sections."""


def page() -> str:
    """The whole page."""
    schema, used = recipe_schema(), uses()
    parts = [_INTRODUCTION]
    for names, section in sections(schema).items():
        title = ", ".join(f"`{name}`" for name in names) or "The recipe itself"
        rows = [row(names, name, each, used) for name, each in fields(schema, section)]
        parts.append("\n".join([f"## {title}", "", " ".join(section["description"].split()), "", _HEAD, *rows, ""]))
    return "\n".join(parts)


def uses() -> dict[str, list[str]]:
    """The shipped recipes that set a field, by its dotted name; `[]` marks the items of a list."""
    found: dict[str, list[str]] = {}
    for path in sorted(CONFIGS.glob("*.yaml")):
        values = read_mapping(path, "recipe")
        workloads = values.pop("workloads", {})
        for name in dict.fromkeys(name for each in (values, *workloads.values()) for name in _names(each)):
            found.setdefault(name, []).append(path.stem)
    return found


def _names(values: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for key, value in values.items():
        name = f"{path}{key}"
        if isinstance(value, Mapping) and key not in _MAPPINGS:
            yield from _names(value, f"{name}.")
            continue
        yield name
        for item in value if isinstance(value, list) else ():
            yield from _names(item, f"{name}[].") if isinstance(item, Mapping) else ()


def sections(schema: Schema) -> dict[tuple[str, ...], dict[str, Any]]:
    """The config classes by the dotted names of the fields that hold them, each before those below it.

    A class has under `places` the schemas of these fields, which may have other defaults for its own fields.
    """
    names: dict[str, list[str]] = {"": []}
    found: dict[str, dict[str, Any]] = {}

    def visit(title: str, section: dict[str, Any], path: str, place: dict[str, Any]) -> None:
        names.setdefault(title, []).extend([path] if path else [])
        found.setdefault(title, {**section, "places": {}})["places"][path] = place
        for name, each in section["properties"].items():
            for part in (each, each.get("items", {}), *each.get("anyOf", ())):
                below = schema["$defs"].get(part.get("$ref", "").rpartition("/")[2], {})
                if "properties" in below:
                    child = f"{path}.{name}" if path else name
                    visit(below["title"], below, f"{child}[]" if "items" in each else child, each)

    visit("", dict(schema), "", {})
    return {tuple(names[title]): section for title, section in found.items()}


def fields(schema: Schema, section: Schema) -> Iterator[tuple[str, dict[str, Any]]]:
    """The fields of a section that are no sections themselves, each with its schema and those it refers to."""
    for name, each in section["properties"].items():
        whole = _resolved(schema, each)
        if all("properties" not in part for part in (whole, *whole.get("anyOf", ()))):
            yield name, whole | {"defaults": dict(_defaults(section, name))}


def _defaults(section: Schema, name: str) -> Iterator[tuple[str, str]]:
    """The default of a section's field as text, by the dotted names of the fields that hold the section."""
    for path, place in section["places"].items():
        given = place.get("default")
        if isinstance(given, dict) and name in given:
            yield path, f"`{_yaml(given[name])}`"
        elif name in section.get("required", ()):
            yield path, "required"
        else:
            yield path, f"`{_yaml(section['properties'][name].get('default', {}))}`"


def _resolved(schema: Schema, each: Schema) -> dict[str, Any]:
    found = {**schema["$defs"].get(each.get("$ref", "").rpartition("/")[2], {}), **each}
    if "anyOf" in found:
        found["anyOf"] = [_resolved(schema, part) for part in found["anyOf"]]
    if "items" in found:
        found["items"] = _resolved(schema, found["items"])
    return found


def row(names: tuple[str, ...], name: str, field: Schema, used: Mapping[str, list[str]]) -> str:
    """One field as a row of its section's table."""
    first, *others = dict.fromkeys(field["defaults"].values())
    own = {text: [f"`{path}`" for path, each in field["defaults"].items() if each == text] for text in others}
    default = "; ".join([first, *(f"{text} in {', '.join(places)}" for text, places in own.items())])
    meaning, who = description(field)
    paths = [f"{path}.{name}" for path in names] or [name]
    recipes = ", ".join(dict.fromkeys(recipe for path in paths for recipe in used.get(path, ())))
    return f"| `{name}` | {type_text(field)} | {default} | {meaning} | {' · '.join(filter(None, (recipes, who)))} |"


def description(field: Schema) -> tuple[str, str]:
    """A field's meaning, and the sentence that says who sets it and why, empty where there is none."""
    meaning, _, who = re.sub(r"(?<=\.) (?=Set )", "\n", field["description"]).partition("\n")
    return meaning, who


def type_text(field: Schema) -> str:
    """Type and range of a field, as `integer >= 1 or null`."""
    if "anyOf" in field:
        return " or ".join(type_text(part) for part in field["anyOf"])
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if field["type"] == "array":
        return "list of mappings" if "properties" in field["items"] else f"list of {type_text(field['items'])}"
    kind = {"string": "text", "boolean": "`true` or `false`", "object": "mapping"}.get(field["type"], field["type"])
    return " ".join(filter(None, (kind, range_text(field))))


def range_text(field: Schema) -> str:
    """The range of a number, as `in (0, 1]` or `>= 1`; empty without bounds of its own."""
    low, high = field.get("exclusiveMinimum", field.get("minimum")), field.get("exclusiveMaximum", field.get("maximum"))
    high = None if high is not None and high >= LARGEST else high
    is_open = "exclusiveMinimum" in field, "exclusiveMaximum" in field
    if low is not None and high is not None:
        return f"in {'(' if is_open[0] else '['}{low:g}, {high:g}{')' if is_open[1] else ']'}"
    bound = "" if low is None else f"{'>' if is_open[0] else '>='} {low:g}"
    return f"{bound}, a multiple of {field['multipleOf']}" if "multipleOf" in field else bound


def _yaml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_yaml, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_yaml(each)}' for key, each in value.items() if each not in (None, {}))}}}"
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) and value else json.dumps(value)


def main() -> None:
    """Write the page of the working directory's checkout, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help=f"fail where {_PAGE} is stale")
    text = page()
    if not parser.parse_args().check:
        _PAGE.write_text(text)
    elif _PAGE.read_text() != text:
        sys.exit(f"{_PAGE} must be what the schema of recipes says, got an older page: run {_COMMAND}")


if __name__ == "__main__":
    main()
