"""A policy of two layers and 16 tokens, what it computes of two chats, and a fresh draft of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.drafts.learner_draft import Chats
from tests.unit.drafts.small import CHATS, CONFIG, PROMPTS, policy_of, states_of


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return policy_of(tmp_path_factory.mktemp("policy"), num_layers=2)


@pytest.fixture(scope="session")
def chats(policy: Path) -> Chats:
    return Chats(CHATS, PROMPTS, states_of(policy))


@pytest.fixture
def draft(policy: Path, tmp_path: Path) -> Path:
    from slipstream.drafts.trainer import DraftTrainer

    DraftTrainer(policy, CONFIG).save(tmp_path / "draft")
    return tmp_path / "draft"
