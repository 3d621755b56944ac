"""Executions that share a root: what one made, the next takes, unless its recipe asks for another or it is measured."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slipstream.stages.context import EXECUTION_VARIABLE
from slipstream.types import ArmLoop
from tests.integration.small_recipe import write_small_recipe

pytestmark = pytest.mark.slow


@dataclass(frozen=True, kw_only=True)
class Executions:
    """Executions of one recipe under one root, up to the draft length."""

    root: Path
    recipe: Path
    monkeypatch: pytest.MonkeyPatch

    def run(self, name: str, *overrides: str, measures: bool) -> None:
        """Run the tasks, as a workflow calls them."""
        from tasks.prepare_data import prepare_data
        from tasks.prepare_policy import prepare_policy
        from tasks.pretrain_draft import pretrain_draft
        from tasks.start_run import start_run
        from tasks.tune_draft_length import tune_draft_length

        self.monkeypatch.setenv(EXECUTION_VARIABLE, name)
        # flytekit types what a task gives as all that it may give anywhere.
        started: Any = start_run(
            recipe=str(self.recipe),
            workload=None,
            num_steps=None,
            seed=None,
            overrides=list(overrides),
            max_off_policy_steps=None,
            run_root=str(self.root),
            resume_execution="",
            reuse_stored=True,
            loop=ArmLoop.SYNCHRONOUS,
        )
        shared = {"context": started.context, "recipe": started.recipe}
        prepared: Any = prepare_data(**shared)
        made: Any = prepare_policy(**shared, data=prepared.data)
        models = {"policy": made.policy, "data": prepared.data}
        trained: Any = pretrain_draft(**shared, **models)
        if measures:
            tune_draft_length(**shared, **models, draft=trained.draft)

    def makers(self, name: str) -> dict[str, str]:
        """Which execution made what the execution `name` uses, by stage."""
        directory = self.root / name
        stages = ("prepare_data", "prepare_policy", "pretrain_draft")
        return {stage: json.loads((directory / stage / "made.json").read_text())["execution"] for stage in stages}

    def losses(self, name: str) -> list[float]:
        """Of the training of the draft that the execution uses."""
        return json.loads((self.root / name / "pretrain_draft" / "draft.json").read_text())["losses"]


def test_a_changed_field_of_the_draft_trains_the_draft_alone_anew_and_what_is_measured_is_measured_again(
    tmp_path: Path, ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    executions = Executions(
        root=tmp_path / "runs", recipe=write_small_recipe(tmp_path / "smoke.yaml"), monkeypatch=monkeypatch
    )
    executions.run("first", measures=True)
    executions.run("changed", "draft.learning_rate=0.001", measures=False)
    executions.run("again", measures=True)

    of_first = dict.fromkeys(("prepare_data", "prepare_policy", "pretrain_draft"), "first")
    assert executions.makers("first") == of_first
    assert executions.makers("changed") == {**of_first, "pretrain_draft": "changed"}
    assert executions.makers("again") == of_first
    # The first step is taken from the same weights on the same chats; the rate counts from the second on.
    first, changed = executions.losses("first"), executions.losses("changed")
    assert first[0] == changed[0]
    assert first[-1] != changed[-1]
    assert executions.losses("again") == first
    measured = [tmp_path / "runs" / name / "tune_draft_length" for name in ("first", "again")]
    assert not any(directory.is_symlink() for directory in measured)
    times = [json.loads((directory / "tuning.json").read_text())["points"] for directory in measured]
    assert times[0] != times[1], "two measurements of a time are never equal"
