"""Ranges of a recipe's fields: values on the bounds of the schema, which docs/recipe.md shows, and beside them."""

import dataclasses
import typing
from collections.abc import Iterator
from functools import partial
from typing import Any, get_args

import pytest
from pydantic import TypeAdapter

from slipstream.config import LARGEST, _parts, rule
from slipstream.data.synthetic import Split
from slipstream.recipe import Recipe
from tests.unit.conftest import Refusal

OPTIMIZER = {"learning_rate": 1e-4}
# What a section must be given beside the field that is tested.
GIVEN: dict[str, dict[str, Any]] = {
    "columns": {"problem": "a"},
    "data": {"max_prompt_tokens": 1},
    "data example": {"problem": "a", "response": "b"},
    "data source": {"path": "a/b"},
    "data.synthetic": {"num_conflicting": 0, "num_leaked": 0},
    **{"draft.ngram": {"prompt_lookup_max": 5}, "draft.history": {"match_max": 5}},
    "engine": {"max_model_len": 1, "max_num_seqs": 1},
    "evaluation": {"sampling": {"max_response_tokens": 1}, "num_samples_per_problem": 1},
    "grpo": {"num_steps": 1, "prompts_per_step": 1, "group_size": 2, "optimizer": OPTIMIZER},
    "grpo.loss": {"truncated_importance_sampling": 2.0},
    "loop": {"mode": "one_step_off"},
    "optimizer": OPTIMIZER,
    "policy": {"model": "a/b"},
    "policy.rope": {"type": "yarn", "factor": 2.0},
    "policy.scratch": {"optimizer": {**OPTIMIZER, "warmup_steps": 0}},
    "reward function": {"function": "mathematics"},
    "reward.overlong": {"buffer_tokens": 4},
    "sampling": {"max_response_tokens": 1},
    "shape": {"num_query_groups": 1},
    "simulator": {"model": "tiny", "hardware": "cpu-2core"},
}


def sections(cls: type) -> Iterator[Any]:
    """The classes of all sections of a config."""
    for hint in typing.get_type_hints(cls).values():
        for part in (hint, *get_args(hint)):
            if dataclasses.is_dataclass(part):
                yield part
                yield from sections(typing.cast(type, part))


SECTIONS: dict[str, partial[Any]] = {cls._path: partial(cls, **GIVEN.get(cls._path, {})) for cls in sections(Recipe)}
# By JSON schema's word: how an error says it, its side, and whether a value on it fits.
BESIDE: dict[str, tuple[str, int, bool]] = {
    "minimum": (">=", -1, True),
    "exclusiveMinimum": (">", -1, False),
    "maximum": ("<=", 1, True),
    "exclusiveMaximum": ("<", 1, False),
}
# A configuration that fits the value: rules of several fields are tested where the fields are.
ALONG: dict[str, dict[str, Any]] = {
    "data.synthetic.max_terms": {"min_terms": 2},
    "data.synthetic.num_validation_problems": {"num_leaked": 0},
    "draft.history.match_max": {"match_min": 1},
    "draft.ngram.prompt_lookup_max": {"prompt_lookup_min": 1},
    "draft.pretrain.num_steps": {"num_steps": 1},
    "policy.rope.beta_fast": {"beta_slow": 0.001},
    "policy.rope.low_freq_factor": {"type": "llama3", "high_freq_factor": 5.0},
    "policy.rope.high_freq_factor": {"type": "llama3", "low_freq_factor": 0.001},
    "policy.rope.mscale": {"mscale_all_dim": 1.0},
    "policy.rope.mscale_all_dim": {"mscale": 1.0},
}
TEXTS = (
    *(f"data source.{name}" for name in ("path", "subset", "split", "answer_after", "data_source")),
    *("columns.problem", "columns.answer", "data example.problem", "data example.response", "data.system"),
    *("reward function.function", "reward function.data_source", "reward.function"),
)
# Beyond ranges: the rule, what breaks it, and what does not.
RULES: dict[str, tuple[str, tuple[Any, ...], tuple[Any, ...]]] = {
    **dict.fromkeys((f"data.{split}" for split in get_args(Split)), ("must not be empty", ((),), ())),
    **dict.fromkeys(TEXTS, ("must not be empty", ("",), ("a",))),
    "policy.lora.targets": ("must name each matrix once, got", (("q_proj", "q_proj"),), (("q_proj", "k_proj"),)),
    "data.instruction": ("must hold {problem} exactly once", ("solve", "{problem} {problem}"), ("Q: {problem}",)),
    "grpo.loss.mask_band": (
        "must be two ratios around 1",
        ((0.5,), (-0.1, 2.0), (1.0, 2.0), (0.5, 1.0)),
        ((0.0, 2.0), None),
    ),
    "optimizer.betas": ("must be two numbers in [0, 1)", ((0.9,), (0.9, 1.0), (-0.1, 0.9)), ((0.0, 0.5),)),
    "policy.model": ("must not be empty, got ''; name a hub id, a path, or \"scratch\"", ("",), ("a/b",)),
    "sampling.temperature": ("must be 0 or >= 0.01, got 0.009; vLLM samples at 0.01 instead", (0.009,), (0.0, 0.01)),
    "shape.head_dim": ("must be a multiple of 2", (33,), (2, 6)),
    "tuning.batch_sizes": ("must rise from 1, without repeats", ((), (0, 2), (2, 1), (2, 2)), ((1,), (4, 16))),
}


def properties(section: str) -> dict[str, dict[str, Any]]:
    return TypeAdapter(typing.cast(type, SECTIONS[section].func)).json_schema()["properties"]


def bounds() -> Iterator[Any]:
    """Each bound of each field: what an error says, a value beside it, and one on it."""
    for section in SECTIONS:
        for name, schema in properties(section).items():
            for part in (schema, *schema.get("anyOf", ())):
                step = 1 if part.get("type") == "integer" else 0.001
                for word, (sign, side, fits) in BESIDE.items():
                    if word not in part or (word == "maximum" and part[word] == LARGEST):
                        continue
                    off = part[word] + side * step
                    beside, on = (off, part[word]) if fits else (part[word], part[word] - 2 * side * step)
                    shown = f"{part[word]:g}" if isinstance(part[word], float) else str(part[word])
                    case = f"{section}.{name}{sign}{shown}"
                    yield pytest.param(section, name, f"must be {sign} {shown}", beside, on, id=case)


@pytest.mark.parametrize(("section", "name", "says", "beside", "on"), bounds())
def test_a_value_on_a_bound_of_the_schema_is_taken_and_one_beside_it_refused(
    refusal: Refusal, section: str, name: str, says: str, beside: float, on: float
) -> None:
    config = SECTIONS[section](**{name: on, **ALONG.get(f"{section}.{name}", {})})
    assert getattr(config, name) == ALONG.get(f"{section}.{name}", {}).get(name, on)
    message = refusal(SECTIONS[section], **{name: beside})
    assert message.startswith(f"{section}.{name} {says}")
    assert f", got {beside!r}" in message


@pytest.mark.parametrize("field", RULES)
def test_a_value_that_a_rule_forbids_is_refused_and_others_are_taken(refusal: Refusal, field: str) -> None:
    section, _, name = field.rpartition(".")
    rule_of_it, broken, kept = RULES[field]
    for value in broken:
        got = "" if ", got" in rule_of_it else f", got {value!r}"
        assert refusal(SECTIONS[section], **{name: value}).startswith(f"{field} {rule_of_it}{got}")
    for value in kept:
        assert getattr(SECTIONS[section](**{name: value}), name) == value


def test_a_number_that_may_be_left_out_may_be_null() -> None:
    for section, config in SECTIONS.items():
        for name, schema in properties(section).items():
            if {"type": "null"} in schema.get("anyOf", ()) and schema.get("default", 0) is None:
                assert getattr(config(**{name: None}), name) is None


def test_every_rule_has_a_row() -> None:
    found = set()
    for section, config in SECTIONS.items():
        hints = typing.get_type_hints(config.func, include_extras=True)
        for name, schema in properties(section).items():
            is_ruled = any(isinstance(part, rule) for part in _parts(hints[name]))
            parts = (schema, *schema.get("anyOf", ()))
            is_ruled |= any({"multipleOf", "minItems", "minLength"} & part.keys() for part in parts)
            if is_ruled and schema.get("type") != "object":
                found.add(f"{section}.{name}")
    assert found == set(RULES)
