"""The real engine with a draft of half the policy's vocabulary: loaded, accepted, refitted, and compared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slipstream.drafts.compatibility import check_draft
from slipstream.drafts.eagle3 import build_draft, save_draft
from slipstream.drafts.methods import speculative_config
from slipstream.refit.config import WeightFiles
from slipstream.refit.fingerprint import ALL, file_fingerprints
from tests.small import DRAFT, ENGINE, PROMPTS, SAMPLING, require_equal, tokens

pytestmark = pytest.mark.slow


def _cut(path: Path, policy: Path, seed: int, token_ids: range) -> Path:
    torch.manual_seed(seed)
    save_draft(build_draft(policy, DRAFT, token_ids=token_ids), path)
    check_draft(policy, path, max_model_len=128)
    return path


def test_a_draft_of_half_the_vocabulary_is_loaded_accepted_and_refitted(
    tmp_path: Path, policy: Path, ray_session: None
) -> None:
    from slipstream.workers.engines import start_engine

    even = _cut(tmp_path / "even", policy, 0, range(0, 64, 2))
    odd = _cut(tmp_path / "odd", policy, 1, range(1, 64, 2))

    def start(draft: Path):
        return start_engine(policy, config=ENGINE, speculative_config=speculative_config(DRAFT, draft, 3))

    with start(even) as engine:
        before = engine.generate(PROMPTS, sampling=SAMPLING, group_size=4, seed=1)
        dtypes = engine.weight_dtypes(is_draft=True)
        assert dtypes["d2t"] == "int64"
        (held,) = engine.start_fingerprints(is_draft=True, turn=ALL)()
        assert held == file_fingerprints(even, dtypes)
        weights = odd / "model.safetensors"
        engine.refit(WeightFiles(policy=policy / "model.safetensors", policy_version=1, draft=weights, draft_version=1))
        (held,) = engine.start_fingerprints(is_draft=True, turn=ALL)()
        assert held == file_fingerprints(odd, dtypes)
        after = engine.generate(PROMPTS, sampling=SAMPLING, group_size=4, seed=1)
    with start(odd) as engine:
        fresh = engine.generate(PROMPTS, sampling=SAMPLING, group_size=4, seed=1)
    assert before.acceptance is not None
    assert before.acceptance.mean_acceptance_length > 1.0
    assert after.acceptance != before.acceptance
    assert tokens(after) != tokens(before)
    require_equal(after, fresh)
