"""A long task shows in its deck how far it is, while it runs and when it has failed: run as its container runs it."""

import time
from datetime import timedelta
from pathlib import Path

import pytest
from flytekit import task

from slipstream.recipe import load_recipe, write_recipe
from slipstream.stages.context import RunContext, recorded_recipe
from slipstream.tracking.spool import Event, RunHeader, Spool, spool_path
from tasks import live_deck
from tasks.recoverable import recoverable
from tests.small import UNTRACKED, run_context
from tests.unit.tasks.declared import dispatched

SEEN: dict[str, str] = {}


@task(enable_deck=True, deck_fields=())
@recoverable(timedelta(seconds=60))
def trained(context: RunContext, deck: str, fails: bool) -> str:
    header = RunHeader(experiment="tiny", key="e/train_grpo_speculative", name="speculative")
    spool = Spool(spool_path(Path(context.root), experiment="tiny", key=header.key))
    spool.append(Event(kind="open", time_ms=0, header=header))
    for step in range(3):
        metrics = {"time/step_s": 2.0, "time/generation_s": 1.5, "train/reward": 0.25}
        spool.append(Event(kind="metrics", time_ms=step, step=step, metrics=metrics))
    until_s = time.monotonic() + 30.0
    while not fails and "0.250" not in SEEN.get("running", "") and time.monotonic() < until_s:
        SEEN["running"] = Path(deck).read_text() if Path(deck).is_file() else ""
        time.sleep(0.02)
    if fails:
        raise FloatingPointError("the loss is not finite")
    return "done"


@pytest.mark.parametrize("fails", [False, True])
def test_the_deck_shows_reward_and_stages_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    SEEN.clear()
    monkeypatch.setattr(live_deck, "EVERY_S", 0.05)
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "e")
    write_recipe(load_recipe("tiny", overrides={"tracking": UNTRACKED}), recorded_recipe(tmp_path, "e"))
    deck = tmp_path / "meta" / "deck.html"
    dispatched(trained, {"context": run_context(tmp_path), "deck": str(deck), "fails": fails}, tmp_path)
    assert (tmp_path / "meta" / "error.pb").exists() is fails
    for page in [deck.read_text()] if fails else [SEEN["running"], deck.read_text()]:
        assert "speculative: runs" in page and "3 steps" in page and "75%" in page
