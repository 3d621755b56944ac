"""A disk that fills up in the middle of a checkpoint costs that checkpoint and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

_CHILD = """
import resource, signal, sys
from pathlib import Path
import torch
from slipstream.policy import checkpoint, parallel
from slipstream.policy.config import ParallelConfig

parallel.initialize(ParallelConfig())
path = Path(sys.argv[1])
state = lambda value: checkpoint.State(tensors={"model.w": torch.full((100_000,), value)}, meta={"version": value})
checkpoint.save(path, state(1.0))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit fails, as on a full disk
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
try:
    checkpoint.save(path, state(2.0))
except Exception as error:
    print("failed:", error)
kept = checkpoint.load(path)
print("kept:", kept.meta["version"], float(kept.tensors["model.w"].sum()))
print("beside it:", sorted(p.name for p in path.parent.iterdir()))
"""


def test_a_full_disk_keeps_the_checkpoint_before(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(tmp_path / "step-000001")], capture_output=True, text=True, check=True
    )

    assert "failed:" in done.stdout
    assert f"kept: 1.0 {float(torch.full((100_000,), 1.0).sum())}" in done.stdout
    assert "beside it: ['step-000001']" in done.stdout
