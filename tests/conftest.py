"""Models of a few thousand parameters, and one Ray for all tests of a session."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# For `make mutants`, which runs every test many times: the same few examples each time.
settings.register_profile("mutants", derandomize=True, max_examples=10, deadline=None, database=None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under `make mutants` the tests that mirror the changed module come first: they are short, and find most."""
    module = os.environ.get("MUTANT_UNDER_TEST", "").partition(".x")[0]
    *packages, name = module.split(".")
    mirror = "/".join(["unit", *packages[1:], f"test_{name}.py"])
    items.sort(key=lambda item: not str(item.path).endswith(mirror))


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    from slipstream.workers.session import connect

    connect()
    yield


@pytest.fixture(scope="session")
def make_policy() -> Callable[[Path, int], Path]:
    """Writes a random policy of the given seed."""
    return _make_policy


@pytest.fixture(scope="session")
def make_draft() -> Callable[[Path, Path, int], Path]:
    """Writes a random draft of the given policy and seed."""
    return _make_draft


def _make_policy(path: Path, seed: int, *, num_key_value_heads: int = 1) -> Path:
    """A random Qwen3 with the character tokenizer, in HF format."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from slipstream.data.tokenizer import write_tokenizer

    write_tokenizer(path, max_length=256)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=num_key_value_heads,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.2,  # far from uniform, so that a wrong weight shows
        eos_token_id=3,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def _make_draft(path: Path, policy: Path, seed: int) -> Path:
    """A random draft of `policy`."""
    from slipstream.drafts.config import DraftConfig
    from slipstream.drafts.eagle3 import build_draft, save_draft

    save_draft(build_draft(policy, DraftConfig(aux_hidden_state_layer_ids=(1, 2, 3), seed=seed)), path)
    return path
