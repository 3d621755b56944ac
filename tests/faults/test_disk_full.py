"""A disk that fills up costs the checkpoint or the point that it refuses, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

_CHILD = """
import resource, signal, sys
from pathlib import Path
import torch
from slipstream.learner import parallel
from slipstream.learner.checkpoint import CheckpointWriteError
from slipstream.learner.checkpoint.boxes import Box
from slipstream.learner.checkpoint.on_disk import CheckpointWriter, LearnerRanks, Part, open_checkpoint
from slipstream.learner.config import ParallelConfig

parallel.initialize(ParallelConfig())
path, ranks = Path(sys.argv[1]), LearnerRanks()
writer = CheckpointWriter(ranks)
box = Box((0,), (100_000,))
part = lambda value: Part("weight/w", box.shape, box, torch.full(box.shape, value))
writer.save(path, [part(1.0)], {"version": 1.0})
writer.wait()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit fails, as on a full disk
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
writer.save(path, [part(2.0)], {"version": 2.0})
try:
    while True:
        writer.raise_error()  # as each update does
except CheckpointWriteError as error:
    print("failed:", error)
reader, state = open_checkpoint(ranks, path)
print("kept:", state["version"], float(reader.read_whole("weight/w").sum()))
print("beside it:", sorted(p.name for p in path.parent.iterdir()))
"""


def test_a_full_disk_keeps_the_checkpoint_before(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(tmp_path / "step-000001")], capture_output=True, text=True, check=True
    )

    assert f"failed: checkpoint {tmp_path / 'step-000001'} could not be written: OSError: " in done.stdout
    assert f"kept: 1.0 {float(torch.full((100_000,), 1.0).sum())}" in done.stdout
    assert "beside it: ['step-000001']" in done.stdout
