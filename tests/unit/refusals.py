"""Tables of what is refused: a line of overrides, and behind ` => ` or below it, indented, what the error says."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

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
            table.append(line.split(" => "))
    return pytest.mark.parametrize(("given", "expected"), [(given, " ".join(said)) for given, *said in table])


def overrides(given: str, named: Mapping[str, Sequence[str]] = MappingProxyType({})) -> dict[str, Any]:
    """The overrides of a row, between which ` + ` stands; a word of `named` is several of them."""
    return parse_overrides(each for word in given.split(" + ") for each in named.get(word, (word,)))


def refused(given: str, named: Mapping[str, Sequence[str]] = MappingProxyType({})) -> str:
    """What the recipe says of overrides that it refuses."""
    with pytest.raises(ConfigError) as caught:
        load_recipe("tiny", overrides=overrides(given, named))
    return str(caught.value)
