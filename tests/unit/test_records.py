"""Records reach the disk whole or not at all, and come back equal."""

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
from slipstream.records.steps import ScheduleEntry, StepRecord
from tests.unit.report.handmade import ASYNCHRONOUS, RECORD

ARM = RECORD.arms[1]
STEP = ARM.steps[1]
assert STEP.acceptance is not None
ACCEPTANCE = STEP.acceptance


@pytest.mark.parametrize("record", [ACCEPTANCE, STEP, ARM, ASYNCHRONOUS], ids=lambda record: type(record).__name__)
def test_record_comes_back_equal_alone_in_a_new_folder_or_over_a_longer_one(record: Any, tmp_path: Path):
    path = tmp_path / "a" / "b" / "record.json"
    for _ in range(2):
        assert read_record(type(record), write_record(record, path)) == record
        assert list(path.parent.iterdir()) == [path]
        write_record(replace(ARM, steps=(STEP,) * 50), path)


def test_file_is_plain_json_with_enums_as_values_and_times_in_the_order_of_the_stages(tmp_path: Path) -> None:
    arm = replace(ARM, steps=(STEP, replace(STEP, acceptance=None)))
    written = json.loads(write_record(arm, tmp_path / "arm.json").read_text())
    assert written["arm"] == "speculative"
    assert written["steps"][0]["acceptance"]["accepted_by_position"] == [8, 4]
    assert written["steps"][1]["acceptance"] is None
    names = ["data", "prepare", "generation", "logprob", "train"]
    assert list(STEP.times.by_stage().items()) == list(zip(names, (0.1, 0.2, 3.0, 0.5, 1.2), strict=True))


@given(
    loss=st.floats(allow_nan=False, allow_infinity=False),
    generation_s=st.floats(min_value=0, allow_infinity=False),
    rewards=st.floats(0, 1),
)
def test_floats_survive_to_the_last_bit(
    loss: float, generation_s: float, rewards: float, tmp_path_factory: pytest.TempPathFactory
):
    train, times = replace(STEP.train, loss=loss), replace(STEP.times, generation_s=generation_s)
    record = replace(STEP, train=train, reward_mean=rewards, times=times)
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


def test_failed_write_removes_its_temporary_file(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"num_drafts": 1}', r"unknown key 'entry\.json\.num_drafts'"),
        ('{"batch_from": 1, "batch_to": 4}', r"entry\.json\.num_speculative_tokens is required"),
        ('{"batch_from": 1, "ba', r"entry\.json must be a record in JSON, got other text: Unterminated string"),
    ],
)
def test_what_is_no_such_record_is_refused_with_the_file_named(text: str, message: str, tmp_path: Path):
    (tmp_path / "entry.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_record(ScheduleEntry, tmp_path / "entry.json")
