"""A small bake-off and a small ablation as people launch them, with real engines and learners, and variants that fail.

The ablation finds data, policy and draft that the bake-off has made under the same root.
"""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from slipstream.drafts.config import FRESH_INITS, DraftInit, DraftMethod, DraftOnline
from slipstream.records.files import read_record
from slipstream.records.steps import ArmRecord
from slipstream.tracking.config import TrackingConfig, store_uri
from slipstream.tracking.mlflow_store import read_executions
from tests.integration.small_recipe import metrics_of, write_small_recipe

pytestmark = pytest.mark.slow

WORKS, FAILS = (f"rl_zero-{init}-eagle3-kl_div-k2-seed0" for init in ("in_domain", "general"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("studies")


@pytest.fixture(scope="module")
def recipe(root: Path) -> str:
    """Of a draft from the domain, and a general one whose five prompts do not suffice."""
    (root / "few.jsonl").write_text("".join(f'{{"problem": "{i} + {i}", "answer": "{2 * i}"}}\n' for i in range(5)))
    changes: dict[str, Any] = {"data": {"draft_general": [{"path": str(root / "few.jsonl")}]}, "grpo": {"num_steps": 2}}
    return str(write_small_recipe(root / "smoke.yaml", changes | {"tuning": {"max_live_engines": 4}}))


def test_drafters_are_compared_in_turn_and_one_that_fails_is_shown(
    root: Path, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workflows.bake_off import bake_off

    monkeypatch.setenv("SLIPSTREAM_EXECUTION", "bake")
    bake_off(
        recipe=recipe,
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
    assert {result["num_steps"] for result in results.values()} == {2}
    assert results["eagle3 in_domain off"]["pretraining_s"] == results["eagle3 in_domain always"]["pretraining_s"] > 0
    trained = {name for name, result in results.items() if result["training_s"] > 0}
    assert trained == {"eagle3 in_domain always"}
    dropouts = {_name(failure["variant"]): failure["reason"] for failure in record["failures"]}
    assert set(dropouts) == {"eagle3 general off", "eagle3 general always"}
    assert all("must be <= 5" in reason for reason in dropouts.values())
    assert "must be &lt;= 5" in (page / "bake_off.html").read_text()
    assert _num_stored(root, "pretrain_draft") == 1  # shared by both trainings in RL
    arm = read_record(ArmRecord, root / "bake" / "eagle3-in_domain-always" / "train_grpo" / "arm.json")
    assert [step.draft_version for step in arm.steps] == [0, 1]
    drafts = root.glob("bake/*/train_grpo/draft/model.safetensors")
    assert [path.relative_to(root / "bake").parts[0] for path in drafts] == ["eagle3-in_domain-always"]
    statuses = _rows(root, "SELECT name, status FROM runs")
    assert {status for _, status in statuses} == {"FINISHED", "FAILED"}
    failed = {name for name, status in statuses if status == "FAILED"}
    assert failed == {"eagle3-general-off", "eagle3-general-always", "pretrain_draft"}
    assert metrics_of(root, "bake")["result/num_drafters"] == 3
    assert read_executions(store_uri(TrackingConfig(), root), experiment=None, names=[]) == []  # it is none of two arms


def test_a_failed_variant_is_shown_with_its_reason_and_the_others_are_ranked(
    root: Path, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workflows.ablation import ablation

    monkeypatch.setenv("SLIPSTREAM_EXECUTION", "abl")
    ablation(recipe=recipe, draft_inits=list(FRESH_INITS), draft_lengths=[2], run_root=str(root))

    page = root / "abl" / "rank_ablation"
    record = json.loads((page / "ablation.json").read_text())
    (row,) = record["rows"]
    assert (row["rank"], row["setting"]["init"]) == (1, "in_domain")
    assert [outcome["num_speculative_tokens"] for outcome in row["outcomes"]] == [2]
    assert row["mean_acceptance_length"] > 1
    (failure,) = record["failures"]
    assert failure["variant"]["setting"]["init"] == "general"
    assert "draft.pretrain.num_prompts + num_heldout_prompts must be <= 5" in failure["reason"]
    assert failure["reason"] in (page / "ablation.html").read_text().replace("&lt;", "<")
    assert _num_stored(root, "pretrain_draft") == _num_stored(root, "prepare_policy") == 1
    assert not (root / "abl" / FAILS / "train_grpo_speculative").exists()
    below = _rows(
        root,
        "SELECT child.name FROM runs child JOIN tags USING (run_uuid) JOIN runs parent ON parent.run_uuid = tags.value "
        "WHERE tags.key = 'mlflow.parentRunId' AND parent.name = 'abl'",
    )
    assert {name for (name,) in below} >= {WORKS, FAILS, "policy-rl_zero", "baseline-rl_zero-seed0"}
    assert metrics_of(root, WORKS)["result/step_speedup"] == pytest.approx(row["step"]["value"])


def _name(variant: dict[str, Any]) -> str:
    setting = variant["setting"]
    return f"{setting['method']} {setting['init']} {setting['online']}"


def _num_stored(root: Path, stage: str) -> int:
    return len(list((root / "store" / stage).iterdir()))


def _rows(root: Path, query: str) -> list[Any]:
    with sqlite3.connect(root / "mlflow.db") as database:
        return database.execute(query).fetchall()
