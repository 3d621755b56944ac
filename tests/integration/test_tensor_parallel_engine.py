"""An engine of two ranks on CPUs (gloo, a process a rank, the core in ours): rollouts, refit and its gate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from slipstream.drafts.methods import speculative_config
from slipstream.learner.config import LearnerConfig
from slipstream.refit.config import RefitError
from slipstream.refit.gate import RefitGate
from slipstream.types import Dtype
from slipstream.workers.calls import LostWorkerError
from slipstream.workers.engines import start_engine
from slipstream.workers.learners import start_learner
from tests import small
from tests.integration.test_weight_channels import require_gloo_as_shared_memory
from tests.small import DRAFT, PROMPTS, FileChannel, OneRank, gate_of, require_logprobs_of

pytestmark = pytest.mark.slow

ENGINE = replace(small.ENGINE, tensor_parallel_size=2)
SAMPLING = replace(small.SAMPLING, max_response_tokens=16)


@pytest.fixture(scope="module")
def engine(models: dict[str, Path], ray_session: None) -> Iterator[Any]:
    draft = speculative_config(DRAFT, models["old_draft"], 3)
    with start_engine(models["old"], config=ENGINE, speculative_config=draft) as engine:
        yield engine


def gate(engine: Any, models: dict[str, Path], sends: str) -> RefitGate:
    return gate_of(engine, OneRank(models["new"]), FileChannel(engine, models[sends]), models["old_draft"])


def test_rollouts_are_the_policys_before_and_after_a_refit_through_the_gate(
    engine: Any, models: dict[str, Path]
) -> None:
    before = engine.generate(PROMPTS, sampling=SAMPLING, group_size=4, seed=1)
    again = engine.generate(PROMPTS[::-1], sampling=SAMPLING, group_size=4, seed=1)
    assert [group.rollouts for group in again.groups[::-1]] == [group.rollouts for group in before.groups]
    check = gate(engine, models, "new").refit(1)
    files = [models[name] / "model.safetensors" for name in ("new", "old_draft")]
    assert check.num_tensors == sum(len(load_file(file)) for file in files)
    after = engine.generate(PROMPTS, sampling=SAMPLING, group_size=4, seed=1)
    for name, result in (("old", before), ("new", after)):
        assert result.acceptance is not None and result.acceptance.num_drafts > 0
        require_logprobs_of(models[name], result, temperature=SAMPLING.temperature)


def test_the_gate_names_a_shard_of_another_policy(engine: Any, models: dict[str, Path]) -> None:
    with pytest.raises(RefitError, match=r"must hold policy version 2 to the last bit: \d+ of \d+ tensors differ"):
        gate(engine, models, "old").refit(2)


def test_both_ranks_cut_their_shards_from_what_comes_over_gloo(engine: Any, models: dict[str, Path]) -> None:
    """A learner of one rank sends whole tensors of policy and draft, in buckets that end inside of them."""
    with start_learner(LearnerConfig(dtype=Dtype.FLOAT32, num_threads=1)) as learner:
        learner.load(models["new"], None)
        learner.start_draft(models["new"], DRAFT)
        require_gloo_as_shared_memory(learner, engine, models)


def test_an_engine_that_loses_a_rank_is_lost_as_a_whole_so_that_it_is_replaced(engine: Any) -> None:
    """The last test of the module: the engine is gone. An error of the engine itself would end the run."""
    (worker,) = engine.workers
    ranks = [each for each in psutil.Process(worker.pid).children(recursive=True) if "Worker" in each.name()]
    ranks[-1].kill()
    with pytest.raises(LostWorkerError, match=r"engine 0 on .* died during generate"):
        engine.generate(PROMPTS, sampling=SAMPLING, group_size=4, seed=1)
    assert engine.lost_workers() == [worker]
    assert not psutil.wait_procs(ranks, timeout=30)[1]  # the other rank ends too, and frees what it held
