"""Presets and schedules of the chain, as the UI lists them."""

# flytekit types a decorated workflow as the plain function that it was.
# pyright: reportArgumentType=false

from __future__ import annotations

from flytekit import CronSchedule, LaunchPlan

from slipstream.types import Workload
from workflows.speculative_rl import speculative_rl

tiny_rl_zero = LaunchPlan.get_or_create(
    workflow=speculative_rl, name="speculative_rl.tiny_rl_zero", fixed_inputs={"recipe": "tiny"}
)
tiny_rl_think = LaunchPlan.get_or_create(
    workflow=speculative_rl,
    name="speculative_rl.tiny_rl_think",
    fixed_inputs={"recipe": "tiny", "workload": Workload.RL_THINK},
)
nightly_ablation = LaunchPlan.get_or_create(
    workflow=speculative_rl,
    name="speculative_rl.nightly_ablation",
    default_inputs={"recipe": "tiny"},
    schedule=CronSchedule(schedule="0 3 * * *"),
)
