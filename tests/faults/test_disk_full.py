"""A disk that fills up costs the checkpoint or the point that it refuses, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from slipstream.tracking.spool import read_spool

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
part = lambda value: Part("weight/w", box.shape, box, (torch.full(box.shape, value),))
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


_SPOOL = """
import resource, signal, sys
from pathlib import Path
from slipstream.tracking.spool import Event, Spool

point = lambda step: Event(kind="metrics", time_ms=step, step=step, metrics={"train/loss": 1.0})
spool = Spool(Path(sys.argv[1]))
spool.append(point(1))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit is short, and the next one fails
resource.setrlimit(resource.RLIMIT_FSIZE, (spool.path.stat().st_size + 20, resource.RLIM_INFINITY))
try:
    spool.append(point(2))
except OSError as error:
    print("failed:", error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
spool.append(point(3))
spool.close()
"""


def test_a_disk_that_is_full_for_a_moment_costs_one_point_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "spool.jsonl"
    done = subprocess.run([sys.executable, "-c", _SPOOL, str(path)], capture_output=True, text=True, check=True)

    assert done.stdout == "failed: [Errno 27] File too large\n"
    part = read_spool(path)
    assert [event.step for event in part.events] == [1, 3]
    assert part.num_broken_lines == 0
