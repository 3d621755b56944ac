"""What a user asks for, from a calibration on the paper's measurements."""

from __future__ import annotations

import json
from pathlib import Path

from slipstream.simulator.project.published import project_request
from slipstream.simulator.project.scenarios import ProjectionRequest


def test_the_workflow_projects_what_its_flat_inputs_say() -> None:
    from workflows.projection import projection

    path = projection(num_gpus=512, max_off_policy_steps=0, num_speculative_tokens=3, mean_acceptance_length=3.0)
    found = json.loads(Path(str(path)).read_text())
    asked = ProjectionRequest(model="qwen3-235b-a22b", num_gpus=512, k=3, acceptance_length=3.0)
    assert found["calibrated"]["step_speedup"]["median"] == project_request(asked).calibrated.step_speedup.median
    interface = projection.python_interface  # pyright: ignore[reportFunctionMemberAccess]
    assert all(type(default) in (str, int, float) for default in interface.default_inputs_as_kwargs.values())
