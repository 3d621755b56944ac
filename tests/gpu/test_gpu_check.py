"""Stages 1 to 7 and 10 of gpu-check as tests: kernels, engine, speculation, refit, learner, draft, memory in turn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slipstream.gpu_check.check_command import STAGES, Stage
from tests.forked.tasks import not_forked

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(
    "stage", [STAGES[number] for number in (1, 2, 3, 4, 5, 6, 7, 10)], ids=lambda stage: stage.name
)
def test_a_stage_passes(stage: Stage, tmp_path: Path) -> None:
    check = [sys.executable, "-m", "slipstream.cli", "gpu-check", "--stage", str(stage.number), "--output", tmp_path]
    run = subprocess.run(check, capture_output=True, text=True, check=False, env=not_forked(os.environ))
    line = json.loads(run.stdout.splitlines()[0])
    if line["outcome"] == "skipped":
        pytest.skip(line["reason"])
    (log,) = tmp_path.glob("*/*/log.txt")
    assert line["outcome"] == "passed", f"{line['reason']}\n{log.read_text()[-5000:]}"
