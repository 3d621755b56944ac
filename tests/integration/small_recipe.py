"""The tiny recipe at the smallest size that still runs every stage of the chain, and what its runs logged."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from slipstream.config import merge
from slipstream.recipe import CONFIGS
from tests.small import RECIPE

_SCRATCH = {"shape": {"num_layers": 4}, "num_steps": 4, "tokens_per_step": 512, "optimizer": {"warmup_steps": 2}}
_PRETRAIN = {"num_prompts": 32, "num_heldout_prompts": 8, "num_steps": 4, "tokens_per_step": 512}
_SMALL: dict[str, Any] = {
    "learner": {"num_threads": 1},
    "engine": {"num_threads": 1},
    "policy": {"scratch": _SCRATCH},
    "draft": {"pretrain": {**_PRETRAIN, "optimizer": {"warmup_steps": 1}}},
    "sampling": {"max_response_tokens": 24},
    "evaluation": {"num_samples_per_problem": 2, "sampling": {"max_response_tokens": 24}, "every_steps": 2},
    "tuning": {"candidate_ks": [0, 2], "batch_sizes": [4], "num_repeats": 1},
    "grpo": {"num_steps": 3, "prompts_per_step": 2, "group_size": 2, "checkpoint_every_steps": 2},
    "losslessness": RECIPE["losslessness"],
    "data": {"synthetic": {"num_train_problems": 100, "num_draft_rows": 100}},
}


def write_small_recipe(path: Path, overrides: Mapping[str, Any] | None = None) -> Path:
    """Write the recipe; for RL-Think too, whose own section would otherwise be laid over what is small here."""
    small = merge(_SMALL, overrides or {})
    values = merge(yaml.safe_load((CONFIGS / "tiny.yaml").read_text()), small)
    workloads = {name: merge(section, small) for name, section in values["workloads"].items()}
    path.write_text(yaml.safe_dump({**values, "name": "smoke", "workloads": workloads}))
    return path


def metrics_of(root: Path, run: str) -> dict[str, float]:
    """The last values of an MLflow run's metrics, by the run's name."""
    query = "SELECT key, value FROM latest_metrics JOIN runs USING (run_uuid) WHERE name = ?"
    with sqlite3.connect(root / "mlflow.db") as database:
        return dict(database.execute(query, (run,)).fetchall())
