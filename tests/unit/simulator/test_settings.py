"""Layouts and the beliefs about the cost model."""

from dataclasses import replace

import pytest

from slipstream.catalog import load_hardware, section, section_names
from slipstream.config import ConfigError, from_mapping
from slipstream.simulator.settings import Setting, load_setting


@pytest.mark.parametrize("name", section_names("hardware"))
def test_every_constant_of_the_hardware_has_a_source(name: str) -> None:
    hardware = load_hardware(name)
    with pytest.raises(ConfigError, match="must name a source of every constant"):
        replace(hardware, sources={})
    assert all(source for source in hardware.sources.values())


@pytest.mark.parametrize("name", section_names("settings"))
def test_every_figure_of_a_layout_has_a_source(name: str) -> None:
    with pytest.raises(ConfigError, match="must name a source of every figure"):
        replace(load_setting(name), sources={})


def test_a_section_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match=r"hardware must be a known section, got 'tpu'; known: gb200, h200"):
        load_hardware("tpu")


def test_a_layout_has_the_memory_the_engines_and_the_learner_of_its_figures() -> None:
    assert load_setting("paper-8b").learner_tokens(5000.0) == 2048 * (200 + 8192)
    assert load_setting("paper-235b").learner_tokens(8000.0) == 4096 * (200 + 8000)
    setting = replace(load_setting("paper-8b"), num_rollouts=3, gpus_per_engine=1)
    assert setting.shape(2).num_engines == 2
    assert setting.shape(2).per_engine == 2
    assert setting.shape().num_engines == 3  # of 32
    # Qwen3-8B in bf16 on two GB200: 0.6 x 372 GB less the weights, 2 x 36 x 8 x 128 elements of 2 bytes a token.
    setting = load_setting("paper-8b")
    weights = 2 * setting.model_shape.total_parameters
    assert setting.cache_tokens == pytest.approx((0.6 * 372e9 - weights) / 147456)
    assert setting.shape().cache_tokens == setting.cache_tokens
    assert replace(setting, memory_share=weights / 372e9).cache_tokens == 1.0


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("group_size", 0, "be >= 1"),
        ("memory_share", 0.0, "be > 0"),
        ("memory_share", 1.1, "be <= 1"),
        ("gpus_per_engine", 1, "hold 235 GB of weights at 186 GB a GPU, got 1"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(field: str, value: float, rule: str) -> None:
    with pytest.raises(ConfigError, match=f"setting.{field} must {rule}"):
        from_mapping(Setting, section("settings", "paper-235b") | {field: value}, "setting")
