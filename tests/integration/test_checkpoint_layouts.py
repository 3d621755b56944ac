"""A checkpoint of two gloo ranks goes through other layouts and comes back to the last bit."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.grpo.config import OptimizerConfig, OptimizerMethod
from slipstream.learner import parallel
from slipstream.learner.checkpoint import CheckpointWriteError
from slipstream.learner.config import LearnerConfig
from slipstream.learner.megatron import MegatronPolicy
from slipstream.types import Dtype
from tests.forked.ranks import free_ports, join, learner_of, on_ranks
from tests.integration.test_megatron_parallel import SCRATCH
from tests.unit.learner.policies import new_policy, random_sequences, save

pytestmark = pytest.mark.slow


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Which policy goes through which layouts, by the names of `learner_of`."""

    layouts: Sequence[str]
    dtype: Dtype = Dtype.FLOAT32
    method: OptimizerMethod = OptimizerMethod.ADAMW
    tied: bool = False

    def learner(self, layout: str = "") -> LearnerConfig:
        """The learner of a layout, or of one rank."""
        alone = LearnerConfig(max_tokens_per_microbatch=66, num_threads=1, dtype=self.dtype)
        return learner_of(layout, alone) if layout else alone

    @property
    def optimizer(self) -> OptimizerConfig:
        return OptimizerConfig(learning_rate=1e-3, clip_grad=0.5, method=self.method)


SPLIT = "data, optimizer split"  # the optimizer is dealt out over data-parallel ranks
CONTEXT = "context, optimizer split"
MUON = OptimizerMethod.MUON
CASES = {
    "adamw": Case(layouts=["tensor", "data", "tensor", "pipeline", "sequence", "tensor"]),
    "masters, tied": Case(layouts=["pipeline", "tensor", "data", "pipeline"], dtype=Dtype.BFLOAT16, tied=True),
    "distributed optimizer": Case(layouts=[SPLIT, "tensor", "data", SPLIT]),
    "distributed optimizer, masters, tied": Case(layouts=[SPLIT, "pipeline", SPLIT], dtype=Dtype.BFLOAT16, tied=True),
    "context, distributed optimizer": Case(layouts=[CONTEXT, "tensor", "context", CONTEXT]),
    "muon": Case(layouts=["tensor", "data", "pipeline", "tensor"], method=MUON),
    "muon, distributed optimizer": Case(layouts=[SPLIT, "tensor", SPLIT], method=MUON),
    "muon, distributed optimizer, masters, tied": Case(
        layouts=[SPLIT, "tensor", SPLIT], dtype=Dtype.BFLOAT16, tied=True, method=MUON
    ),
}


def _step(policy: MegatronPolicy, seed: int) -> float:
    return policy.lm_step(random_sequences(seed=seed), [1] * 9)


def _through(rank: int, case: Case, ports: list[int], model: Path, directory: Path) -> list[dict[str, Any]]:
    """Two updates under the first layout; then each layout takes over the checkpoint, saves it, and goes on by two."""
    links = []
    for index, (port, layout) in enumerate(zip(ports, case.layouts, strict=True)):
        join(rank, 2, port)
        policy = MegatronPolicy.load(model, learner=case.learner(layout), optimizer=case.optimizer)
        if index == 0:
            for seed in (0, 1):
                _step(policy, seed)
        else:
            assert policy.load_checkpoint(directory / f"{index - 1}") == {"position": 7}
        policy.save_checkpoint(directory / f"{index}", {"position": 7})
        losses = [_step(policy, seed) for seed in (2, 3)]
        policy.finish_checkpoint()
        links.append({"losses": losses, "weights": {name: t.float().numpy() for name, t in policy.weights()}})
        parallel.barrier()
        parallel.teardown()
    return links


def _model(case: Case, directory: Path) -> Path:
    scratch = dataclasses.replace(SCRATCH, tie_word_embeddings=case.tied)
    return save(new_policy(scratch, case.learner(), None), directory)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_checkpoint_that_other_layouts_took_over_comes_back_to_the_last_bit(case: Case, tmp_path: Path) -> None:
    model = _model(case, tmp_path)
    first, second = on_ranks(2, _through, case, free_ports(len(case.layouts)), model, tmp_path)
    rough = 2e-5 if case.dtype is Dtype.FLOAT32 else 2e-2
    for layout, link, other in zip(case.layouts, first, second, strict=True):
        assert link["losses"] == other["losses"]
        tolerance = 0.0 if layout == case.layouts[0] else rough
        np.testing.assert_allclose(link["losses"], first[0]["losses"], rtol=0, atol=tolerance)
        for name, weights in link["weights"].items():
            np.testing.assert_allclose(weights, first[0]["weights"][name], rtol=0, atol=tolerance, err_msg=name)

    # One rank takes over what two wrote.
    policy = MegatronPolicy.load(model, learner=case.learner(), optimizer=case.optimizer)
    last = str(len(case.layouts) - 1)
    assert policy.load_checkpoint(tmp_path / last) == {"position": 7}
    np.testing.assert_allclose([_step(policy, 2), _step(policy, 3)], first[0]["losses"], rtol=0, atol=rough)

    # Both ranks have written about equally much, and nothing twice: the index refuses what is covered twice.
    sizes = [file.stat().st_size for file in sorted((tmp_path / last).glob("rank-*.safetensors"))]
    assert min(sizes) > 0.75 * max(sizes)
    moments = 2 if case.method is OptimizerMethod.ADAMW else 1.1
    per_parameter = 4 * (1 + moments) if case.dtype is Dtype.FLOAT32 else 2 + 4 * (1 + moments)
    assert sum(sizes) < 1.35 * per_parameter * policy.architecture.num_parameters()


def _hosts_apart(rank: int, case: Case, ports: list[int], model: Path, directory: Path) -> str:
    join(rank, 2, ports[0])
    policy = MegatronPolicy.load(model, learner=case.learner("data"), optimizer=case.optimizer)
    policy.save_checkpoint(directory / f"host-{rank}" / "checkpoint", {})
    _step(policy, 0)
    try:
        policy.finish_checkpoint()
    except CheckpointWriteError as error:
        return str(error)
    finally:
        parallel.barrier()
        parallel.teardown()
    return ""


def test_ranks_that_share_no_storage_say_which_host_does_not_see_the_checkpoint(tmp_path: Path) -> None:
    case = CASES["adamw"]
    errors = on_ranks(2, _hosts_apart, case, free_ports(1), _model(case, tmp_path), tmp_path)
    for error in errors:
        assert f"rank 0 on host {socket.gethostname()}: does not see " in error
        assert f"which rank 1 on host {socket.gethostname()} has written" in error
        assert "put checkpoints on storage that every host of the learner shares" in error
