"""Recipes are read strictly: every refusal names the field, the rule and the value, and offers a fix."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from slipstream.config import (
    LARGEST,
    ConfigError,
    check_known,
    from_mapping,
    merge,
    parse_overrides,
    read_mapping,
    read_yaml,
    require,
    require_sizes,
    to_mapping,
)


class Method(StrEnum):
    EAGLE3 = "eagle3"
    NGRAM = "ngram"


@dataclass(frozen=True, kw_only=True)
class Draft:
    method: Method
    aux_layer_ids: tuple[int, ...] = ()
    init: Literal["in_domain", "general"] = "in_domain"


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    learning_rate: float = 1e-3
    betas: tuple[float, ...] = (0.9, 0.95)

    def __post_init__(self) -> None:
        require(self.learning_rate > 0, "optimizer.learning_rate", "must be > 0", self.learning_rate, "try 1e-4")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    name: str
    group_size: int
    draft: Draft
    optimizer: Optimizer = field(default_factory=Optimizer)
    eager: bool = False
    max_tokens: int | None = None
    weights: dict[str, float] = field(default_factory=dict)


def recipe_mapping(**changes: Any) -> dict[str, Any]:
    return {"name": "tiny", "group_size": 8, "draft": {"method": "eagle3"}} | changes


def refusal(values: Mapping[str, Any], path: str = "") -> str:
    with pytest.raises(ConfigError) as caught:
        from_mapping(Recipe, values, path)
    return str(caught.value)


def test_reads_nested_mappings_and_fills_defaults():
    recipe = from_mapping(Recipe, recipe_mapping(draft={"method": "ngram", "aux_layer_ids": [2, 12, 21]}))
    assert recipe == Recipe(name="tiny", group_size=8, draft=Draft(method=Method.NGRAM, aux_layer_ids=(2, 12, 21)))
    assert recipe.optimizer.betas == (0.9, 0.95)


def test_config_error_is_a_value_error():
    assert issubclass(ConfigError, ValueError)


def test_require_says_field_rule_value_and_mend():
    with pytest.raises(ConfigError) as caught:
        require(False, "grpo.group_size", "must be >= 2", 1, "use 8")
    assert str(caught.value) == "grpo.group_size must be >= 2, got 1; use 8"


def test_require_without_mend_ends_at_the_value():
    with pytest.raises(ConfigError) as caught:
        require(False, "name", "must not be empty", "")
    assert str(caught.value) == "name must not be empty, got ''"


def test_unknown_key_offers_the_nearest_name():
    message = refusal(recipe_mapping(gruop_size=4))
    assert message == "unknown key 'gruop_size'; did you mean 'group_size'?"


def test_unknown_nested_key_offers_its_dotted_name():
    message = refusal(recipe_mapping(optimizer={"learning_rat": 1e-4}))
    assert message == "unknown key 'optimizer.learning_rat'; did you mean 'optimizer.learning_rate'?"


def test_unknown_key_is_near_where_half_of_the_letters_are_shared():
    """Of `learning_rate`, `rate` has 2 x 4 / (4 + 13) = 0.47 and `_rate` 2 x 5 / (5 + 13) = 0.56."""
    assert refusal(recipe_mapping(optimizer={"rate": 1})).endswith("; known: learning_rate, betas")
    assert refusal(recipe_mapping(optimizer={"_rate": 1})).endswith("; did you mean 'optimizer.learning_rate'?")


def test_unknown_key_near_to_nothing_lists_what_is_known():
    message = refusal(recipe_mapping(optimizer={"zzz": 1}))
    assert message == "unknown key 'optimizer.zzz'; known: learning_rate, betas"


def test_key_that_is_no_string_is_refused():
    values: dict[Any, Any] = {**recipe_mapping(), 1: 2}
    assert refusal(values).startswith("unknown key '1'")


def test_missing_field_is_named_with_its_path():
    assert refusal({"name": "tiny", "group_size": 8}) == "draft is required, got None; set it"
    message = refusal(recipe_mapping(draft={}))
    assert message == "draft.method is required, got None; set it"


def test_path_of_the_mapping_goes_before_every_name():
    message = refusal(recipe_mapping(group_size="8"), path="train")
    assert message == "train.group_size must be of type int, got '8'"


@pytest.mark.parametrize("values", [[1, 2], "tiny", None, 3])
def test_recipe_that_is_no_mapping_is_refused(values: Any):
    assert refusal(values) == f"recipe must be a mapping of field to value, got {values!r}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_size": "8"}, "group_size must be of type int, got '8'"),
        ({"group_size": 8.0}, "group_size must be of type int, got 8.0"),
        ({"group_size": True}, "group_size must be of type int, got True"),
        ({"group_size": None}, "group_size must be of type int, got None"),
        ({"name": 3}, "name must be of type str, got 3; put it in quotes"),
        ({"name": False}, "name must be of type str, got False; put it in quotes"),
        ({"name": None}, "name must be of type str, got None"),
        ({"eager": 1}, "eager must be of type bool, got 1"),
        ({"eager": "ja"}, "eager must be of type bool, got 'ja'"),
        ({"max_tokens": "many"}, "max_tokens must be of type int, got 'many'"),
        ({"draft": "eagle3"}, "draft must be a mapping of field to value, got 'eagle3'"),
        ({"draft": {"method": "eagle3", "aux_layer_ids": 2}}, "draft.aux_layer_ids must be a list, got 2"),
        ({"draft": {"method": "eagle3", "aux_layer_ids": "212"}}, "draft.aux_layer_ids must be a list, got '212'"),
        (
            {"draft": {"method": "eagle3", "aux_layer_ids": [2, "x"]}},
            "draft.aux_layer_ids[1] must be of type int, got 'x'",
        ),
        ({"optimizer": {"learning_rate": "fast"}}, "optimizer.learning_rate must be of type float, got 'fast'"),
        ({"optimizer": {"learning_rate": True}}, "optimizer.learning_rate must be of type float, got True"),
        ({"weights": [1.0]}, "weights must be a mapping, got [1.0]"),
        ({"weights": {"math": "heavy"}}, "weights.math must be of type float, got 'heavy'"),
        ({"weights": {2024: 1.0}}, "a key of weights must be of type str, got 2024; put it in quotes"),
        ({"weights": {"math": float("nan")}}, "weights.math must be a finite number, got nan"),
        ({"optimizer": {"learning_rate": "inf"}}, "optimizer.learning_rate must be a finite number, got inf"),
        ({"optimizer": {"learning_rate": -math.inf}}, "optimizer.learning_rate must be a finite number, got -inf"),
        ({"optimizer": {"learning_rate": "1e999"}}, "optimizer.learning_rate must be a finite number, got inf"),
        (
            {"optimizer": {"learning_rate": 10**400}},
            f"optimizer.learning_rate must be of type float, got {10**400}",
        ),
    ],
)
def test_wrong_type_is_refused_by_field(change: dict[str, Any], message: str):
    assert refusal(recipe_mapping(**change)) == message


def test_enum_takes_its_values_and_its_members():
    for method in ("ngram", Method.NGRAM):
        assert from_mapping(Draft, {"method": method}).method is Method.NGRAM


def test_unknown_enum_value_lists_the_known_ones():
    message = refusal(recipe_mapping(draft={"method": "eagle4"}))
    assert message == "draft.method must be one of eagle3, ngram, got 'eagle4'"


def test_unknown_literal_lists_the_known_ones():
    message = refusal(recipe_mapping(draft={"method": "eagle3", "init": "random"}))
    assert message == "draft.init must be one of in_domain, general, got 'random'"


@pytest.mark.parametrize("value", ["1e-4", 1e-4, "0.0001"])
def test_float_may_be_written_as_yaml_reads_it(value: Any):
    assert from_mapping(Optimizer, {"learning_rate": value}).learning_rate == 0.0001


def test_the_fast_parser_reads_every_file_of_ours_as_the_other_one_does():
    files = list(Path(__file__).parents[2].glob("configs/**/*.yaml"))
    assert len(files) > 10
    for path in files:
        assert read_yaml(path.read_text()) == yaml.safe_load(path.read_text())


def test_what_yaml_would_build_objects_from_is_refused():
    with pytest.raises(yaml.YAMLError):
        read_yaml("!!python/object/apply:os.getcwd []")


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


@pytest.mark.parametrize("word", ["on", "yes", "true", "True", "YES"])
def test_a_switch_takes_every_word_for_on(word: str):
    assert from_mapping(Recipe, recipe_mapping(eager=read_yaml(word))).eager is True


@pytest.mark.parametrize("word", ["off", "no", "false", "FALSE", "No"])
def test_a_switch_takes_every_word_for_off(word: str):
    assert from_mapping(Recipe, recipe_mapping(eager=read_yaml(word))).eager is False


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 1\n", "the key 'a' stands twice, in lines 1 and 3; leave one of them out"),
        ("a:\n  b: {c: 1, d: 2, 'c': 3}\n", "the key 'a.b.c' stands twice, in lines 2 and 2; leave one of them out"),
        ("a:\n- b: 1\n- c: 1\n  c: 1\n", "the key 'a[1].c' stands twice, in lines 3 and 4; leave one of them out"),
        ("1: a\n1: b\n", "the key '1' stands twice, in lines 1 and 2; leave one of them out"),
        (
            "x: &x {a: 1}\ny: &y {b: 1}\nz:\n  <<: *x\n  <<: *y\n",
            "the key 'z.<<' stands twice, in lines 4 and 5; leave one of them out",
        ),
        ("x: &x {a: 1, a: 2}\ny: {<<: *x}\n", "the key 'x.a' stands twice, in lines 1 and 1; leave one of them out"),
    ],
)
def test_a_key_that_stands_twice_is_refused_by_name_and_lines(text: str, message: str):
    with pytest.raises(yaml.YAMLError) as caught:
        read_yaml(text)
    assert str(caught.value) == message


def test_a_key_beside_a_merged_one_overrides_it_as_yaml_means_it():
    text = "base: &base {a: 1, b: 2}\nmore: &more {<<: *base, a: 3}\nlast: {<<: [*more, *base], c: 4, b: 5}\n"
    assert read_yaml(text) == {
        "base": {"a": 1, "b": 2},
        "more": {"a": 3, "b": 2},
        "last": {"a": 3, "b": 5, "c": 4},
    }


def test_the_same_key_may_stand_in_several_mappings():
    assert read_yaml("a: &a {x: 1}\nb: {x: 1}\nc: [*a, *a]\n")["c"] == [{"x": 1}, {"x": 1}]


@pytest.mark.parametrize("text", ["!!int x", "!!bool x", "!!timestamp x", "!!float x", "[" * 5000, "? [a]\n: b", "a\0"])
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
            "name: a\n".encode("utf-16"),
            "recipe FILE must be text in UTF-8, got 'utf-8' codec can't decode byte 0xff in position 0: invalid start "
            "byte; save it as UTF-8",
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


def test_a_file_that_is_no_yaml_is_refused_in_one_line(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text("a: [")
    assert re.fullmatch(
        r"recipe FILE is not YAML: while parsing a flow node .*, line \d, column \d", refused_file(path)
    )


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path):
    assert refused_file(tmp_path) == "recipe FILE cannot be read: Is a directory"
    assert refused_file(tmp_path / "none.yaml") == "recipe FILE cannot be read: No such file or directory"


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path):
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


@dataclass(frozen=True, kw_only=True)
class Sized:
    seed: int = 0
    counts: tuple[int, ...] = ()
    weights: dict[str, float] = field(default_factory=dict)
    inner: Sized | None = None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Sized(seed=-1), "r.seed must lie in [0, 2**63), got -1"),
        (Sized(inner=Sized(seed=2**63)), "r.inner.seed must lie in [0, 2**63), got 9223372036854775808"),
        (Sized(counts=(1, 2**31)), "r.counts[1] must be at most 2147483647, got 2147483648"),
        (Sized(weights={"a": -1e300}), "r.weights[a] must be at most 2147483647, got -1e+300"),
    ],
)
def test_numbers_that_no_run_could_have_are_refused(config: Sized, message: str):
    whole = Sized(seed=2**63 - 1, counts=(LARGEST, -LARGEST), weights={"a": 1e9}, inner=Sized())
    require_sizes(whole, "r")
    with pytest.raises(ConfigError) as caught:
        require_sizes(config, "r")
    assert str(caught.value) == message


def test_whole_number_becomes_a_float():
    value = from_mapping(Optimizer, {"learning_rate": 1}).learning_rate
    assert isinstance(value, float)
    assert value == 1.0


def test_optional_takes_null_and_its_type():
    assert from_mapping(Recipe, recipe_mapping(max_tokens=None)).max_tokens is None
    assert from_mapping(Recipe, recipe_mapping(max_tokens=160)).max_tokens == 160


def test_dict_values_are_read_by_their_type():
    weights = from_mapping(Recipe, recipe_mapping(weights={"math": 1, "code": "5e-1"})).weights
    assert weights == {"math": 1.0, "code": 0.5}
    assert all(isinstance(weight, float) for weight in weights.values())


def test_rule_of_the_config_class_holds_at_reading():
    message = refusal(recipe_mapping(optimizer={"learning_rate": 0}))
    assert message == "optimizer.learning_rate must be > 0, got 0.0; try 1e-4"


def test_merge_lays_leaves_over_and_replaces_lists():
    base = {"a": {"b": 1, "c": [1, 2]}, "d": 3}
    assert merge(base, {"a": {"c": [9]}, "e": 4}) == {"a": {"b": 1, "c": [9]}, "d": 3, "e": 4}
    assert base == {"a": {"b": 1, "c": [1, 2]}, "d": 3}


def test_merge_replaces_a_leaf_by_a_mapping_and_back():
    assert merge({"a": 1}, {"a": {"b": 2}}) == {"a": {"b": 2}}
    assert merge({"a": {"b": 2}}, {"a": 1}) == {"a": 1}


def test_to_mapping_is_plain():
    recipe = Recipe(name="tiny", group_size=8, draft=Draft(method=Method.EAGLE3, aux_layer_ids=(2, 12)))
    plain = to_mapping(recipe)
    assert plain["draft"] == {"method": "eagle3", "aux_layer_ids": [2, 12], "init": "in_domain"}
    assert type(plain["draft"]["method"]) is str


finite = st.floats(allow_nan=False, allow_infinity=False)
recipes = st.builds(
    Recipe,
    name=st.text(),
    group_size=st.integers(),
    draft=st.builds(
        Draft,
        method=st.sampled_from(Method),
        aux_layer_ids=st.lists(st.integers()).map(tuple),
        init=st.sampled_from(["in_domain", "general"]),
    ),
    optimizer=st.builds(
        Optimizer,
        learning_rate=st.floats(min_value=1e-12, max_value=1e3),
        betas=st.lists(finite, max_size=3).map(tuple),
    ),
    eager=st.booleans(),
    max_tokens=st.none() | st.integers(),
    weights=st.dictionaries(st.text(), finite, max_size=3),
)


@given(recipes)
def test_every_config_survives_json(recipe: Recipe):
    assert from_mapping(Recipe, json.loads(json.dumps(to_mapping(recipe)))) == recipe


@given(recipes)
def test_every_config_survives_yaml(recipe: Recipe):
    assert from_mapping(Recipe, read_yaml(yaml.safe_dump(to_mapping(recipe)))) == recipe


@pytest.mark.parametrize(
    "name", ["1e-4", "off", "010", "12:30", "2026-11-25", "1_000", "", "~", ".inf", "0x1", "=", "<<"]
)
def test_a_name_that_looks_like_something_else_survives_yaml(name: str):
    values = recipe_mapping(name=name, weights={name: 1.0})
    assert from_mapping(Recipe, read_yaml(yaml.safe_dump(values))).name == name


@given(recipes)
def test_merging_a_config_over_another_gives_it_back(recipe: Recipe):
    base = to_mapping(Recipe(name="base", group_size=1, draft=Draft(method=Method.NGRAM)))
    assert from_mapping(Recipe, merge(base, to_mapping(recipe))) == recipe


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


@pytest.mark.parametrize("item", ["grpo.group_size", "=16", "grpo.=16", "grpo group=1", "", "--grpo.group_size=16"])
def test_an_override_of_another_form_is_refused(item: str):
    with pytest.raises(ConfigError) as caught:
        parse_overrides([item])
    assert str(caught.value) == f"overrides must read field=value, got {item!r}; as in grpo.group_size=16"


def test_a_value_that_names_a_field_twice_is_refused():
    with pytest.raises(ConfigError, match=r"got 'grpo=\{a: 1, a: 2\}' \(the key 'a' stands twice, in lines 1 and 1;"):
        parse_overrides(["grpo={a: 1, a: 2}"])


@pytest.mark.parametrize("second", ["grpo.group_size=8", "grpo={group_size: 8}", "grpo.group_size.a=1"])
def test_a_field_is_overridden_once(second: str):
    with pytest.raises(ConfigError) as caught:
        parse_overrides(["grpo.group_size=16", second])
    assert str(caught.value) == f"overrides must set each field once, got {second!r}; leave one of them out"


def test_an_override_whose_value_is_no_yaml_is_refused():
    with pytest.raises(ConfigError) as caught:
        parse_overrides(["ks=[1, 3"])
    assert re.fullmatch(
        r"overrides must have .* '=', got 'ks=\[1, 3' \(while parsing .*\); quote it", str(caught.value)
    )
