"""Recipes are read strictly: every refusal names the field, the rule and the value, and offers a fix."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, TypeAdapter

from slipstream.config import (
    LARGEST,
    NUMBER,
    Checked,
    ConfigError,
    Fix,
    Int,
    PositiveFloat,
    PositiveInt,
    Switch,
    check_known,
    from_mapping,
    merge,
    parse_overrides,
    read_mapping,
    read_yaml,
    to_mapping,
)


class Method(StrEnum):
    EAGLE3 = "eagle3"
    NGRAM = "ngram"


class Draft(Checked, path="draft"):
    method: Method
    aux_layer_ids: tuple[Int, ...] = ()
    init: Literal["in_domain", "general"] = "in_domain"


class Optimizer(Checked, path="optimizer"):
    learning_rate: PositiveFloat = 1e-3
    betas: tuple[Annotated[float, NUMBER], ...] = (0.9, 0.95)


class Recipe(Checked):
    """A small recipe."""

    name: str
    """Name of the run.

    It may be any text.
    """
    group_size: Annotated[Int, Field(ge=2), Fix("one rollout has no baseline")]
    draft: Draft
    optimizer: Optimizer = field(default_factory=Optimizer)
    eager: Switch = False
    max_tokens: PositiveInt | None = None
    """Tokens at most; null bounds nothing."""
    weights: dict[str, Annotated[float, NUMBER]] = field(default_factory=dict)

    def _check(self) -> None:
        self._require(self.group_size < 100 or not self.eager, "group_size", "must be < 100 where eager", "wait")


def recipe_mapping(**changes: Any) -> dict[str, Any]:
    return {"name": "tiny", "group_size": 8, "draft": {"method": "eagle3"}} | changes


def refusal(values: Mapping[str, Any], path: str = "") -> str:
    with pytest.raises(ConfigError) as caught:
        from_mapping(Recipe, values, path)
    return str(caught.value)


def test_a_mapping_is_read_nested_with_defaults_enums_and_values_by_their_type() -> None:
    recipe = from_mapping(Recipe, recipe_mapping(draft={"method": "ngram", "aux_layer_ids": [2, 12, 21]}))
    assert recipe == Recipe(name="tiny", group_size=8, draft=Draft(method=Method.NGRAM, aux_layer_ids=(2, 12, 21)))
    assert recipe.optimizer.betas == (0.9, 0.95)
    for method in ("ngram", Method.NGRAM):
        assert from_mapping(Draft, {"method": method}).method is Method.NGRAM
    weights = from_mapping(Recipe, recipe_mapping(weights={"math": 1, "code": "5e-1"})).weights
    assert weights == {"math": 1.0, "code": 0.5}
    assert all(isinstance(weight, float) for weight in weights.values())
    recipe = Recipe(name="tiny", group_size=8, draft=Draft(method=Method.EAGLE3, aux_layer_ids=(2, 12)))
    plain = to_mapping(recipe)
    assert plain["draft"] == {"method": "eagle3", "aux_layer_ids": [2, 12], "init": "in_domain"}
    assert type(plain["draft"]["method"]) is str


NEAREST = "; did you mean 'optimizer.learning_rate'?"
NGRAM = {"method": "ngram"}


@pytest.mark.parametrize("values", [[1, 2], "tiny", None, 3])
def test_recipe_that_is_no_mapping_is_refused_and_the_path_of_one_goes_before_every_name(values: Any) -> None:
    assert refusal(values) == f"recipe must be a mapping of field to value, got {values!r}"
    message = refusal(recipe_mapping(group_size="8"), path="train")
    assert message == "train.group_size must be of type int, got '8'"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_size": "8"}, "group_size must be of type int, got '8'"),
        ({"group_size": 8.0}, "group_size must be of type int, got 8.0"),
        ({"group_size": True}, "group_size must be of type int, got True"),
        ({"group_size": None}, "group_size must be of type int, got None"),
        ({"gruop_size": 4}, "unknown key 'gruop_size'; did you mean 'group_size'?"),
        ({"optimizer": {"learning_rat": 1e-4}}, f"unknown key 'optimizer.learning_rat'{NEAREST}"),
        # Near is what shares half of its letters: `_rate` has 2 x 5 / (5 + 13) = 0.56, `rate` 2 x 4 / (4 + 13) = 0.47.
        ({"optimizer": {"_rate": 1}}, f"unknown key 'optimizer._rate'{NEAREST}"),
        ({"optimizer": {"rate": 1}}, "unknown key 'optimizer.rate'; known: learning_rate, betas"),
        ({1: 2}, "unknown key '1'; known: name, group_size, draft, optimizer, eager, max_tokens, weights"),
        ({"draft": {}}, "draft.method is required, got None; set it"),
        *(({"name": each}, f"name must be of type str, got {each}; put it in quotes") for each in (3, False)),
        ({"name": None}, "name must be of type str, got None"),
        ({"eager": 1}, "eager must be of type bool, got 1"),
        ({"eager": "ja"}, "eager must be of type bool, got 'ja'"),
        ({"max_tokens": "many"}, "max_tokens must be of type int, got 'many'"),
        ({"draft": "eagle3"}, "draft must be a mapping of field to value, got 'eagle3'"),
        ({"draft": {"method": "eagle3", "aux_layer_ids": 2}}, "draft.aux_layer_ids must be a list, got 2"),
        ({"draft": {"method": "eagle3", "aux_layer_ids": "212"}}, "draft.aux_layer_ids must be a list, got '212'"),
        ({"draft": {"method": "x", "aux_layer_ids": [2, "x"]}}, "draft.method must be one of eagle3, ngram, got 'x'"),
        ({"draft": {**NGRAM, "aux_layer_ids": [2, "x"]}}, "draft.aux_layer_ids[1] must be of type int, got 'x'"),
        ({"draft": {"method": "ngram", "init": "x"}}, "draft.init must be one of in_domain, general, got 'x'"),
        ({"optimizer": {"learning_rate": 0}}, "optimizer.learning_rate must be > 0, got 0"),
        ({"optimizer": {"learning_rate": 2.0**31}}, "optimizer.learning_rate must be <= 2147483647, got 2147483648.0"),
        ({"group_size": 1}, "group_size must be >= 2, got 1; one rollout has no baseline"),
        ({"group_size": 2**31}, "group_size must be <= 2147483647, got 2147483648; one rollout has no baseline"),
        ({"max_tokens": 0}, "max_tokens must be >= 1 or null, got 0"),
        (
            {"draft": {**NGRAM, "aux_layer_ids": [2, 2**31]}},
            "draft.aux_layer_ids[1] must be <= 2147483647, got 2147483648",
        ),
        ({"group_size": 100, "eager": True}, "group_size must be < 100 where eager, got 100; wait"),
        ({"optimizer": {"learning_rate": "fast"}}, "optimizer.learning_rate must be of type float, got 'fast'"),
        ({"optimizer": {"learning_rate": True}}, "optimizer.learning_rate must be of type float, got True"),
        ({"weights": [1.0]}, "weights must be a mapping, got [1.0]"),
        ({"weights": {"math": "heavy"}}, "weights.math must be of type float, got 'heavy'"),
        ({"weights": {2024: 1.0}}, "a key of weights must be of type str, got 2024; put it in quotes"),
        ({"weights": {"math": float("nan")}}, "weights.math must be a finite number, got nan"),
        ({"optimizer": {"learning_rate": "inf"}}, "optimizer.learning_rate must be a finite number, got 'inf'"),
        ({"optimizer": {"learning_rate": -math.inf}}, "optimizer.learning_rate must be a finite number, got -inf"),
        ({"optimizer": {"learning_rate": "1e999"}}, "optimizer.learning_rate must be a finite number, got '1e999'"),
        ({"optimizer": {"learning_rate": 10**400}}, f"optimizer.learning_rate must be of type float, got {10**400}"),
    ],
)
def test_unknown_and_missing_keys_and_wrong_types_are_named_with_their_path(change: dict[Any, Any], message: str):
    assert refusal(recipe_mapping() | change) == message


def test_the_fast_parser_reads_every_file_of_ours_as_the_other_one_does():
    files = list(Path(__file__).parents[2].glob("configs/**/*.yaml"))
    assert len(files) > 10
    for path in files:
        assert read_yaml(path.read_text()) == yaml.safe_load(path.read_text())


@pytest.mark.parametrize(
    "word",
    [
        *("on", "off", "On", "OFF", "yes", "no", "Yes", "NO", "y", "n", "Y", "N"),
        *("010", "-07", "0o10", "0b1", "12:30:00", "1:2", "190:20:30.15", "2026-11-25", "2026-11-25 10:00:00"),
        *("1e-4", "1.5e3", "=", "1_0x", "v1.0", "NaN", "inf", "nil", "None", "tRUE", "9" * 101),
    ],
)
def test_an_unquoted_word_is_the_one_that_was_typed(word: str):
    assert read_yaml(word) == word
    assert read_yaml(f"{{{word}: [{word}]}}") == {word: [word]}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("true", True), ("True", True), ("FALSE", False), ("~", None), ("null", None), ("", None)),
        *(("1_000", 1000), ("+5", 5), ("-12", -12), ("0", 0), ("0x10", 16), ("0.5", 0.5), ("-1.0e-3", -0.001)),
        *((".inf", math.inf), ("'on'", "on"), ('"2024"', "2024"), ("!!str 2024", "2024"), ("!!bool yes", True)),
    ],
)
def test_what_both_versions_of_yaml_read_alike_is_read_so(text: str, value: Any):
    assert read_yaml(text) == value
    assert type(read_yaml(text)) is type(value)


def test_a_switch_takes_every_word():
    for word in ("on", "yes", "true", "True", "YES", "off", "no", "false", "FALSE", "No"):
        eager = from_mapping(Recipe, recipe_mapping(eager=read_yaml(word))).eager
        assert eager is (word.lower() in ("on", "yes", "true"))


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("a: 1\nb: 2\na: 1\n", "'a' stands twice, in lines 1 and 3"),
        ("a:\n  b: {c: 1, d: 2, 'c': 3}\n", "'a.b.c' stands twice, in lines 2 and 2"),
        ("a:\n- b: 1\n- c: 1\n  c: 1\n", "'a[1].c' stands twice, in lines 3 and 4"),
        ("1: a\n1: b\n", "'1' stands twice, in lines 1 and 2"),
        ("x: &x {a: 1}\ny: &y {b: 1}\nz:\n  <<: *x\n  <<: *y\n", "'z.<<' stands twice, in lines 4 and 5"),
        ("x: &x {a: 1, a: 2}\ny: {<<: *x}\n", "'x.a' stands twice, in lines 1 and 1"),
    ],
)
def test_a_key_that_stands_twice_is_refused_by_name_and_lines(text: str, keys: str):
    with pytest.raises(yaml.YAMLError) as caught:
        read_yaml(text)
    assert str(caught.value) == f"the key {keys}; leave one of them out"


def test_the_same_key_may_stand_in_several_mappings_and_beside_a_merged_one_as_yaml_means_it():
    assert read_yaml("a: &a {x: 1}\nb: {x: 1}\nc: [*a, *a]\n")["c"] == [{"x": 1}, {"x": 1}]
    text = "base: &base {a: 1, b: 2}\nmore: &more {<<: *base, a: 3}\nlast: {<<: [*more, *base], c: 4, b: 5}\n"
    merged = {"base": {"a": 1, "b": 2}, "more": {"a": 3, "b": 2}, "last": {"a": 3, "b": 5, "c": 4}}
    assert read_yaml(text) == merged


TAGGED = [f"!!{tag} x" for tag in ("python/object/apply:os.getcwd", "int", "bool", "timestamp", "float")]


@pytest.mark.parametrize("text", [*TAGGED, "!!python/object/apply:os.getcwd []", "[" * 5000, "? [a]\n: b", "a\0"])
def test_what_no_value_can_be_made_of_is_no_yaml(text: str):
    with pytest.raises(yaml.YAMLError):
        read_yaml(text)


def refused_file(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_mapping(path, "recipe")
    return str(caught.value).replace(str(path), "FILE")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "recipe FILE must hold a mapping of field to value, got 'an empty file'"),
        (b"# a\n---\n", "recipe FILE must hold a mapping of field to value, got 'an empty file'"),
        (b"- a\n", "recipe FILE must hold a mapping of field to value, got 'list'"),
        (b"name\n", "recipe FILE must hold a mapping of field to value, got 'str'"),
        (
            "name: käse\n".encode("latin-1"),
            "recipe FILE must be text in UTF-8, got 'utf-8' codec can't decode byte 0xe4 in position 7: invalid "
            "continuation byte; save it as UTF-8",
        ),
        (
            b"a: {b: 1}\na: {c: 1}\n",
            "recipe FILE is not YAML: the key 'a' stands twice, in lines 1 and 2; leave one of them out",
        ),
    ],
)
def test_a_file_without_a_mapping_is_refused_in_one_line(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    assert refused_file(path) == message
    path.write_text("a: [")
    flow = r"recipe FILE is not YAML: while parsing a flow node .*, line \d, column \d"
    assert re.fullmatch(flow, refused_file(path))


def test_a_file_that_cannot_be_read_is_refused_and_a_byte_order_mark_is_no_part_of_it(tmp_path: Path) -> None:
    assert refused_file(tmp_path) == "recipe FILE cannot be read: Is a directory"
    assert refused_file(tmp_path / "none.yaml") == "recipe FILE cannot be read: No such file or directory"
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"\xef\xbb\xbfname: a\r\n")
    assert read_mapping(path, "recipe") == {"name": "a"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"nam": 1}, "unknown key 'w.nam'; did you mean 'w.name'?"),
        ({"draft": {"methd": "no value is looked at"}}, "unknown key 'w.draft.methd'; did you mean 'w.draft.method'?"),
        ({"draft": 3}, "w.draft must be a mapping of field to value, got 3"),
        ([], "w must be a mapping of field to value, got []"),
    ],
)
def test_keys_are_checked_without_their_values(values: Any, message: str):
    check_known(Recipe, {"name": 3, "draft": {"method": 3, "aux_layer_ids": None}, "max_tokens": []}, "w")
    with pytest.raises(ConfigError) as caught:
        check_known(Recipe, values, "w")
    assert str(caught.value) == message


def test_a_config_is_checked_whenever_one_is_made_and_stays_as_it_is() -> None:
    config = Optimizer(learning_rate=0.5)
    assert replace(config, betas=(0.5, 0.9)).learning_rate == 0.5
    for make in (lambda: Optimizer(learning_rate=-1.0), lambda: replace(config, learning_rate=-1.0)):
        with pytest.raises(ConfigError, match=r"^optimizer\.learning_rate must be > 0, got -1\.0$"):
            make()
    with pytest.raises(ConfigError, match=r"^unknown key 'optimizer\.rate'; known: learning_rate, betas$"):
        Optimizer(rate=1.0)  # type: ignore[call-arg]
    with pytest.raises(FrozenInstanceError):
        config.learning_rate = 1.0  # type: ignore[misc]


def test_a_schema_has_each_fields_range_and_the_docstring_below_it() -> None:
    fields = TypeAdapter(Recipe).json_schema()["properties"]
    assert fields["name"]["description"] == "Name of the run. It may be any text."
    assert fields["max_tokens"]["description"] == "Tokens at most; null bounds nothing."
    assert (fields["group_size"]["minimum"], fields["group_size"]["maximum"]) == (2, LARGEST)
    assert "description" not in fields["eager"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    counts: tuple[int, ...]
    method: Method
    rate: float | None = None


def test_a_dataclass_of_the_standard_library_is_read_as_strictly() -> None:
    found = from_mapping(Record, {"counts": [1, 2], "method": "ngram", "rate": 1})
    assert found == Record(counts=(1, 2), method=Method.NGRAM, rate=1.0)
    for values, message in (
        ({"counts": [1, "many"], "method": "ngram"}, "r.counts[1] must be of type int, got 'many'"),
        ({"counts": [], "method": "ngram", "rat": 1}, "unknown key 'r.rat'; did you mean 'r.rate'?"),
        ({"counts": [], "method": "ngram", "rate": math.nan}, "r.rate must be a finite number, got nan"),
        ({"counts": []}, "r.method is required, got None; set it"),
    ):
        with pytest.raises(ConfigError) as caught:
            from_mapping(Record, values, "r")
        assert str(caught.value) == message


def test_merge_lays_leaves_over_and_replaces_lists() -> None:
    base = {"a": {"b": 1, "c": [1, 2]}, "d": 3}
    assert merge(base, {"a": {"c": [9]}, "e": 4}) == {"a": {"b": 1, "c": [9]}, "d": 3, "e": 4}
    assert base == {"a": {"b": 1, "c": [1, 2]}, "d": 3}
    assert merge({"a": 1}, {"a": {"b": 2}}) == {"a": {"b": 2}}
    assert merge({"a": {"b": 2}}, {"a": 1}) == {"a": 1}


finite = st.floats(allow_nan=False, allow_infinity=False)
drafts = {"method": st.sampled_from(Method), "aux_layer_ids": st.lists(st.integers(0, LARGEST)).map(tuple)}
optimizers = {"learning_rate": st.floats(1e-12, 1e3), "betas": st.lists(finite, max_size=3).map(tuple)}
recipes = st.builds(
    Recipe,
    name=st.text(),
    group_size=st.integers(2, 99),
    draft=st.builds(Draft, **drafts, init=st.sampled_from(["in_domain", "general"])),
    optimizer=st.builds(Optimizer, **optimizers),
    eager=st.booleans(),
    max_tokens=st.none() | st.integers(1, LARGEST),
    weights=st.dictionaries(st.text(), finite, max_size=3),
)


@given(recipes)
def test_every_config_survives_json_and_yaml(recipe: Recipe):
    assert from_mapping(Recipe, json.loads(json.dumps(to_mapping(recipe)))) == recipe
    assert from_mapping(Recipe, read_yaml(yaml.safe_dump(to_mapping(recipe)))) == recipe


def test_overrides_are_read_as_people_type_them():
    items = ["grpo.group_size=16", "grpo.optimizer.learning_rate=1.0e-6", "eager=true", "ks=[1, 3]", "model=a=b", "x="]
    assert parse_overrides(items) == {
        "grpo": {"group_size": 16, "optimizer": {"learning_rate": 1e-6}},
        "eager": True,
        "ks": [1, 3],
        "model": "a=b",
        "x": None,
    }
    assert parse_overrides([]) == {}
    assert parse_overrides(["draft.online=off", "data.subset=no", "when=12:30"]) == {
        "draft": {"online": "off"},
        "data": {"subset": "no"},
        "when": "12:30",
    }


FORM = "overrides must read field=value, got {!r}; as in grpo.group_size=16"
ONCE = "overrides must set each field once, got {!r}; leave one of them out"


@pytest.mark.parametrize(
    ("item", "message"),
    [
        *((item, FORM) for item in ("grpo.group_size", "=16", "grpo.=16", "grpo group=1", "", "--grpo.group_size=16")),
        *((item, ONCE) for item in ("grpo.seed=8", "grpo={seed: 8}", "grpo.seed.a=1")),
        ("ks=[1, 3", "overrides must have .* '=', got {!r} (while parsing .*); quote it"),
        ("ks={a: 1, a: 2}", "overrides must have .* got {!r} (the key 'a' stands twice, in lines 1 and 1; .*"),
    ],
)
def test_an_override_of_another_form_or_of_a_field_that_was_set_is_refused(item: str, message: str):
    with pytest.raises(ConfigError) as caught:
        parse_overrides(["grpo.seed=16", item])
    assert re.fullmatch(re.escape(message.format(item)).replace(r"\.\*", ".*"), str(caught.value))
