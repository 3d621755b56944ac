from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.study import SeedResult, Study, append, finished
from slipstream.types import Workload

STUDY = Study(recipe="tiny", workload=Workload.RL_ZERO, k=7, evaluate=False, pinned=False)


def result(seed: int, *, study: Study = STUDY, **changes: object) -> SeedResult:
    gains: Any = {"gain_autoregressive": 0.15, "gain_speculative": 0.10, "start_reward": 0.25, "start_accuracy": None}
    speed: Any = {"mean_acceptance_length": 6.5, "generation_speedup": 2.0, "step_speedup": 1.25, "elapsed_s": 60.0}
    asked: Any = {"recipe": "tiny", "workload": "rl_zero", "k": 7, "num_steps": 4, "pinned": False, "dtype": "float32"}
    rewards: Any = {"rewards_autoregressive": (0.2, 0.35), "rewards_speculative": (0.3, 0.4)}
    made = {**asked, **gains, **speed, **rewards, "commit": "abc", "execution": "/runs/seed"}
    return SeedResult(seed=seed, key=study.key(seed), **{**made, **changes})


def test_the_seed_sets_everything_random_and_overrides_reach_the_recipe_as_yaml_reads_them() -> None:
    recipe = STUDY.recipe_of(3)
    assert recipe.policy.scratch is not None
    assert (recipe.policy.scratch.seed, recipe.data.seed, recipe.draft.seed, recipe.grpo.seed) == (3, 3, 3, 3)
    given = replace(STUDY, recipe="qwen3_8b").recipe_of(3)  # no policy of its own
    assert (given.policy.scratch, given.grpo.seed) == (None, 3)
    changes = ("draft.online.when=off", "grpo.optimizer.learning_rate=1e-4")
    recipe = replace(STUDY, pinned=True, overrides=changes).recipe_of(0)
    assert (recipe.learner.num_threads, recipe.engine.num_threads) == (1, 1)
    assert (recipe.draft.online.when.value, recipe.grpo.optimizer.learning_rate) == ("off", 1e-4)


def test_a_line_that_a_crash_cut_off_costs_its_own_seed_alone(tmp_path: Path) -> None:
    path = tmp_path / "below" / "results.jsonl"
    assert finished(path, STUDY, [0]) == {}
    append(result(0), path)
    with path.open("ab") as file:
        file.write(b'{"seed": 1, "ga')
    append(result(2, start_accuracy=0.5), path)  # evaluated, which the study does not ask for
    assert finished(path, STUDY, [0, 1, 2]) == {0: result(0), 2: result(2, start_accuracy=0.5)}
    assert finished(path, STUDY, [1]) == {}


@pytest.mark.parametrize(
    "change",
    [
        *({"k": 5}, {"pinned": True}, {"workload": Workload.RL_THINK}, {"evaluate": True}),
        *({"overrides": (each,)} for each in ("grpo.num_steps=4", "sampling.max_response_tokens=80")),
    ],
)
def test_a_result_of_other_settings_is_not_taken_for_this_study(tmp_path: Path, change: dict[str, Any]) -> None:
    append(result(0), tmp_path / "results.jsonl")
    assert finished(tmp_path / "results.jsonl", replace(STUDY, **change), [0]) == {}
