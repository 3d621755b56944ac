"""Our Muon against torch's."""

import pytest
import torch

from slipstream.learner.optimizer import BatchedMuon, orthogonal

SHAPES = [(24, 8), (8, 24), (16, 16), (24, 8), (8, 24)]


def _matrices() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


@pytest.mark.parametrize("num_iterations", [3, 5])
def test_the_updates_are_those_of_torch(num_iterations: int) -> None:
    ours, theirs = _matrices(), _matrices()
    optimizers = (
        BatchedMuon(ours, lr=0.02, weight_decay=0.1, num_iterations=num_iterations),
        torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, ns_steps=num_iterations, adjust_lr_fn="match_rms_adamw"),
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


def test_each_matrix_of_a_batch_is_made_orthogonal_by_itself() -> None:
    matrix = _matrices()[0].detach()
    matrices = torch.stack([matrix * scale for scale in (1e-3, 1.0, 1e3)])
    singular_values = torch.linalg.svdvals(orthogonal(matrices, num_iterations=5))
    assert singular_values.min() > 0.5
    assert singular_values.max() < 1.5


def test_a_matrix_without_gradient_is_left_alone() -> None:
    moving, still = _matrices()[:2]
    before = still.detach().clone()
    moving.grad = torch.ones_like(moving)
    BatchedMuon([moving, still], lr=0.1).step()
    assert torch.equal(still, before)
