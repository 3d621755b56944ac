"""Records reach the disk whole or not at all, and come back equal."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.config import ConfigError
from slipstream.records.files import append_line, is_torn, read_record, write_atomic, write_record
from slipstream.records.steps import ArmRecord, ScheduleEntry, StepRecord
from tests.unit.report.handmade import ASYNCHRONOUS, RECORD

ARM = RECORD.arms[1]
STEP = ARM.steps[1]
assert STEP.acceptance is not None
ACCEPTANCE = STEP.acceptance


@pytest.mark.parametrize("record", [ACCEPTANCE, STEP, ARM, ASYNCHRONOUS], ids=lambda record: type(record).__name__)
def test_record_comes_back_equal(record: Any, tmp_path: Path):
    assert read_record(type(record), write_record(record, tmp_path / "record.json")) == record


def test_file_is_plain_json_with_enums_as_values(tmp_path: Path):
    arm = replace(ARM, steps=(STEP, replace(STEP, acceptance=None)))
    written = json.loads(write_record(arm, tmp_path / "arm.json").read_text())
    assert written["arm"] == "speculative"
    assert written["steps"][0]["acceptance"]["accepted_by_position"] == [8, 4]
    assert written["steps"][1]["acceptance"] is None


@given(
    loss=st.floats(allow_nan=False, allow_infinity=False),
    generation_s=st.floats(min_value=0, allow_infinity=False),
    rewards=st.floats(0, 1),
)
def test_floats_survive_to_the_last_bit(
    loss: float, generation_s: float, rewards: float, tmp_path_factory: pytest.TempPathFactory
):
    record = replace(
        STEP,
        train=replace(STEP.train, loss=loss),
        reward_mean=rewards,
        times=replace(STEP.times, generation_s=generation_s),
    )
    path = tmp_path_factory.getbasetemp() / "floats.json"
    assert read_record(StepRecord, write_record(record, path)) == record


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_value_that_is_no_number_is_refused_and_the_old_file_stays(value: float, tmp_path: Path):
    path = write_record(STEP, tmp_path / "step.json")
    before = path.read_bytes()
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_record(replace(STEP, train=replace(STEP.train, loss=value)), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_writing_makes_the_folder_and_leaves_nothing_else(tmp_path: Path):
    path = write_record(STEP, tmp_path / "a" / "b" / "step.json")
    assert list(path.parent.iterdir()) == [path]


def test_writing_over_a_longer_file_leaves_no_tail(tmp_path: Path):
    path = tmp_path / "arm.json"
    write_record(replace(ARM, steps=(STEP,) * 50), path)
    short = replace(ARM, steps=())
    assert read_record(ArmRecord, write_record(short, path)) == short


def test_failed_write_removes_its_temporary_file(tmp_path: Path):
    # A folder of that name cannot be replaced by a file: the rename fails after the data has been written.
    (tmp_path / "step.json" / "inside").mkdir(parents=True)
    with pytest.raises(OSError, match=r"step\.json"):
        write_record(STEP, tmp_path / "step.json")
    assert [path.name for path in tmp_path.iterdir()] == ["step.json"]


APPENDED = """
import resource, signal, sys
from slipstream.records.files import append_line
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit is short, as on a disk that fills up
resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
with open(sys.argv[1], "a+b", buffering=0) as file:
    append_line(file, b"abc")
    try:
        append_line(file, b"0123456789")
    except OSError as error:
        print(type(error).__name__)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    append_line(file, b"def")
"""


def test_a_line_that_a_full_disk_takes_in_part_is_an_error_and_leaves_nothing(tmp_path: Path):
    path = tmp_path / "lines"
    done = subprocess.run([sys.executable, "-c", APPENDED, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout == "OSError\n"
    assert path.read_bytes() == b"abc\ndef\n"


def test_a_line_after_one_that_another_process_left_torn_stands_alone(tmp_path: Path):
    path = tmp_path / "lines"
    with path.open("a+b", buffering=0) as file:
        append_line(file, b"one")
        assert not is_torn(file)
        with path.open("ab") as other:
            other.write(b'{"tw')
        assert is_torn(file)
        append_line(file, b"three")
    assert path.read_bytes() == b'one\n{"tw\nthree\n'


WRITER = """
import sys
from pathlib import Path
from slipstream.records.files import write_atomic
path = Path(sys.argv[1])
print("ready", flush=True)
while True:
    write_atomic(path, b"a" * 200_000)
    write_atomic(path, b"b" * 100_000)
"""


def test_reader_sees_whole_files_while_a_writer_is_at_work_and_killed(tmp_path: Path):
    path = tmp_path / "spool"
    write_atomic(path, b"a" * 200_000)
    whole = {b"a" * 200_000, b"b" * 100_000}
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    try:
        assert writer.stdout.readline() == b"ready\n"
        seen = {path.read_bytes() for _ in range(400)}
    finally:
        writer.kill()
        writer.wait()
        writer.stdout.close()
    assert seen | {path.read_bytes()} <= whole


def test_other_fields_are_refused_with_the_file_named(tmp_path: Path):
    path = write_record(ACCEPTANCE, tmp_path / "acceptance.json")
    with pytest.raises(ConfigError, match=r"unknown key 'acceptance\.json\.num_drafts'"):
        read_record(ScheduleEntry, path)


def test_missing_field_is_refused_with_the_file_named(tmp_path: Path):
    path = tmp_path / "entry.json"
    path.write_text(json.dumps({"batch_from": 1, "batch_to": 4}))
    with pytest.raises(ConfigError, match=r"entry\.json\.num_speculative_tokens is required"):
        read_record(ScheduleEntry, path)


def test_cut_file_is_refused(tmp_path: Path):
    path = write_record(STEP, tmp_path / "step.json")
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ConfigError, match=r"step\.json must be a record in JSON, got other text: Unterminated string"):
        read_record(StepRecord, path)


def test_stage_times_are_given_in_the_order_of_the_stages():
    names = ["data", "prepare", "generation", "logprob", "train"]
    assert list(STEP.times.by_stage().items()) == list(zip(names, (0.1, 0.2, 3.0, 0.5, 1.2), strict=True))
