"""What a recipe may tell the simulator of a run."""

from __future__ import annotations

from collections.abc import Callable

from slipstream.simulator.config import SimulatorConfig
from slipstream.simulator.cost.data_files import section_names


def test_a_model_and_a_machine_must_be_known(refusal: Callable[..., str]) -> None:
    models, machines = ", ".join(section_names("models")), ", ".join(section_names("hardware"))
    message = refusal(SimulatorConfig, model="tinny", hardware="cpu-2core")
    assert message == f"simulator.model must be known, got 'tinny'; known: {models}"
    message = refusal(SimulatorConfig, model="tiny", hardware="abacus")
    assert message == f"simulator.hardware must be known, got 'abacus'; known: {machines}"
    assert SimulatorConfig(model="tiny", hardware="cpu-2core").hardware == "cpu-2core"
