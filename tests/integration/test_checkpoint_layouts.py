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
from slipstream.learner.config import LearnerConfig, ParallelConfig
from slipstream.learner.megatron import MegatronPolicy
from slipstream.types import Dtype
from tests.forked.ranks import free_ports, join, on_ranks
from tests.integration.test_megatron_parallel import CONTEXT, DATA, PIPELINE, SCRATCH, SEQUENCE, TENSOR
from tests.unit.learner.policies import VOCAB, new_policy, save


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Which policy goes through which layouts."""

    layouts: Sequence[ParallelConfig]
    dtype: Dtype = Dtype.FLOAT32
    method: OptimizerMethod = OptimizerMethod.ADAMW
    tied: bool = False
    distributed: frozenset[int] = frozenset()  # which of the layouts deal the optimizer out over data-parallel ranks

    def learner(self, index: int | None) -> LearnerConfig:
        """The learner of a layout, by its index, or of one rank."""
        return LearnerConfig(
            max_tokens_per_microbatch=66,
            num_threads=1,
            parallel=ParallelConfig() if index is None else self.layouts[index],
            dtype=self.dtype,
            distributed_optimizer=index in self.distributed,
        )

    @property
    def optimizer(self) -> OptimizerConfig:
        return OptimizerConfig(learning_rate=1e-3, clip_grad=0.5, method=self.method)


CASES = {
    "adamw": Case(layouts=[TENSOR, DATA, TENSOR, PIPELINE, SEQUENCE, TENSOR]),
    "masters, tied": Case(layouts=[PIPELINE, TENSOR, DATA, PIPELINE], dtype=Dtype.BFLOAT16, tied=True),
    "distributed optimizer": Case(layouts=[DATA, TENSOR, DATA, DATA], distributed=frozenset({0, 3})),
    "distributed optimizer, masters, tied": Case(
        layouts=[DATA, PIPELINE, DATA], distributed=frozenset({0, 2}), dtype=Dtype.BFLOAT16, tied=True
    ),
    "context, distributed optimizer": Case(layouts=[CONTEXT, TENSOR, CONTEXT, CONTEXT], distributed=frozenset({0, 3})),
    "muon": Case(layouts=[TENSOR, DATA, PIPELINE, TENSOR], method=OptimizerMethod.MUON),
    "muon, distributed optimizer": Case(
        layouts=[DATA, TENSOR, DATA], distributed=frozenset({0, 2}), method=OptimizerMethod.MUON
    ),
    "muon, distributed optimizer, masters, tied": Case(
        layouts=[DATA, TENSOR, DATA],
        distributed=frozenset({0, 2}),
        dtype=Dtype.BFLOAT16,
        tied=True,
        method=OptimizerMethod.MUON,
    ),
}


def _sequences(seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, rng.integers(6, 32)).tolist() for _ in range(9)]


def _step(policy: MegatronPolicy, seed: int) -> float:
    return policy.lm_step(_sequences(seed), [1] * 9)


def _through(rank: int, case: Case, ports: list[int], model: Path, directory: Path) -> list[dict[str, Any]]:
    """Two updates under the first layout; then each layout takes over the checkpoint, saves it, and goes on by two."""
    links = []
    for index, port in enumerate(ports):
        join(rank, 2, port)
        policy = MegatronPolicy.load(model, learner=case.learner(index), optimizer=case.optimizer)
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
    return save(
        new_policy(dataclasses.replace(SCRATCH, tie_word_embeddings=case.tied), case.learner(None), None), directory
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_checkpoint_that_other_layouts_took_over_comes_back_to_the_last_bit(case: Case, tmp_path: Path) -> None:
    model = _model(case, tmp_path)
    first, second = on_ranks(2, _through, case, free_ports(len(case.layouts)), model, tmp_path)
    for index, (layout, link, other) in enumerate(zip(case.layouts, first, second, strict=True)):
        assert link["losses"] == other["losses"]
        same = layout == case.layouts[0] and (index in case.distributed) == (0 in case.distributed)
        tolerance = 0.0 if same else 2e-5 if case.dtype is Dtype.FLOAT32 else 2e-2
        np.testing.assert_allclose(link["losses"], first[0]["losses"], rtol=0, atol=tolerance)
        for name, weights in link["weights"].items():
            np.testing.assert_allclose(weights, first[0]["weights"][name], rtol=0, atol=tolerance, err_msg=name)

    # One rank takes over what two wrote.
    policy = MegatronPolicy.load(model, learner=case.learner(None), optimizer=case.optimizer)
    last = str(len(case.layouts) - 1)
    assert policy.load_checkpoint(tmp_path / last) == {"position": 7}
    tolerance = 2e-5 if case.dtype is Dtype.FLOAT32 else 2e-2
    np.testing.assert_allclose([_step(policy, 2), _step(policy, 3)], first[0]["losses"], rtol=0, atol=tolerance)

    # Both ranks have written about equally much, and nothing twice: the index refuses what is covered twice.
    sizes = [file.stat().st_size for file in sorted((tmp_path / last).glob("rank-*.safetensors"))]
    assert min(sizes) > 0.75 * max(sizes)
    moments = 2 if case.method is OptimizerMethod.ADAMW else 1.1
    per_parameter = 4 * (1 + moments) if case.dtype is Dtype.FLOAT32 else 2 + 4 * (1 + moments)
    assert sum(sizes) < 1.35 * per_parameter * policy.architecture.num_parameters()


def _hosts_apart(rank: int, case: Case, ports: list[int], model: Path, directory: Path) -> str:
    join(rank, 2, ports[0])
    policy = MegatronPolicy.load(model, learner=case.learner(case.layouts.index(DATA)), optimizer=case.optimizer)
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


@pytest.mark.slow
def test_ranks_that_share_no_storage_say_which_host_does_not_see_the_checkpoint(tmp_path: Path) -> None:
    case = CASES["adamw"]
    errors = on_ranks(2, _hosts_apart, case, free_ports(1), _model(case, tmp_path), tmp_path)
    for error in errors:
        assert f"rank 0 on host {socket.gethostname()}: does not see " in error
        assert f"which rank 1 on host {socket.gethostname()} has written" in error
        assert "put checkpoints on storage that every host of the learner shares" in error
