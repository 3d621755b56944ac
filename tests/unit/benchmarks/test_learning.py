import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from benchmarks.learning import Places, main
from benchmarks.study import Study, append
from slipstream.records.steps import ArmRecord
from slipstream.types import Arm
from tests.unit.benchmarks.test_study import STUDY, result
from tests.unit.report.handmade import step
from tests.unit.sampled import overlapping

ASKED = ["--seeds", "0", "1", "--k", "7"]


@dataclass
class Runner:
    """Notes each seed and the cores it may use, and leaves a result unless it shall fail."""

    failing: int | None = None
    seeds: list[int] = field(default_factory=list)
    cores: list[set[int]] = field(default_factory=list)

    def __call__(self, study: Study, seed: int, places: Places) -> int:
        self.seeds.append(seed)
        self.cores.append(os.sched_getaffinity(0))
        if seed == self.failing:
            return 1
        append(result(seed, study=study), places.output)
        return 0


def test_finished_seeds_are_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    append(result(1, study=STUDY), tmp_path / "results.jsonl")
    runner = Runner()
    for _ in range(2):
        assert main([*ASKED, "--root", str(tmp_path)], run_seed=runner) == 0
        assert runner.seeds == [0]
    assert "2 of 2 seeds gain" in capsys.readouterr().out.splitlines()[-2]


def test_a_seed_that_fails_stops_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runner = Runner(failing=0)
    assert main([*ASKED, "--root", str(tmp_path)], run_seed=runner) == 1
    assert runner.seeds == [0, 1]
    assert "1 of 1 seeds gain" in capsys.readouterr().out


def test_a_pinned_seed_gets_one_core_and_the_caller_keeps_its_own(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    runner = Runner()
    assert main([*ASKED, "--root", str(tmp_path), "--pin"], run_seed=runner) == 0
    assert runner.cores == [{min(before)}] * 2
    assert os.sched_getaffinity(0) == before


def test_of_an_asynchronous_arm_all_that_its_engines_generated_counts_evenly_over_its_steps() -> None:
    """The first step generates two batches, the last one none."""
    from benchmarks.learning_seed import with_whole_generation

    overlap = overlapping(generation_s=0.9)
    first, last = step(0, generation_s=0.1, reward=0.5), step(1, generation_s=0.2, reward=0.5)
    steps = (replace(first, overlap=overlap), replace(last, overlap=replace(overlap, generation_s=0.0)))
    arm = ArmRecord(arm=Arm.AUTOREGRESSIVE, num_speculative_tokens=0, steps=steps)
    found = with_whole_generation(arm)
    assert [each.times.generation_s for each in found.steps] == [0.45, 0.45]
    assert [each.times.step_s for each in found.steps] == [each.times.step_s for each in arm.steps]
    synchronous = replace(arm, steps=(first, last))
    assert with_whole_generation(synchronous) == synchronous
