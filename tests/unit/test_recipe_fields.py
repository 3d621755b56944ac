"""Changing any field of a recipe changes what somebody is handed or computes; `recipe_fields/` says what, by section.

A check names another value and a probe: a cheap view of the code that reads the field. A field that has no check, or
whose change its probe does not see, fails. `Recipe.fingerprint` is no probe: it reads everything.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

import slipstream
from scripts.budgets import recipe_fields
from slipstream.config import ConfigError
from slipstream.recipe import Recipe
from tests.unit.recipe_fields import data, draft, judging, policy, tracking, training, workers
from tests.unit.recipe_fields.base import Tools, outcome, recipe_with

CHECKS = {
    **workers.CHECKS,
    **policy.CHECKS,
    **data.CHECKS,
    **draft.CHECKS,
    **training.CHECKS,
    **judging.CHECKS,
    **tracking.CHECKS,
}
REFUSED = {"sampling.top_p": 0.9, "sampling.top_k": 5}  # the learner's logprobs know no truncation


def leaves(cls: type, path: str = "") -> Iterator[str]:
    """Dotted names of a config's fields, those of nested configs in place of them; `[]` marks a list's items."""
    for name, hint in typing.get_type_hints(cls).items():
        nested = [each for each in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(each)]
        is_list = typing.get_origin(hint) is tuple
        if not nested or is_list:
            yield path + name
        if nested:
            yield from leaves(typing.cast(type, nested[0]), f"{path}{name}{'[]' if is_list else ''}.")


def test_every_field_of_a_recipe_has_a_check() -> None:
    assert sorted([*CHECKS, *REFUSED]) == sorted(leaves(Recipe))


def test_the_budget_counts_every_field_of_a_recipe() -> None:
    library = Path(slipstream.__file__).parent
    assert sorted(recipe_fields(library)) == sorted(leaf.replace("[]", "") for leaf in leaves(Recipe))


@pytest.mark.parametrize("field", CHECKS)
def test_changing_a_field_changes_something(field: str, tmp_path: Path) -> None:
    value, probe, also, along = CHECKS[field]
    name = field.partition("[]")[0]
    drop = {"policy.scratch": None} if field == "policy.model" else {}
    seen = []
    for number, changes in enumerate((also, also, {**also, **along, **drop, name: value})):
        directory = tmp_path / str(number)
        directory.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            view = outcome(probe, recipe_with(changes), Tools(directory, patch))
            seen.append(view.replace(str(directory), "here"))
    assert seen[0] == seen[1], "the probe sees something else than the recipe"
    assert seen[0] != seen[2]


@pytest.mark.parametrize("field", [name for name, check in CHECKS.items() if check.along])
def test_a_field_that_others_follow_is_refused_alone(field: str) -> None:
    value, _, also, along = CHECKS[field]
    for changes in ({field: value}, along):
        with pytest.raises(ConfigError):
            recipe_with({**also, **changes})


@pytest.mark.parametrize("field", REFUSED)
def test_a_field_with_one_right_value_refuses_every_other(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        recipe_with({field: REFUSED[field]})
