"""Changing any field of a recipe changes what somebody is handed or computes; `recipe_fields/` says what, by section.

A check names another value and a probe: a cheap view of the code that reads the field. A field that has no check, or
whose change its probe does not see, fails. `Recipe.fingerprint` is no probe: it reads everything.
"""

import dataclasses
import math
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.budgets import recipe_fields
from slipstream.config import ConfigError, from_mapping, merge, read_yaml
from slipstream.kubernetes.profile import ClusterProfile
from slipstream.recipe import Recipe, load_recipe, recipe_schema
from tests.unit.recipe_fields import data, draft, judging, policy, tracking, training, workers
from tests.unit.recipe_fields.base import Tools, outcome, recipe_with

CHECKS = workers.CHECKS | policy.CHECKS | data.CHECKS | draft.CHECKS
CHECKS |= training.CHECKS | judging.CHECKS | tracking.CHECKS
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


def test_every_field_of_a_recipe_has_a_check_and_is_counted_by_the_budget() -> None:
    assert sorted([*CHECKS, *REFUSED]) == sorted(leaves(Recipe))
    names = {leaf.rpartition(".")[2].removesuffix("[]") for leaf in leaves(Recipe)}
    counted = [field.partition(".")[2] for field in recipe_fields(recipe_schema())]
    lists_of_sections = {"train", "validation", "draft_in_domain", "draft_general", "examples", "functions"}
    assert set(counted) == names - lists_of_sections


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


NO_NUMBER_OF_A_RUN = (-1, math.nan, -math.inf, 2**63)
MAY_BE_0 = ("storage.group", "cpu.shared_memory_gib", "head.shared_memory_gib")
PROFILE = read_yaml(
    """
name: own
run_root: /shared/runs
cpu: {cpus: 4, memory_gib: 16}
head: {cpus: 4, memory_gib: 16}
gpu:
  {nodes: 2, gpus_per_node: 4, product: GB200, architecture: arm64, rdma_resources: {rdma/ib: 4},
   pod: {cpus: 4, memory_gib: 16, shared_memory_gib: 4}}
storage: {claim: runs, mount_path: /shared}
ray_token_secret: token
"""
)


def numbers(cls: type) -> dict[str, typing.Any]:
    """Dotted names of a config's numbers, and their types."""
    found = {}
    for name in leaves(cls):
        hint: typing.Any = cls
        for part in name.replace("[]", "").split("."):
            nested = next(each for each in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(each))
            hint = typing.get_type_hints(nested)[part]
        parts = typing.get_args(hint)
        if {int, float} & {hint, *parts, *(each for part in parts for each in typing.get_args(part))}:
            found[name] = hint
    return found


def with_number(name: str, hint: typing.Any, value: float) -> dict[str, typing.Any]:
    """What a recipe or a profile says that gives one of its numbers this value."""
    held: typing.Any = value
    if "dict[" in str(hint):
        held = {"rdma/ib": value}
    elif "tuple[" in str(hint):
        held = [value]
    if name.startswith("policy.rope."):
        return {"policy": {"rope": {"type": "yarn", "factor": 2.0, name.rpartition(".")[2]: held}}}
    for part in reversed(name.split(".")):
        held = {part: held} if "[]" not in part else {part.removesuffix("[]"): [{"path": "synthetic", **held}]}
    return held


def read_with(cls: type, changes: dict[str, typing.Any]) -> None:
    if cls is Recipe:
        load_recipe("tiny", overrides=changes)
    else:
        from_mapping(cls, merge(PROFILE, changes))


def test_the_numbers_of_recipes_and_profiles_are_found() -> None:
    assert len(numbers(Recipe)) > 150
    some = {"grpo.seed", "tuning.candidate_ks", "grpo.loss.mask_band", "data.train[].max_rows"}
    assert some <= numbers(Recipe).keys()
    assert {"gpu.rdma_resources", "storage.group", "parallel_parts", *MAY_BE_0} <= numbers(ClusterProfile).keys()


@pytest.mark.parametrize(
    ("cls", "name", "hint"),
    [(cls, name, hint) for cls in (Recipe, ClusterProfile) for name, hint in numbers(cls).items()],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_no_number_is_taken_that_no_run_could_have(cls: type, name: str, hint: typing.Any) -> None:
    """`test_ranges.py` has the ranges of sections; of lists and of profiles 0 is tried here."""
    may_be_0 = name in MAY_BE_0 or (cls is Recipe and "[]" not in name)
    for value in (*NO_NUMBER_OF_A_RUN, *(() if may_be_0 else (0,))):
        with pytest.raises(ConfigError) as caught:
            read_with(cls, with_number(name, hint, value))
        leaf = name.rpartition(".")[2]
        assert leaf in str(caught.value), f"{value}: the error names another field"
