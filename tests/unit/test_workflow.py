"""The workflows as people launch them: their graphs as the documents show them, and inputs that say nothing."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from slipstream.recipe import CONFIGS
from slipstream.run_command import started
from slipstream.types import Arms, Workload


def test_pyflyte_run_reads_what_a_demo_was_given_and_nothing_where_it_was_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner
    from flytekit.clis.sdk_in_container import run
    from flytekit.clis.sdk_in_container.pyflyte import main

    read: dict[str, Any] = {}
    monkeypatch.chdir(CONFIGS.parent)
    monkeypatch.setattr(run, "run_command", lambda *_: lambda **inputs: read.update(inputs))  # which would run it
    given = {"workload": Workload.RL_THINK, "seed": 0, "num_steps": None}
    changes = ["placement.arms_in_turn=off"]
    launch = started("tiny", reuse_stored=True, arms=Arms.SPECULATIVE, overrides=changes, **given)
    ended = CliRunner().invoke(main, launch.command(Path("/runs"))[1:])
    assert (ended.exit_code, ended.exception) == (0, None), ended.output
    assert (read["workload"], read["seed"], read["num_steps"]) == (Workload.RL_THINK, 0, None)
    assert read["arms"] is Arms.SPECULATIVE
    assert read["overrides"] == changes


@pytest.mark.parametrize("workflow", ["speculative_rl", "asynchronous_rl", "bake_off", "ablation"])
def test_inputs_that_are_left_out_say_nothing_of_the_recipe(workflow: str) -> None:
    inputs = getattr(import_module(f"workflows.{workflow}"), workflow).python_interface.inputs_with_defaults
    own = {"workload", "num_steps", "seed", "max_off_policy_steps", "overrides", "seeds", "workloads"} & inputs.keys()
    if workflow == "ablation":
        own |= {"draft_inits", "methods", "losses", "draft_lengths"}
    assert len(own) >= 4
    assert all(inputs[name][1] in (None, []) for name in own)


def test_the_documents_show_the_workflows_as_they_are_compiled() -> None:
    from scripts.draw_workflows import IMAGES, NAMES, picture, tasks_with_gpus

    for name in NAMES:
        drawn = (IMAGES / f"workflow_{name}.svg").read_text()
        assert drawn == picture(name, tasks_with_gpus()), "run scripts/draw_workflows.py"
