"""`slipstream gpu-check --dry`, whole: what will run on a GPU runs here first, on the CPU."""

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from slipstream.gpu_check.check_command import STAGES

pytestmark = pytest.mark.slow


def test_every_stage_passes_on_the_cpu_and_says_what_it_did_not_exercise(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "slipstream.cli", "gpu-check", "--dry", "--output", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        names = packed.getnames()
    (written,) = tmp_path.glob("*/lines.jsonl")
    lines = [json.loads(line) for line in written.read_text().splitlines()]
    failed = {line["name"]: line["reason"] for line in lines if line["outcome"] != "passed"}
    logs = {path.parent.name: path.read_text()[-3000:] for path in tmp_path.glob("*/*/log.txt")}
    assert failed == {}, [log for stage, log in logs.items() if stage[3:] in failed]
    assert run.returncode == 0, run.stderr
    assert [(line["stage"], line["name"]) for line in lines] == [(stage.number, stage.name) for stage in STAGES]
    assert [json.loads(line) for line in run.stdout.splitlines()[: len(STAGES)]] == lines
    for line, stage in zip(lines, STAGES, strict=True):
        assert line["not_exercised"] == list(stage.not_exercised) != []
        assert any(name.endswith(f"/{stage.number:02d}_{stage.name}/log.txt") for name in names)
    figures = {line["name"]: line["figures"] for line in lines}
    assert figures["speculation"]["certificate"] == figures["chain"]["certificate"] == "lossless"
    assert figures["chain"]["speculative_k"] == 2
    assert figures["learner"]["equal_weights_fraction_after_resume"] == 1.0
    assert figures["draft"]["last_loss"] < figures["draft"]["first_loss"]
    assert figures["throughput"]["microbatch_tokens"] == 256
    assert any("engine" in name or "worker" in name for name in names if "/ray/" in name)
