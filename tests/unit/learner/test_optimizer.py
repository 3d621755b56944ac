"""Our Muon against torch's, and memory that is given back between updates: nobody notices, to the last bit."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.grpo.config import OptimizerMethod
from slipstream.learner import optimizer as optimizers
from slipstream.learner.checkpoint.policy import HeldParameter
from slipstream.learner.config import ScratchConfig
from slipstream.learner.megatron import MegatronPolicy
from slipstream.learner.optimizer import BatchedMuon, TrainingMemory, orthogonal
from slipstream.types import Dtype
from tests.unit.learner.policies import OPTIMIZER, SCRATCH, VOCAB, new_policy, random_sequences, same_weights, shaped

SHAPES = [(24, 8), (8, 24), (16, 16), (24, 8), (8, 24)]


def _matrices() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


@pytest.mark.parametrize("num_iterations", [3, 5])
def test_the_updates_are_those_of_torch(num_iterations: int) -> None:
    ours, theirs = _matrices(), _matrices()
    optimizers = (
        BatchedMuon(ours, lr=0.02, weight_decay=0.1, num_iterations=num_iterations),
        torch.optim.Muon(
            theirs, lr=0.02, weight_decay=0.1, momentum=0.9, ns_steps=num_iterations, adjust_lr_fn="match_rms_adamw"
        ),
    )
    start = [matrix.detach().clone() for matrix in ours]
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for one, other, begin in zip(ours, theirs, start, strict=True):
        moved, expected = (one - begin).detach(), (other - begin).detach()
        assert float((moved - expected).norm() / expected.norm()) < 0.02  # both iterate in bfloat16


def _orthogonal(matrix: Tensor, num_iterations: int = 3) -> Tensor:
    return orthogonal(matrix[None], num_iterations=num_iterations, dtype=torch.float32)[0]


def test_each_matrix_of_a_batch_is_made_orthogonal_by_itself() -> None:
    matrix = _matrices()[0].detach()
    matrices = torch.stack([matrix * scale for scale in (1e-3, 1.0, 1e3)])
    singular_values = torch.linalg.svdvals(orthogonal(matrices, num_iterations=5))
    assert singular_values.min() > 0.5 and singular_values.max() < 1.5


@pytest.mark.parametrize("is_tall", [False, True])
def test_permuted_rows_are_orthogonalized_to_permuted_rows(is_tall: bool) -> None:
    """Tensor-parallel ranks hold queries, keys and values, or gate and up, in another order than one rank does."""
    matrix = torch.randn((96, 32) if is_tall else (32, 96), generator=torch.Generator().manual_seed(0))
    order = torch.randperm(len(matrix), generator=torch.Generator().manual_seed(1))
    found, moved = (_orthogonal(each) for each in (matrix, matrix[order]))
    torch.testing.assert_close(moved, found[order], rtol=0, atol=1e-6)


def _block_difference(momentum: Tensor, dim: int, num_iterations: int) -> float:
    """Norm of the difference between the updates from two blocks and from the whole, relative to the latter's."""

    def update(matrix: Tensor) -> Tensor:
        return _orthogonal(matrix, num_iterations) * 0.2 * max(matrix.shape) ** 0.5

    whole = update(momentum)
    return float((torch.cat([update(each) for each in momentum.chunk(2, dim)], dim) - whole).norm() / whole.norm())


def test_orthogonalizing_each_ranks_part_alone_is_another_update() -> None:
    """As `muon_tp_mode: blockwise`, the default of Megatron-Core 0.16.1, does."""
    generator = torch.Generator().manual_seed(0)
    square, tall = torch.randn(1024, 1024, generator=generator), torch.randn(3072, 1024, generator=generator)
    assert _block_difference(square, 0, 5) == pytest.approx(0.50, abs=0.02)
    assert _block_difference(square, 0, 3) == pytest.approx(0.29, abs=0.02)
    assert [_block_difference(tall, dim, 5) for dim in (0, 1)] == pytest.approx([0.34, 0.30], abs=0.02)

    policy = new_policy(optimizer=replace(OPTIMIZER, method=OptimizerMethod.MUON))
    for seed in range(3):
        policy.lm_step(random_sequences(seed=seed), [1] * 9)
    found = {}
    for held in _held(policy):
        if _is_muons(held) and "layers.1." in held.mapping.megatron:
            assert held.stepped is not None
            momentum = held.stepped.optimizer.state[held.stepped.main]["momentum_buffer"]
            name = held.mapping.megatron.split(".")[-2]
            if name == "linear_fc1":  # a rank has its half of gate above its half of up
                momentum = momentum.unflatten(0, (2, 2, -1)).transpose(0, 1).flatten(0, 2)
            found[name] = _block_difference(momentum, 1 if name in ("linear_proj", "linear_fc2") else 0, 3)
    expected = {"linear_qkv": 0.43, "linear_proj": 0.50, "linear_fc1": 0.45, "linear_fc2": 0.56}
    assert found == pytest.approx(expected, abs=0.03)


def test_matrices_that_exceed_a_batch_are_orthogonalized_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    def stepped() -> list[torch.nn.Parameter]:
        matrices = _matrices()
        for matrix in matrices:
            matrix.grad = matrix.detach().clone()
        BatchedMuon(matrices, lr=0.1, dtype=torch.float32).step()
        return matrices

    at_once, sizes = stepped(), []
    monkeypatch.setattr(optimizers, "MUON_BATCH_ELEMENTS", 200)
    monkeypatch.setattr(
        optimizers, "orthogonal", lambda given, **how: sizes.append(len(given)) or orthogonal(given, **how)
    )
    assert all(torch.equal(one, other) for one, other in zip(stepped(), at_once, strict=True))
    assert sizes == [1] * len(SHAPES)


def test_a_matrix_without_gradient_is_left_alone() -> None:
    moving, still = _matrices()[:2]
    before = still.detach().clone()
    moving.grad = torch.ones_like(moving)
    BatchedMuon([moving, still], lr=0.1).step()
    assert torch.equal(still, before)


SEQUENCES = [np.random.default_rng(i).integers(0, VOCAB, 12 + i).tolist() for i in range(6)]
STARTS = [3] * len(SEQUENCES)
Kind = tuple[Dtype, OptimizerMethod, bool]
KINDS = list(itertools.product((Dtype.FLOAT32, Dtype.BFLOAT16), OptimizerMethod, (False, True)))
EACH_KIND = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind)))


def _policy(
    dtype: Dtype = Dtype.FLOAT32,
    method: OptimizerMethod = OptimizerMethod.ADAMW,
    is_distributed: bool = False,
    scratch: ScratchConfig = SCRATCH,
) -> MegatronPolicy:
    optimizer = replace(OPTIMIZER, learning_rate=1e-2, method=method)
    return new_policy(scratch, optimizer=optimizer, dtype=dtype, distributed_optimizer=is_distributed)


def _held(policy: MegatronPolicy) -> list[HeldParameter]:
    return policy._checkpoints._held


def _state(policy: MegatronPolicy) -> list[Tensor]:
    """What the optimizer keeps, and what it steps."""
    stepped = [held.stepped for held in _held(policy) if held.stepped is not None]
    moments = [each.optimizer.state[each.main][name] for each in stepped for name in each.moments]
    return [each.clone() for each in [*(each.main for each in stepped), *moments]]


def _same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@EACH_KIND
def test_a_learner_that_rests_between_its_updates_learns_the_same_to_the_last_bit(kind: Kind) -> None:
    offloaded, other = _policy(*kind), _policy(*kind)
    assert offloaded.offload() >= 4 * offloaded.architecture.num_parameters()  # there are no moments yet
    for _ in range(3):
        assert offloaded.lm_step(SEQUENCES, STARTS) == other.lm_step(SEQUENCES, STARTS)
        offloaded.offload()
    assert same_weights(offloaded, other)
    for policy in (offloaded, other):
        policy.lm_step(SEQUENCES, STARTS)
    assert _same(_state(offloaded), _state(other))


@EACH_KIND
def test_an_offloaded_learner_has_its_weights_alone(kind: Kind) -> None:
    policy = _policy(*kind)
    assert new_policy(optimizer=None).offload() == 0  # a policy that only evaluates has nothing to give back
    policy.lm_step(SEQUENCES, STARTS)
    before, logprobs = [each.clone() for _, each in policy.weights()], policy.logprobs(SEQUENCES, STARTS, 1.0)
    num = policy.architecture.num_parameters()
    matrices = sum(held.parameter.numel() for held in _held(policy) if _is_muons(held))

    num_bytes = policy.offload()

    # Gradients and two moments in float32, of what Muon steps one; and masters of weights in bfloat16. Megatron pads
    # its buffers, and shards, a little.
    expected = 4 * (3 * num - matrices) + (4 * num if kind[0] is Dtype.BFLOAT16 else 0)
    assert expected <= num_bytes < 1.02 * expected
    for held in _held(policy):
        assert held.parameter.untyped_storage().nbytes() > 0
        assert held.parameter.main_grad.untyped_storage().nbytes() == 0  # type: ignore[attr-defined]
        assert held.parameter.grad is None
        assert held.stepped is not None
        state = held.stepped.optimizer.state[held.stepped.main]
        assert {state[name].untyped_storage().nbytes() for name in held.stepped.moments} == {0}
    assert _same([weight for _, weight in policy.weights()], before)
    assert all(np.array_equal(a, b) for a, b in zip(policy.logprobs(SEQUENCES, STARTS, 1.0), logprobs, strict=True))
    assert policy.offload() == 0


def _is_muons(held: HeldParameter) -> bool:
    return held.stepped is not None and held.stepped.moments == ("momentum_buffer",)


@EACH_KIND
def test_a_checkpoint_of_an_offloaded_learner_is_that_of_one_awake(kind: Kind, tmp_path: Path) -> None:
    policy = _policy(*kind)
    policy.lm_step(SEQUENCES, STARTS)
    policy.offload()
    for name in ("offloaded", "awake"):  # the first one wakes it
        policy.save_checkpoint(tmp_path / name, {})
        policy.finish_checkpoint()
    files = [sorted((tmp_path / name).glob("*.safetensors")) for name in ("offloaded", "awake")]
    assert [file.read_bytes() for file in files[0]] == [file.read_bytes() for file in files[1]] != []

    resumed = _policy(*kind)
    resumed.offload()
    resumed.load_checkpoint(tmp_path / "offloaded")
    resumed.offload()
    assert resumed.lm_step(SEQUENCES, STARTS) == policy.lm_step(SEQUENCES, STARTS)
    assert _same(_state(resumed), _state(policy))


def test_an_mtp_layer_rests_with_its_policy() -> None:
    scratch = shaped(num_mtp_layers=1, head_dim=8)
    offloaded, other = _policy(scratch=scratch), _policy(scratch=scratch)
    for _ in range(3):
        offloaded.offload()
        assert offloaded.lm_step(SEQUENCES, STARTS) == other.lm_step(SEQUENCES, STARTS)
        assert offloaded.mtp_loss == other.mtp_loss
    assert offloaded._mtp_trainer is not None
    offloaded.offload()
    assert offloaded._mtp_trainer.memory._offloaded
    assert same_weights(offloaded, other)


def test_what_shares_a_storage_with_the_weights_stays() -> None:
    layer = torch.nn.Linear(4, 3, bias=False)
    shard = torch.nn.Parameter(layer.weight.detach().view(-1)[:6])  # as a float32 distributed optimizer steps it
    master = torch.nn.Parameter(torch.ones(5))
    optimizer = torch.optim.SGD([shard, master], lr=1.0)
    master.grad = torch.ones(5)
    memory = TrainingMemory(layer, [optimizer], device=torch.device("cpu"))
    view = master.detach()[2:]

    assert memory.offload() == 20
    assert (master.untyped_storage().nbytes(), master.grad) == (0, None)
    assert shard.untyped_storage().nbytes() == 48
    memory.onload()
    assert view.tolist() == [1.0, 1.0, 1.0]  # a reference from before is as good as new


def test_what_the_optimizer_keeps_on_the_host_stays_there() -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    memory = TrainingMemory(torch.nn.Module(), [optimizer], device=torch.device("meta"))
    assert memory.offload() == 0
    assert optimizer.state[weight]["exp_avg"].untyped_storage().nbytes() == 12
