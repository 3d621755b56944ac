"""What is fetched of a hub model before there is a policy, from a hub on this machine that records each request."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from slipstream.data.tokenizer import write_tokenizer

_COMMIT = "0" * 40
_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 36,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 3,
}
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
    (files / "config.json").write_text(json.dumps(_QWEN3))
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
