"""The page of an execution that goes on says what its runs have logged so far."""

import os
import re
from pathlib import Path

from slipstream.report.live import live_page
from slipstream.tracking.spool import Event, RunHeader, Spool, spool_path


def spooled(root: Path, key: str, *events: Event) -> Path:
    path = spool_path(root, experiment="tiny", key=key)
    header = RunHeader(experiment="tiny", key=key, name=key.rpartition("/")[2])
    spool = Spool(path)
    for event in (Event(kind="open", time_ms=0, header=header), *events):
        spool.append(event)
    spool.close()
    return path


def step(number: int, **metrics: float) -> Event:
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    return Event(kind="metrics", time_ms=number, step=number, metrics=named)


def rows(page: str) -> list[list[str]]:
    return [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", page)]


def test_an_arm_shows_its_time_by_stage_its_reward_and_its_acceptance(tmp_path: Path) -> None:
    times = {"time__step_s": 4.0, "time__generation_s": 3.0, "time__train_s": 1.0}
    lengths = [{"spec__mean_acceptance_length": 1.0 if n < 5 else 2.0} for n in range(10)]
    steps = [step(n, train__reward=n / 10, **times, **length) for n, length in enumerate(lengths)]
    again = step(9, time__step_s=4.0, time__generation_s=3.0, train__reward=0.4)  # of a second attempt
    spooled(tmp_path, "e/train_grpo_speculative", *steps, again)
    page = live_page(tmp_path, "e", since_s=0.0, links={"MLflow": "http://mlflow/?a=1&b=2", "Flyte": ""})
    assert "train_grpo_speculative: runs" in page and "10 steps" in page
    found = {row[0]: row[1:] for row in rows(page) if row}
    times = {"step": ["4.00 s", ""], "generation": ["3.00 s", "75%"], "train": ["1.00 s", "25%"]}
    assert found.items() >= times.items()
    assert found["reward"] == ["0.200", "0.600"]  # of 0 to 0.4, and of 0.5 to 0.8 and 0.4
    assert found["mean acceptance length"] == ["1.00", "2.00"]
    assert '<a href="http://mlflow/?a=1&amp;b=2">MLflow</a>' in page and "Flyte" not in page


def test_other_runs_show_their_last_values_and_runs_before_the_task_or_of_others_nothing(tmp_path: Path) -> None:
    ended = Event(kind="end", time_ms=3, status="FINISHED")
    spooled(tmp_path, "e/pretrain_draft", step(1, draft__loss=2.0), step(2, draft__loss=1.5), ended)
    earlier = spooled(tmp_path, "e/prepare_data", step(1, data__num_prompts=64.0))
    os.utime(earlier, (10.0, 10.0))
    spooled(tmp_path, "another/pretrain_draft", step(1, draft__loss=9.0))
    page = live_page(tmp_path, "e", since_s=20.0, links={})
    assert "pretrain_draft: FINISHED" in page
    assert [row for row in rows(page) if row] == [["draft/loss", "1.5"]]
