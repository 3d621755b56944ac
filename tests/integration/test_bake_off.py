"""A small bake-off as people launch it: real engines and learners, their steps in turn, and one drafter that fails."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from slipstream.drafts.config import DraftInit, DraftMethod, DraftOnline
from slipstream.records.files import read_record
from slipstream.records.steps import ArmRecord
from slipstream.tracking.config import TrackingConfig, store_uri
from slipstream.tracking.mlflow_store import read_executions
from tests.integration.small_recipe import metrics_of, write_small_recipe

pytestmark = pytest.mark.slow


def test_drafters_are_compared_in_turn_and_one_that_fails_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workflows.bake_off import bake_off

    few = tmp_path / "few.jsonl"
    few.write_text("".join(f'{{"problem": "{i} + {i}", "answer": "{2 * i}"}}\n' for i in range(5)))
    changes: dict[str, Any] = {"data": {"draft_general": [{"path": str(few)}]}, "tuning": {"max_live_engines": 4}}
    recipe = write_small_recipe(tmp_path / "smoke.yaml", changes)
    root = tmp_path / "runs"
    monkeypatch.setenv("SLIPSTREAM_EXECUTION", "bake")

    bake_off(
        recipe=str(recipe),
        methods=[DraftMethod.EAGLE3, DraftMethod.NGRAM],
        inits=[DraftInit.IN_DOMAIN, DraftInit.GENERAL],
        online=[DraftOnline.OFF, DraftOnline.ALWAYS],
        num_speculative_tokens=2,
        run_root=str(root),
    )

    page = root / "bake" / "bake_off"
    record = json.loads((page / "bake_off.json").read_text())
    results = {_name(row): row["outcomes"][0] for row in record["rows"]}
    assert set(results) == {"eagle3 in_domain off", "eagle3 in_domain always", "ngram None off"}
    assert {result["num_steps"] for result in results.values()} == {3}
    assert results["eagle3 in_domain off"]["pretraining_s"] == results["eagle3 in_domain always"]["pretraining_s"] > 0
    trained = {name for name, result in results.items() if result["training_s"] > 0}
    assert trained == {"eagle3 in_domain always"}
    dropouts = {_name(failure["variant"]): failure["reason"] for failure in record["failures"]}
    assert set(dropouts) == {"eagle3 general off", "eagle3 general always"}
    assert all("must be <= 5" in reason for reason in dropouts.values())
    assert "must be &lt;= 5" in (page / "bake_off.html").read_text()
    assert len(list((root / "store" / "pretrain_draft").iterdir())) == 1  # shared by both trainings in RL
    arm = read_record(ArmRecord, root / "bake" / "eagle3-in_domain-always" / "train_grpo" / "arm.json")
    assert [step.draft_version for step in arm.steps] == [0, 1, 2]
    drafts = root.glob("bake/*/train_grpo/draft/model.safetensors")
    assert [path.relative_to(root / "bake").parts[0] for path in drafts] == ["eagle3-in_domain-always"]
    assert _failed_runs(root) == {"eagle3-general-off", "eagle3-general-always", "pretrain_draft"}
    assert metrics_of(root, "bake")["result/num_drafters"] == 3
    assert read_executions(store_uri(TrackingConfig(), root), experiment=None, names=[]) == []  # it is none of two arms


def _name(variant: dict[str, Any]) -> str:
    setting = variant["setting"]
    return f"{setting['method']} {setting['init']} {setting['online']}"


def _failed_runs(root: Path) -> set[str]:
    with sqlite3.connect(root / "mlflow.db") as database:
        statuses = database.execute("SELECT name, status FROM runs").fetchall()
    assert {status for _, status in statuses} == {"FINISHED", "FAILED"}
    return {name for name, status in statuses if status == "FAILED"}
