"""A small ablation as people launch it: a draft whose prompts do not suffice fails alone, the other one is ranked."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from slipstream.drafts.config import FRESH_INITS
from tests.integration.small_recipe import metrics_of, write_small_recipe

pytestmark = pytest.mark.slow

WORKS, FAILS = (f"rl_zero-{init}-eagle3-kl_div-k2-seed0" for init in ("in_domain", "general"))


def test_a_failed_variant_is_shown_with_its_reason_and_the_others_are_ranked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workflows.ablation import ablation

    few = tmp_path / "few.jsonl"
    few.write_text("".join(f'{{"problem": "{i} + {i}", "answer": "{2 * i}"}}\n' for i in range(5)))
    changes = {"data": {"draft_general": [{"path": str(few)}]}, "grpo": {"num_steps": 2}}
    recipe = write_small_recipe(tmp_path / "smoke.yaml", changes)
    root = tmp_path / "runs"
    monkeypatch.setenv("SLIPSTREAM_EXECUTION", "abl")

    ablation(recipe=str(recipe), draft_inits=list(FRESH_INITS), draft_lengths=[2], run_root=str(root))

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
    assert len(list((root / "store" / "pretrain_draft").iterdir())) == 1  # shared by draft and variant
    assert len(list((root / "store" / "prepare_policy").iterdir())) == 1
    assert not (root / "abl" / FAILS / "train_grpo_speculative").exists()
    assert _runs_below(root, "abl") >= {WORKS, FAILS, "policy-rl_zero", "baseline-rl_zero-seed0"}
    assert metrics_of(root, WORKS)["result/step_speedup"] == pytest.approx(row["step"]["value"])


def _runs_below(root: Path, parent: str) -> set[str]:
    query = (
        "SELECT child.name FROM runs child JOIN tags USING (run_uuid) JOIN runs parent ON parent.run_uuid = tags.value "
        "WHERE tags.key = 'mlflow.parentRunId' AND parent.name = ?"
    )
    with sqlite3.connect(root / "mlflow.db") as database:
        return {name for (name,) in database.execute(query, (parent,))}
