"""A policy from a hub id or a directory: checked by its configs alone, before any weight is read or fetched."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml
from huggingface_hub.utils import filter_repo_objects
from transformers import AutoConfig, Qwen2Config

from slipstream.config import ConfigError
from slipstream.learner.architecture import Architecture
from slipstream.learner.config import PolicyConfig, RopeConfig
from slipstream.learner.policy_source import Needs, resolve, write_policy_tokenizer
from slipstream.recipe import load_recipe
from slipstream.records.stages import PolicyRecord
from slipstream.stages.support import policy_needs
from tests.small import write_config
from tests.unit.refusals import rows


def model(path: Path, **changes: Any) -> Path:
    """A model directory without readable weights."""
    config = write_config(path, num_layers=24, num_positions=512) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    (path / "model.safetensors").write_bytes(b"never read")
    return path


def resolve_policy(given: Path | str, directory: Path) -> PolicyRecord:
    recipe = replace(load_recipe("tiny"), policy=PolicyConfig(model=str(given)))
    return resolve(recipe.policy, policy_needs(recipe), directory)


def test_a_directory_is_resolved_without_reading_its_weights(tmp_path: Path) -> None:
    source = model(tmp_path / "model")
    record = resolve_policy(source, tmp_path / "out")
    assert (record.architecture, record.vocab_size, record.max_position_embeddings) == ("Qwen3ForCausalLM", 64, 512)
    assert (record.eos_token_id, record.pretrain_steps) == (3, 0)
    assert (tmp_path / "out" / "model.safetensors").resolve() == source / "model.safetensors"
    assert (tmp_path / "out" / "config.json").is_file()


@pytest.mark.parametrize(
    ("own", "rope", "expected"),
    [
        ({}, {"type": "yarn", "factor": 2.0}, {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512}),
        # A whole number, which stops vLLM.
        ({"rope_scaling": {"type": "linear", "factor": 2}}, None, {"type": "linear", "factor": 2.0}),
    ],
)
def test_a_scaling_is_written_in_full_beside_the_links(
    own: dict[str, Any], rope: dict[str, Any] | None, expected: dict[str, Any], tmp_path: Path
) -> None:
    source, out = model(tmp_path / "model", **own), tmp_path / "out"
    before = (source / "config.json").read_text()
    given = PolicyConfig(model=str(source), rope=None if rope is None else RopeConfig(**rope))
    long = Needs(max_model_len=1024, draft_layer_ids=None)
    for _ in range(2):  # a retry finds the file
        assert resolve(given, long, out).max_position_embeddings == 1024
    assert (source / "config.json").read_text() == before
    assert Architecture.from_hf(out).rope_scaling == RopeConfig(**expected)
    config = json.loads((out / "config.json").read_text())
    assert repr(config["rope_parameters"]["factor"]) == "2.0"
    changed = {name for name, value in json.loads(before).items() if config[name] != value} - {*own}
    assert changed == ({"max_position_embeddings"} if rope else set())
    write_policy_tokenizer(given, long, tmp_path / "tokenizer")
    with pytest.raises(ConfigError, match=r"must be <= the policy's 1024 positions, got 1025; lower it, or extend the"):
        write_policy_tokenizer(given, replace(long, max_model_len=1025), tmp_path / "tokenizer")


def test_a_mimo_of_the_hub_is_read_without_its_code(tmp_path: Path) -> None:
    code = {"model_type": "mimo", "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"}}
    source = model(tmp_path / "model", architectures=["MiMoForCausalLM"], num_nextn_predict_layers=1, **code)
    resolve(PolicyConfig(model=str(source)), Needs(max_model_len=288, draft_layer_ids=(), mtp=True), tmp_path / "out")
    assert isinstance(AutoConfig.from_pretrained(tmp_path / "out"), Qwen2Config)
    assert Architecture.from_hf(tmp_path / "out") == Architecture.from_hf(source)


@rows(
    r"""
{max_position_embeddings: 128}
    engine\.max_model_len must be <= the policy's 128 positions, got 288
{architectures: [MiMoForCausalLM], model_type: qwen2, num_nextn_predict_layers: 1}
    policy\.model must be of a family whose inner states vLLM returns, .*, got 'MiMo.*; take another draft
{num_hidden_layers: 2}
    draft\.eagle3\.aux_hidden_state_layer_ids must be in \[0, 2\), .* got \(-1, 0, 1\)
"""
)
def test_a_model_that_does_not_suit_the_run_is_refused(given: str, expected: str, tmp_path: Path) -> None:
    source = model(tmp_path / "model", **yaml.safe_load(given))
    with pytest.raises(ConfigError, match=expected):
        resolve_policy(source, tmp_path / "out")


def _without_template(source: Path) -> None:
    (source / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((source / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (source / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        (
            lambda source: (source / "model.safetensors").unlink(),
            r"have weights in \*\.safetensors files, got '.*model'",
        ),
        (
            lambda source: (source / "model.safetensors.index.json").write_text(
                '{"weight_map": {"w": "b.safetensors"}}'
            ),
            "hold b.safetensors, which its index names, got '.*model'",
        ),
        (_without_template, "have a chat template"),
    ],
)
def test_a_model_that_is_not_whole_is_refused(damage: Callable[[Path], object], rule: str, tmp_path: Path) -> None:
    source = model(tmp_path / "model")
    damage(source)
    with pytest.raises(ConfigError, match=rf"policy\.model must {rule}"):
        resolve_policy(source, tmp_path / "out")


def test_configs_and_tokenizer_are_fetched_and_weights_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = model(tmp_path / "hub", num_hidden_layers=36, max_position_embeddings=32768)
    asked: list[tuple[str, str | None]] = []

    def snapshot_download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        """What the hub's client does with the patterns, from a directory."""
        asked.append((name, revision))
        files = {path.name: path for path in hub.iterdir()}
        (tmp_path / "snapshot").mkdir()
        for file in filter_repo_objects(files, allow_patterns=allow_patterns):
            shutil.copyfile(files[file], tmp_path / "snapshot" / file)
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    recipe = load_recipe("qwen3_8b")
    write_policy_tokenizer(recipe.policy, policy_needs(recipe), tmp_path / "tokenizer")

    fetched = {path.name for path in (tmp_path / "snapshot").iterdir()}
    assert fetched == {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert asked == [(recipe.policy.model, None)]
    assert (tmp_path / "tokenizer" / "tokenizer.json").is_file()


def test_a_model_that_is_nowhere_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=r"policy\.model must be a local directory or a reachable hub id, got 'a/b'"):
        resolve_policy("a/b", tmp_path / "out")
