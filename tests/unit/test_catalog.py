"""Models and accelerators by name, against the published counts."""

import pytest

from slipstream.catalog import SimulatorConfig, load_model, section_names
from tests.unit.conftest import Refusal

MODELS = {name: load_model(name) for name in section_names("models")}


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [("qwen3-8b", 8.19, 7.57), ("qwen3-30b-a3b", 30.5, 3.0), ("qwen3-235b-a22b", 235.1, 21.5), ("mimo-7b", 7.6, 7.0)],
)
def test_parameter_counts_are_the_published_ones(name: str, billions: float, active: float) -> None:
    assert MODELS[name].total_parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert MODELS[name].parameters_per_token / 1e9 == pytest.approx(active, rel=0.02)


def test_a_model_and_a_machine_must_be_known(refusal: Refusal) -> None:
    models, machines = ", ".join(section_names("models")), ", ".join(section_names("hardware"))
    message = refusal(SimulatorConfig, model="tinny", hardware="cpu-2core")
    assert message == f"simulator.model must be known, got 'tinny'; known: {models}"
    message = refusal(SimulatorConfig, model="tiny", hardware="abacus")
    assert message == f"simulator.hardware must be known, got 'abacus'; known: {machines}"
    assert SimulatorConfig(model="tiny", hardware="cpu-2core").hardware == "cpu-2core"
