"""Numbers choose columns by their share, and block verification samples the policy while it accepts more drafts."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from torch import Tensor

from slipstream.engine.verification import columns_at, verify_blocks

NUM, VOCABULARY, LENGTH = 200_000, 3, 3


@pytest.mark.parametrize("number", [0.0, 0.25, 0.5, 1 - 2**-53])
def test_no_number_leads_to_a_column_without_weight(number: float) -> None:
    weights = torch.zeros(1, 700)
    weights[0, [10, 300, 690]] = torch.tensor([1.0, 2.0, 1.0])
    number_P = torch.tensor([number], dtype=torch.float64)
    assert int(columns_at(weights, number_P)) == {0.0: 10, 0.25: 300, 0.5: 300}.get(number, 690)
    assert columns_at(torch.zeros(1, 300), number_P).tolist() == [299]  # where no column has any, its own


@pytest.mark.parametrize("vocabulary", [3, 300])
def test_a_step_without_drafts_has_no_rows(vocabulary: int) -> None:
    none = torch.zeros(0, dtype=torch.float64)
    assert columns_at(torch.zeros(0, vocabulary), none).tolist() == []
    no_rows, counts = torch.zeros(0, vocabulary), torch.tensor([0, 0])
    accepted, after = verify_blocks(no_rows, no_rows, torch.zeros(0), counts, none, torch.zeros(2, dtype=torch.float64))
    assert (accepted.tolist(), after.tolist()) == ([0, 0], [-1, -1])


def tables(seed: int, sharpness: float) -> list[Tensor]:
    """Probabilities after each prefix of up to `LENGTH` tokens, [3 ** length, 3] by the prefix as a number."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(VOCABULARY**length, VOCABULARY) for length in range(LENGTH + 1)]
    return [torch.softmax(sharpness * torch.randn(shape, generator=generator), -1) for shape in shapes]


def sampled(policy: list[Tensor], draft: list[Tensor], *, in_blocks: bool) -> tuple[Tensor, Tensor]:
    """[NUM, LENGTH + 1] tokens, completed by the policy, and [NUM] accepted drafts, of one cycle of each request."""
    generator = torch.Generator().manual_seed(5)
    counts = 1 + torch.arange(NUM) % LENGTH
    prefixes, tokens = [torch.zeros(NUM, dtype=torch.long)], []
    for length in range(LENGTH):
        tokens.append(torch.multinomial(draft[length][prefixes[-1]], 1, generator=generator).view(-1))
        prefixes.append(prefixes[-1] * VOCABULARY + tokens[-1])
    drafted = torch.stack(tokens, 1)
    real = torch.arange(LENGTH) < counts[:, None]
    target, proposal = (torch.stack([t[i][prefixes[i]] for i in range(LENGTH)], 1)[real] for t in (policy, draft))
    uniform = torch.rand(len(target), generator=generator, dtype=torch.float64)
    last = torch.rand(NUM, generator=generator, dtype=torch.float64)
    if in_blocks:
        accepted, after = verify_blocks(target, proposal, drafted[real], counts, uniform, last)
    else:
        chosen = drafted[real].view(-1, 1)
        passes = torch.ones(NUM, LENGTH, dtype=torch.bool).masked_scatter(
            real, uniform < (target.gather(1, chosen) / proposal.gather(1, chosen)).view(-1)
        )
        accepted = torch.minimum(passes.long().cumprod(1).sum(1), counts)
        after = torch.full((NUM,), -1)
    found, prefix = [], torch.zeros(NUM, dtype=torch.long)
    for place in range(LENGTH + 1):
        token = torch.multinomial(policy[place][prefix], 1, generator=generator).view(-1)
        if place < LENGTH:
            token = torch.where(place < accepted, drafted[:, place], token)
        token = torch.where((place == accepted) & (accepted < counts), after, token) if in_blocks else token
        found.append(token)
        prefix = prefix * VOCABULARY + token
    return torch.stack(found, 1), accepted


@pytest.mark.parametrize("sharpness", [0.3, 1.5])
def test_blocks_are_verified_without_a_trace_of_the_draft(sharpness: float) -> None:
    """81 sequences of four tokens from drafts of one to three; the exact share of each follows from the policy."""
    policy, draft = tables(1, sharpness), tables(2, sharpness)
    tokens, accepted = sampled(policy, draft, in_blocks=True)
    exact = policy[0]
    for table in policy[1:]:
        exact = (exact.reshape(-1, 1) * table).reshape(1, -1)
    places = tokens @ VOCABULARY ** torch.arange(LENGTH, -1, -1)
    counts = torch.bincount(places, minlength=VOCABULARY ** (LENGTH + 1))
    expected = exact.double().view(-1) / exact.double().sum() * NUM
    assert stats.chisquare(counts.numpy(), expected.numpy()).pvalue > 1e-3
    _, by_token = sampled(policy, draft, in_blocks=False)
    assert accepted.double().mean() > 1.005 * by_token.double().mean()


def test_blocks_accept_as_many_certain_drafts_as_tests_of_each_token_and_leave_the_policy() -> None:
    """Two certain drafts: token 0, to which the policy gives 0.5, and then token 2 with 0.4.

    The first is rejected in 0.5 of all blocks, the second in 0.5 x 0.6, and none in 0.5 x 0.4. In the place of a
    rejected token stand the others in the policy's proportion: 0.3 to 0.2, and 0.45 to 0.15.
    """
    policy = torch.tensor([[0.5, 0.3, 0.2], [0.45, 0.15, 0.4]]).repeat(NUM, 1)
    drafted = torch.tensor([0, 2]).repeat(NUM)
    certain = torch.nn.functional.one_hot(drafted, VOCABULARY).float()
    generator = torch.Generator().manual_seed(3)
    uniform, last = (torch.rand(num, generator=generator, dtype=torch.float64) for num in (2 * NUM, NUM))
    accepted, after = verify_blocks(policy, certain, drafted, torch.full((NUM,), 2), uniform, last)
    seen = torch.bincount(accepted, minlength=3)
    assert stats.chisquare(seen.numpy(), [0.5 * NUM, 0.3 * NUM, 0.2 * NUM]).pvalue > 1e-3
    for place, (left_out, shares) in enumerate(((0, (0.6, 0.4)), (2, (0.75, 0.25)))):
        tokens = torch.bincount(after[accepted == place], minlength=VOCABULARY)
        assert int(tokens[left_out]) == 0
        others = tokens[[token for token in range(VOCABULARY) if token != left_out]]
        assert stats.chisquare(others.numpy(), [share * int(seen[place]) for share in shares]).pvalue > 1e-3
    assert set(after[accepted == 2].tolist()) == {-1}


def test_a_draft_that_is_the_policy_is_accepted_whole() -> None:
    policy = tables(1, 1.0)
    _, accepted = sampled(policy, policy, in_blocks=True)
    assert torch.equal(accepted, 1 + torch.arange(NUM) % LENGTH)


def test_a_token_that_the_policy_never_samples_is_not_accepted_by_the_number_0() -> None:
    target, draft = torch.tensor([[0.0, 1.0], [0.5, 0.5]]), torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    zeros = torch.zeros(2, dtype=torch.float64)
    accepted, after = verify_blocks(target, draft, torch.tensor([0, 1]), torch.tensor([2]), zeros, zeros[:1])
    assert (accepted.tolist(), after.tolist()) == ([0], [1])
