"""The report's figures and tables of a projection keep measured and projected values apart."""

from __future__ import annotations

from collections.abc import Callable

from slipstream.recipe import load_recipe
from slipstream.records.stages import TuningRecord
from slipstream.records.steps import ArmRecord
from slipstream.report import simulator_section as section
from slipstream.simulator.fit.observed import calibrate_run
from slipstream.simulator.fit.paper import calibrate_paper
from slipstream.simulator.project.figure_data import LagLine, SpeedupMap, running_batches
from slipstream.simulator.project.run_projection import project_speedup, run_setting
from slipstream.stages.support import recipe_layout
from slipstream.types import StageTimes

DEMO_LAYOUT = recipe_layout(
    load_recipe("tiny", overrides={"engine": {"dtype": "bfloat16"}, "learner": {"dtype": "bfloat16"}})
)


def test_every_figure_is_an_svg_that_says_what_is_projected(
    demo_arms: Callable[[float], tuple[ArmRecord, ...]], demo_tuning: TuningRecord
) -> None:
    assert DEMO_LAYOUT is not None
    running = running_batches(calibrate_run(demo_arms(1.0), demo_tuning, run_setting(DEMO_LAYOUT)))
    assert sum(running[1].span_s) < sum(running[0].span_s)
    base = StageTimes.in_sequence(data_s=0.2, prepare_s=2.0, generation_s=100.0, logprob_s=18.0, train_s=31.0)
    surface = SpeedupMap(ks=(1, 3), acceptance_lengths=(1.0, 3.0), rollout_speedups=((0.9, None), (0.8, 1.6)))
    lines = [
        LagLine(lag=lag, num_gpus=(512, 1024), step_speedups=speedups)
        for lag, speedups in ((0, (1.7, 1.6)), (2, (1.4, 1.2)))
    ]
    drawn = {
        "Projected rollout speedup": section.speedup_map(surface),
        "Projected step speedup": section.speedup_over_gpus(lines),
        "Projected step, seconds": section.stage_waterfall(base, base.with_generation(56.0)),
        "measured, s": section.measured_against_simulated([calibrate_paper().record("paper")]),
        "projected seconds": section.running_batch(running),
    }
    for text, svg in drawn.items():
        assert svg.startswith("<svg")
        assert text in svg


def test_the_page_keeps_measured_and_projected_apart(
    demo_arms: Callable[[float], tuple[ArmRecord, ...]], demo_tuning: TuningRecord
) -> None:
    record = project_speedup(demo_arms(1.0), demo_tuning, layout=DEMO_LAYOUT, execution="demo")
    assert record.run_check is not None
    check = section.check_table(record.run_check)
    assert [group.heading for group in check.groups] == ["measured", "projected"]
    assert len(section.own_table(record).rows) == len(record.from_run)
    assert section.published_table(record).quoted == (False,) * 4 + (True,) * 2
