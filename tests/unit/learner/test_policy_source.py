"""A policy from a hub id or a directory: checked by its configs alone, before any weight is read or fetched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from slipstream.config import ConfigError
from slipstream.data.tokenizer import write_tokenizer
from slipstream.learner.config import PolicyConfig
from slipstream.learner.policy_source import resolve
from slipstream.recipe import Recipe, load_recipe
from slipstream.records.stages import PolicyRecord
from slipstream.stages.support import policy_needs

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 3,
}


def model(path: Path, **changes: Any) -> Path:
    """A model directory without readable weights."""
    write_tokenizer(path, max_length=512)
    (path / "config.json").write_text(json.dumps({**QWEN3, **changes}))
    (path / "model.safetensors").write_bytes(b"never read")
    return path


def recipe(path: str) -> Recipe:
    return replace(load_recipe("tiny"), policy=PolicyConfig(model=path))


def resolve_policy(recipe: Recipe, directory: Path) -> PolicyRecord:
    return resolve(recipe.policy, policy_needs(recipe), directory)


def test_a_directory_is_resolved_without_reading_its_weights(tmp_path: Path) -> None:
    source = model(tmp_path / "model")

    record = resolve_policy(recipe(str(source)), tmp_path / "out")

    assert (record.architecture, record.vocab_size, record.max_position_embeddings) == ("Qwen3ForCausalLM", 64, 512)
    assert record.eos_token_id == 3
    assert record.pretrain_steps == 0
    assert (tmp_path / "out" / "model.safetensors").resolve() == source / "model.safetensors"
    assert (tmp_path / "out" / "config.json").is_file()


def test_a_model_that_is_nowhere_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=r"policy\.model must be a local directory or a reachable hub id, got 'a/b'"):
        resolve_policy(recipe("a/b"), tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, r"(?i)qwen3.*llama"),
        ({"max_position_embeddings": 128}, r"engine\.max_model_len must be <= the policy's 128 positions, got 256"),
        ({"num_hidden_layers": 21}, r"draft\.aux_hidden_state_layer_ids must be < 21, .* got \(2, 12, 21\)"),
    ],
    ids=["another architecture", "a shorter context than the engine's", "fewer layers than the draft reads"],
)
def test_a_model_that_does_not_suit_the_run_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    source = model(tmp_path / "model", **changes)
    with pytest.raises(ConfigError, match=message):
        resolve_policy(recipe(str(source)), tmp_path / "out")


def test_a_model_without_weights_is_refused(tmp_path: Path) -> None:
    source = model(tmp_path / "model")
    (source / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"policy\.model must have weights in \*\.safetensors files, got '.*model'"):
        resolve_policy(recipe(str(source)), tmp_path / "out")


def test_a_tokenizer_without_chat_template_is_refused(tmp_path: Path) -> None:
    source = model(tmp_path / "model")
    (source / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((source / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"policy\.model must have a chat template"):
        resolve_policy(recipe(str(source)), tmp_path / "out")


_COMMIT = "0" * 40
# In a process of its own, for the hub's address is read when its client is imported.
_WRITE = """
import sys
from pathlib import Path
from slipstream.learner.policy_source import write_policy_tokenizer
from slipstream.recipe import load_recipe
from slipstream.stages.support import policy_needs

recipe = load_recipe("qwen3_8b")
write_policy_tokenizer(recipe.policy, policy_needs(recipe), Path(sys.argv[1]))
"""


class Hub(ThreadingHTTPServer):
    """Serves the files of one directory as whatever model is asked for."""

    def __init__(self, files: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = files
        self.fetched: set[str] = set()


class _Handler(BaseHTTPRequestHandler):
    server: Hub  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def _answer(self, *, with_body: bool) -> None:
        paths = sorted(self.server.files.iterdir())
        if "/tree/" in self.path:
            tree = [{"type": "file", "path": p.name, "size": p.stat().st_size, "oid": p.name} for p in paths]
            body, tag = json.dumps(tree).encode(), "tree"
        elif self.path.startswith("/api/models/"):
            files = [{"rfilename": path.name} for path in paths]
            body, tag = json.dumps({"id": "a/b", "sha": _COMMIT, "siblings": files}).encode(), "info"
        else:
            name = self.path.rpartition("/")[2]
            if not (self.server.files / name).is_file():  # the hub's client also looks around for itself
                self.send_error(404)
                return
            self.server.fetched.add(name)
            body, tag = (self.server.files / name).read_bytes(), name
        self.send_response(200)
        self.send_header("ETag", f'"{tag}"')
        self.send_header("X-Repo-Commit", _COMMIT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    files = tmp_path / "hub"
    write_tokenizer(files, max_length=32768)
    (files / "config.json").write_text(json.dumps({**QWEN3, "num_hidden_layers": 36, "max_position_embeddings": 32768}))
    (files / "model.safetensors").write_bytes(b"sixteen gigabytes")
    with Hub(files) as hub:
        thread = Thread(target=hub.serve_forever, args=(0.01,))
        thread.start()
        yield hub
        hub.shutdown()
        thread.join()


def test_configs_and_tokenizer_are_fetched_and_weights_are_not(hub: Hub, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_address[1]}",
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "0",
    }
    command = [sys.executable, "-c", _WRITE, str(tmp_path / "tokenizer")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert hub.fetched == {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert (tmp_path / "tokenizer" / "tokenizer.json").is_file()
