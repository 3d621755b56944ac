"""The JSON schema of recipe files says of a file what the library says, and docs/recipe.md is written from it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from scripts import recipe_reference
from slipstream.config import merge, read_yaml
from slipstream.recipe import CONFIGS, recipe_file_schema, recipe_schema
from slipstream.types import Workload
from tests.unit.conftest import Command

SCHEMA = recipe_schema()
FILE = recipe_file_schema()
TINY = read_yaml((CONFIGS / "tiny.yaml").read_text())


def leaves() -> Iterator[tuple[str, list[str], dict[str, Any]]]:
    """Each leaf of a recipe: the first of its dotted names, all of them, and its schema."""
    for names, section in recipe_reference.sections(SCHEMA).items():
        for name, field in recipe_reference.fields(SCHEMA, section):
            dotted = [f"{each}.{name}" for each in names] or [name]
            yield dotted[0], dotted, field


NAMES = {leaf: names for leaf, names, _ in leaves()}
LEAVES = {leaf: field for leaf, _, field in leaves()}
USES = recipe_reference.uses()


EXAMPLES = CONFIGS.parent.glob("examples/*/*.yaml")


@pytest.mark.parametrize("path", sorted([*CONFIGS.glob("*.yaml"), *EXAMPLES]), ids=lambda path: str(path.parent.stem))
def test_every_shipped_recipe_satisfies_the_schema_that_its_first_line_names(path: Path) -> None:
    text = path.read_text()
    up = "../" * len(path.relative_to(CONFIGS.parent).parents[1:])
    assert text.startswith(f"# yaml-language-server: $schema={up}recipe.schema.json\n")
    Draft202012Validator(FILE).validate(read_yaml(text))


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ("{base: tiny, name: mine, grpo: {num_steps: 3}}", True),
        ("{base: tiny, name: mine, workload: rl_think, workloads: {rl_think: {grpo: {num_steps: 3}}}}", True),
        ("{base: tiny}", False),
        ("{name: mine}", False),
        ("{base: tiny, name: mine, grpo: {num_steps: 0}}", False),
        ("{base: tiny, name: mine, gpro: {}}", False),
    ],
)
def test_a_file_with_a_base_says_only_what_it_changes(text: str, is_right: bool) -> None:
    assert Draft202012Validator(FILE).is_valid(read_yaml(text)) is is_right


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"grpo": {"gruop_size": 4}}, ["grpo"]),
        *(({"grpo": {"group_size": each}}, ["grpo", "group_size"]) for each in (1, "8")),
        ({"grpo": {"optimizer": {"learning_rate": 2}}}, ["grpo", "optimizer", "learning_rate"]),
        ({"draft": {"eagle3": {"loss": "mse"}}}, ["draft", "eagle3", "loss"]),
        ({"loop": {"mode": "overlapped"}}, ["loop", "mode"]),
        ({"data": {"train": []}}, ["data", "train"]),
        *(({name: None}, [name]) for name in ("name", "engine")),
        ({"workloads": {"rl_thnk": {}}}, ["workloads"]),
        ({"grpo": {"optimizer": {"betas": [0.9, 1.0]}}}, ["grpo", "optimizer", "betas", 1]),
        ({"grpo": {"optimizer": {"betas": [0.9]}}}, ["grpo", "optimizer", "betas"]),
        ({"grpo": {"loss": {"mask_band": [0.5, 1.0]}}}, ["grpo", "loss", "mask_band"]),
        ({"sampling": {"temperature": 0.005}}, ["sampling", "temperature"]),
        *(({"data": {"instruction": each}}, ["data", "instruction"]) for each in ("none", "{problem} {problem}")),
        *(
            ({"workloads": {"rl_think": each}}, ["workloads", "rl_think"])
            for each in ({"grpo": {"group_size": 1}}, {"workload": "rl_zero"})
        ),
    ],
)
def test_a_recipe_that_breaks_a_rule_breaks_the_schema_there(change: dict[str, Any], where: list[Any]) -> None:
    Draft202012Validator.check_schema(FILE)
    (error,) = Draft202012Validator(FILE).iter_errors(merge(TINY, change))
    assert list(error.absolute_path) == where


@pytest.mark.parametrize(
    "change",
    [
        {"draft": {"online": {"optimizer": {"method": "muon"}}, "draft_model": {"shape": {"num_layers": 1}}}},
        {"grpo": {"loss": {"mask_band": [0.5, 2.0]}}},
        {"data": {"instruction": "Solve\n{problem} in {brackets}"}},
        {"sampling": {"temperature": 0.01}, "evaluation": {"sampling": {"temperature": 0}}},
    ],
)
def test_a_change_of_a_few_fields_satisfies_the_schema(change: dict[str, Any]) -> None:
    Draft202012Validator(FILE).validate(merge(TINY, change))


def test_a_section_of_a_workload_need_not_repeat_what_the_recipe_says() -> None:
    assert set(FILE["properties"]["workloads"]["properties"]) == set(Workload)
    own = {"rl_zero": {"grpo": {"seed": 1}}, "rl_think": None}
    Draft202012Validator(FILE).validate(merge(TINY, {"workloads": own}))
    without = {name: value for name, value in TINY.items() if name != "grpo"}
    assert not Draft202012Validator(FILE).is_valid(without)


@pytest.mark.parametrize("leaf", LEAVES)
def test_each_field_has_a_sentence_and_is_set_by_a_shipped_recipe_or_says_who_sets_it(leaf: str) -> None:
    meaning, who = recipe_reference.description(LEAVES[leaf])
    assert meaning.endswith(".")
    assert len(meaning.split()) <= 25
    assert who or any(name in USES for name in NAMES[leaf]), "add a sentence that begins with Set"


def test_a_rule_without_keywords_is_told_in_the_description_and_a_row_has_all_that_a_user_asks() -> None:
    used = {"grpo.group_size": ["mine"]}
    field = LEAVES["grpo.group_size"]
    assert recipe_reference.row(("grpo",), "group_size", field, used) == (
        "| `group_size` | integer >= 2 | required | Rollouts of each prompt, on whose mean reward advantages are "
        "centred. | mine |"
    )
    row = recipe_reference.row(("learner",), "logprob_chunk_tokens", LEAVES["learner.logprob_chunk_tokens"], used)
    assert row.startswith("| `logprob_chunk_tokens` | integer >= 1 or null | `null` | ")
    assert row.endswith(" | Set it where logits fill memory. |")
    assert recipe_reference.type_text(LEAVES["sampling.top_p"]) == "number in (0, 1]"
    assert recipe_reference.type_text(LEAVES["grpo.loss.mask_level"]) == "`token`, `sequence`"
    assert "It must rise from 1, without repeats." in LEAVES["tuning.batch_sizes"]["description"]


def test_the_reference_and_the_command_show_the_schema_as_it_is(command: Command) -> None:
    """So a range that changes is seen to change."""
    assert recipe_reference.page() == (CONFIGS.parent / "docs" / "recipe.md").read_text()
    assert json.loads(command("schema")) == FILE
