"""What the stages of gpu-check refuse, on results made by hand."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.config import ConfigError
from slipstream.gpu_check import check_stages
from slipstream.gpu_check.check_stages import Setting
from tests.unit.sampled import accepted

DRAFTED = accepted(10, 7, 4, 1)


@pytest.fixture
def at(tmp_path: Path) -> Setting:
    return Setting(directory=tmp_path, work=tmp_path, is_dry=True)


@pytest.mark.parametrize(
    ("k", "changed", "error"),
    [
        (3, {"accepted_by_position": (8, 4, 0)}, r"with k 3 must be accepted at each position"),
        (3, {"num_accepted_tokens": 30, "accepted_by_position": (10, 10, 10)}, "and not always"),
        (3, {"num_drafts": 0, "num_draft_tokens": 0}, "with k 3 must be 1 to k a draft, got 0"),
        (2, {}, "with k 2 must be 1 to k a draft, got 30"),
        (0, {}, "with k 0 must be 0, got 30"),
    ],
)
def test_counters_that_do_not_fit_k_are_refused(k: int, changed: dict[str, Any], error: str) -> None:
    check_stages._check_acceptance(DRAFTED, k=3)
    with pytest.raises(ConfigError, match=error):
        check_stages._check_acceptance(replace(DRAFTED, **changed), k=k)


def test_a_norm_apart_is_noted_and_then_refused(at: Setting) -> None:
    check_stages._close(at, "ours", torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.0]), relative=0.0)
    with pytest.raises(ConfigError, match=r"ours must lie within 0\.1 of float32, got 0\.2"):
        check_stages._close(at, "ours", torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0]), relative=0.1)
    assert at.figures == {"ours_relative_error": pytest.approx(0.2)}


def test_packages_are_compared_with_the_lock_one_by_one(at: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(check_stages._missing_packages(at)) == []
    unlike = at.figures["packages_unlike_the_lock"]
    assert all(re.fullmatch(r"[\w.-]+ [\w.]+, got [\w.]+", each) for each in unlike)
    monkeypatch.setattr(check_stages, "installed_version", lambda name: "1.0+cpu" if name == "torch" else "2")
    assert next(check_stages._missing_packages(at)).endswith(", got 2")
    assert re.search(r"torch 2\.\d+\.\d+, got 1\.0;", "; ".join(check_stages._missing_packages(at)) + ";")
