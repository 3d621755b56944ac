"""Requests become scenarios, and what a scenario assumes is varied."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slipstream.config import ConfigError
from slipstream.simulator.cost.settings import load_setting
from slipstream.simulator.project.scenarios import PUBLISHED_MODEL, ProjectionRequest, assumed_layouts


def asked(model: str, hardware: str) -> ProjectionRequest:
    return ProjectionRequest(model=model, hardware=hardware, num_gpus=64, k=3, acceptance_length=2.5)


@pytest.mark.parametrize(
    ("model", "hardware", "num_gpus"),
    [
        ("qwen3-235b-a22b", "h100", 8),  # 235 GB in FP8, and as much again: 470 GB over GPUs of 80
        ("qwen3-235b-a22b", "h200", 4),  # over GPUs of 141
        ("qwen3-235b-a22b", "gb200", 8),  # as the layout has it, though 4 would do
        ("qwen3-30b-a3b", "h100", 1),  # 30.5 GB in FP8
        ("qwen3-8b", "cpu-2core", 2),  # 16.4 GB in bfloat16 where the memory is 24
        ("qwen3-8b", "gb200", 2),  # as the layout has it
        ("qwen3-8b", "h100", 1),
    ],
)
def test_an_engine_gets_the_gpus_that_hold_the_model(model: str, hardware: str, num_gpus: int) -> None:
    assert asked(model, hardware).scenario().setting.gpus_per_engine == num_gpus


def test_more_engines_than_gpus_are_refused() -> None:
    request = ProjectionRequest(model="qwen3-235b-a22b", num_gpus=4, k=3, acceptance_length=3.0)
    with pytest.raises(ConfigError, match=r"num_gpus must hold an engine of 8 GPUs, got 4"):
        request.scenario()


@pytest.mark.parametrize(("num_gpus", "fraction"), [(8, 0.75), (64, 0.1), (64, 0.999)])
def test_a_split_without_an_engine_or_a_learner_is_refused(num_gpus: int, fraction: float) -> None:
    request = ProjectionRequest(
        model="qwen3-235b-a22b", num_gpus=num_gpus, k=3, acceptance_length=3.0, lag=1, generation_fraction=fraction
    )
    rule = rf"generation_fraction must leave, of {num_gpus} GPUs, an engine's 8 for generation and one for training"
    with pytest.raises(ConfigError, match=rule):
        request.scenario()
    assert replace(request, lag=0).scenario().generation_gpus == num_gpus  # both on all of them


def test_a_request_takes_everything_that_it_names() -> None:
    request = ProjectionRequest(
        model="mimo-7b",
        hardware="h200",
        num_gpus=40,
        k=4,
        acceptance_length=2.25,
        lag=3,
        generation_fraction=0.6,
        gpus_per_engine=4,
        num_rollouts=96,
        mean_tokens=1234.0,
    )
    found = request.scenario()
    setting = found.setting
    assert (setting.model, setting.hardware, setting.num_gpus) == ("mimo-7b", "h200", 40)
    assert (setting.gpus_per_engine, setting.num_rollouts) == (4, 96)
    assert (found.mean_tokens, found.k, found.acceptance_length, found.lag) == (1234.0, 4, 2.25, 3)
    assert (found.generation_gpus, found.training_gpus) == (24, 16)
    assert found.shape.num_engines == 6


def test_what_a_request_leaves_out_is_the_layouts() -> None:
    dense, sparse = asked("mimo-7b", "gb200").scenario(), asked("qwen3-30b-a3b", "gb200").scenario()
    assert (dense.setting.num_rollouts, dense.mean_tokens) == (2048, 5000)
    assert (sparse.setting.num_rollouts, sparse.mean_tokens) == (4096, 8000)
    assert (dense.lag, dense.generation_gpus, dense.training_gpus) == (0, 64, 64)  # colocated


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("num_gpus", 0, "num_gpus must be >= 1, got 0"),
        ("gpus_per_engine", -1, "gpus_per_engine must be >= 0, got -1"),
        ("num_rollouts", -1, "num_rollouts must be >= 0, got -1"),
        ("mean_tokens", -1.0, "mean_tokens must be >= 0, got -1.0"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(field: str, value: float, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        replace(asked("qwen3-8b", "gb200"), **{field: value})


def test_the_papers_own_layout_takes_gpus_and_lag() -> None:
    request = ProjectionRequest(model=PUBLISHED_MODEL, num_gpus=2048, k=5, acceptance_length=4.0, lag=2)
    found = request.scenario()
    assert found.setting == replace(load_setting("paper-235b"), num_gpus=2048)
    assert (found.setting.model, found.setting.num_gpus, found.lag) == ("qwen3-235b-a22b", 2048, 2)
    assert (found.k, found.acceptance_length, found.mean_tokens) == (5, 4.0, 8000)


def test_gpus_an_engine_and_the_mean_length_are_varied_up_and_down() -> None:
    scenario = ProjectionRequest(model=PUBLISHED_MODEL, num_gpus=512, k=3, acceptance_length=3.0).scenario()
    layouts = assumed_layouts(scenario)
    found = {(each.setting.gpus_per_engine, round(each.mean_tokens)) for each in layouts}
    assert found == {(g, m) for g in (4, 8, 16) for m in (5333, 8000, 12000)} - {(8, 8000)}
    assert all((each.k, each.acceptance_length, each.setting.num_gpus) == (3, 3.0, 512) for each in layouts)
    # Neither more GPUs an engine than there are, nor longer responses than are allowed.
    small = replace(scenario, setting=replace(scenario.setting, num_gpus=8), mean_tokens=30000.0)
    assert {(e.setting.gpus_per_engine, round(e.mean_tokens)) for e in assumed_layouts(small)} == {
        (4, 20000),
        (4, 30000),
        (8, 20000),
    }
