"""Tables of what is refused: a line of overrides, and below it, indented, the lines of what the error says."""

from __future__ import annotations

import pytest

from slipstream.config import ConfigError, parse_overrides
from slipstream.recipe import load_recipe


def rows(text: str) -> pytest.MarkDecorator:
    """Parametrise a test over the rows of a table: `given` is its overrides, and `expected` the error in one line."""
    table: list[list[str]] = []
    for line in text.strip().splitlines():
        if line.startswith(" "):
            table[-1].append(line.strip())
        else:
            table.append([line])
    return pytest.mark.parametrize(("given", "expected"), [(given, " ".join(said)) for given, *said in table])


def refused(given: str, recipe: str = "tiny") -> str:
    """What the recipe says of overrides that it refuses; ` + ` stands between them."""
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe, overrides=parse_overrides(given.split(" + ")))
    return str(caught.value)
