"""The example that is a whole GRPO run in one file trains, with drafts and the gate."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from examples import one_file_grpo
from tests.integration.small_recipe import write_small_recipe

pytestmark = pytest.mark.slow


def test_the_loop_in_one_file_trains_a_policy(
    tmp_path: Path, ray_session: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(one_file_grpo, "reward", lambda prompt, response: float(len(response) % 2))
    recipe = write_small_recipe(tmp_path / "recipe.yaml")
    command = ["--recipe", str(recipe), "--num-steps", "2", "--num-drafted", "2", "--output", str(tmp_path / "policy")]
    means = one_file_grpo.main(command)
    steps = re.findall(r"step (\d)/2: .*? (\d+) tensors compared, gradient norm ([\d.]+), acc", capsys.readouterr().out)
    assert [step for step, _, _ in steps] == ["1", "2"]
    assert all(int(tensors) > 0 for _, tensors, _ in steps)
    assert any(0 < mean < 1 for mean in means)
    assert any(float(norm) > 0 for _, _, norm in steps)
    assert (tmp_path / "policy" / "model.safetensors").is_file()
