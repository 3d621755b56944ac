"""Fractions of a GPU, which Ray packs onto one as long as they fit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.placement.config import Layout
from slipstream.workers.placement import engine_share, learner_share, reserved


@given(st.integers(1, 40), st.integers(1, 40))
def test_all_that_may_live_on_a_gpu_fits_its_bundle(num_engine_sets: int, num_learners: int) -> None:
    layout = Layout(num_engine_sets=num_engine_sets, num_learners=num_learners)
    together = num_engine_sets * engine_share(layout) + num_learners * learner_share(layout)
    assert together <= 1
    assert min(engine_share(layout), learner_share(layout)) > 0


def test_a_layout_without_gpus_reserves_nothing() -> None:
    assert reserved(Layout()) is None


def test_shares_are_those_of_rays_bookkeeping() -> None:
    assert engine_share(Layout(num_engine_sets=7)) == pytest.approx(0.0857)  # 0.6 / 7, rounded down
