"""What a user asks for, from a calibration on the paper's measurements."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from slipstream.simulator.project.published import project_request
from slipstream.simulator.project.scenarios import ProjectionRequest

ASKED = ProjectionRequest(model="mimo-7b", hardware="h200", num_gpus=64, k=4, acceptance_length=3.0)


def test_the_time_of_the_kickoff_seeds_the_bands() -> None:
    from tasks.project_request import project_request as task

    projected: Any = task(
        model=ASKED.model,
        hardware=ASKED.hardware,
        num_gpus=ASKED.num_gpus,
        num_speculative_tokens=ASKED.k,
        mean_acceptance_length=ASKED.acceptance_length,
        max_off_policy_steps=ASKED.lag,
        generation_fraction=ASKED.generation_fraction,
        mean_response_tokens=ASKED.mean_tokens,
        kickoff_time=datetime(1970, 1, 8, 6, tzinfo=UTC),
    )
    found = json.loads(Path(projected.projection).read_text())
    assert found == json.loads(json.dumps(asdict(project_request(ASKED, seed=7))))
    assert found["calibrated"] != json.loads(json.dumps(asdict(project_request(ASKED))))["calibrated"]
    assert found["ideal"] == json.loads(json.dumps(asdict(project_request(ASKED))))["ideal"]


def test_the_workflow_projects_what_its_flat_inputs_say() -> None:
    from workflows.projection import projection

    projected: Any = projection(
        model="mimo-7b",
        hardware="h200",
        num_gpus=64,
        num_speculative_tokens=4,
        mean_acceptance_length=3.0,
        max_off_policy_steps=2,
        generation_fraction=0.5,
        mean_response_tokens=1500.0,
    )
    asked = ProjectionRequest(
        model="mimo-7b",
        hardware="h200",
        num_gpus=64,
        k=4,
        acceptance_length=3.0,
        lag=2,
        generation_fraction=0.5,
        mean_tokens=1500.0,
    )
    assert json.loads(Path(projected.projection).read_text()) == json.loads(json.dumps(asdict(project_request(asked))))
    interface = projection.python_interface  # pyright: ignore[reportFunctionMemberAccess]
    assert all(type(default) in (str, int, float, datetime) for default in interface.default_inputs_as_kwargs.values())
