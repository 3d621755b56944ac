"""Drafts drawn with the requests' generators: the same distribution, and nothing of the batch in a request's draws."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from vllm.platforms import current_platform
from vllm.v1.sample.metadata import SamplingMetadata

from slipstream.engine import vllm_plugin

pytestmark = pytest.mark.slow  # vLLM's import takes seconds

CPU = torch.device("cpu")
Generators = dict[int, torch.Generator]


def metadata(generators: Generators, temperature: list[float]) -> SamplingMetadata:
    return replace(
        vllm_plugin._two_seeded_of_three(CPU),
        temperature=torch.tensor(temperature),
        generators=generators,
        all_greedy=all(value == 0 for value in temperature),
        all_random=all(value > 0 for value in temperature),
    )


def seeded(*seeds: int) -> Generators:
    return {row: torch.Generator().manual_seed(seed) for row, seed in enumerate(seeds)}


def test_the_installed_sampler_passes_its_own_check_and_vllms_drafts_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.spec_decode import llm_base_proposer

    vllm_plugin.install()
    assert vllm_plugin.broken_v1(CPU) == ""
    assert rejection_sampler.sample_recovered_tokens is vllm_plugin.sample_recovered_tokens
    proposer = llm_base_proposer.SpecDecodeBaseProposer
    for where, name, shipped, draft in (
        (llm_base_proposer, "compute_probs_and_sample_next_token", vllm_plugin.SHIPPED_DRAFTS, 0),
        (proposer, "_sample_from_logits", vllm_plugin.SHIPPED_PARALLEL, 2),  # the first of those in parallel
    ):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, shipped)
            assert f"draft {draft} of two requests with seed 7" in vllm_plugin.broken_v1(CPU)


def test_a_draft_is_the_token_of_most_probability_over_its_requests_own_noise() -> None:
    """A request has the noise of its seed, wherever it is; a greedy one has none, and one without a seed anybody's."""
    logits, temperatures = torch.randn(4, 64), [1.0, 2.0, 0.0, 1.0]
    given = metadata(seeded(5, 6, 7), temperatures)
    generators = given.generators
    tokens, probs = vllm_plugin.sample_draft_tokens(logits.clone(), given)
    by_hand = [torch.Generator().manual_seed(seed) for seed in (5, 6)]
    for row, (generator, temperature) in enumerate(zip(by_hand, temperatures, strict=False)):
        expected = torch.softmax(logits[row] / temperature, dim=-1)
        noise = torch.empty(64).exponential_(generator=generator)
        assert torch.allclose(probs[row], expected)
        assert int(tokens[row]) == int((expected / noise).argmax())
        assert torch.equal(generators[row].get_state(), generator.get_state())
    assert int(tokens[2]) == int(logits[2].argmax())
    assert torch.allclose(probs[3], torch.softmax(logits[3], dim=-1))
    greedy, _ = vllm_plugin.sample_draft_tokens(logits.clone(), metadata({}, [0.0] * 4))
    assert greedy.tolist() == logits.argmax(-1).tolist()


def test_drafts_follow_the_drafts_probabilities() -> None:
    """20,000 requests of one draw each, and one request of 20,000 draws, against the exact probabilities."""
    logits = torch.tensor([1.0, 0.0, -1.0, 0.5, 2.0])
    num, exact = 20_000, torch.softmax(logits.double() / 0.7, dim=-1).numpy()
    many, _ = vllm_plugin.sample_draft_tokens(logits.repeat(num, 1), metadata(seeded(*range(num)), [0.7] * num))
    one = metadata(seeded(9), [0.7])
    along = [int(vllm_plugin.sample_draft_tokens(logits[None].clone(), one)[0]) for _ in range(num)]
    for drawn in (many.numpy(), np.asarray(along)):
        assert stats.chisquare(np.bincount(drawn, minlength=5), exact * num).pvalue > 1e-3


def test_a_draft_with_a_vocabulary_of_its_own_samples_what_it_would_without_the_other_tokens() -> None:
    known, logits = torch.tensor([3, 700, 901]), torch.randn(4, 3)
    wide = torch.full((4, 1000), -torch.inf).index_copy_(1, known, logits)
    tokens, probs = vllm_plugin.sample_draft_tokens(wide, metadata(seeded(1, 2, 3, 4), [0.5, 1.0, 2.0, 0.0]))
    alone, few = vllm_plugin.sample_draft_tokens(logits.clone(), metadata(seeded(1, 2, 3, 4), [0.5, 1.0, 2.0, 0.0]))
    assert tokens.tolist() == known[alone].tolist()
    assert torch.equal(probs[:, known], few)
    assert probs.dtype == torch.float32
    assert torch.allclose(probs.sum(dim=-1), torch.ones(4))


def recovered(
    target: torch.Tensor, draft: torch.Tensor | None, ids: list[int], rows: list[int], generators: Generators
) -> list[int]:
    """Tokens in place of rejected ones: `ids` [num_tokens], and `rows` draft tokens a request."""
    given = metadata(generators, [1.0] * len(rows))
    ends, tokens = torch.tensor(rows).cumsum(0), torch.tensor(ids, dtype=torch.int32)
    return vllm_plugin.sample_recovered_tokens(max(rows), rows, ends, tokens, draft, target, given, CPU).tolist()


@pytest.mark.parametrize("vocabulary", [5, 256, 1000])
@pytest.mark.parametrize("has_probabilities", [True, False])
def test_a_token_in_place_of_a_rejected_one_follows_what_the_policy_has_and_the_draft_has_not(
    vocabulary: int, *, has_probabilities: bool
) -> None:
    num, seed = 20_000, torch.Generator().manual_seed(1)
    shift = torch.arange(vocabulary).float()[torch.randperm(vocabulary, generator=seed)] / vocabulary
    target, draft = torch.softmax(2 * shift, -1), torch.softmax(-shift, -1)
    rejected = vocabulary // 2
    left = (target - draft).clamp(min=0) if has_probabilities else target.index_fill(0, torch.tensor([rejected]), 0.0)
    given = draft.expand(num, -1) if has_probabilities else None
    tokens = recovered(target.expand(num, -1), given, [rejected] * num, [1] * num, seeded(*range(num // 2)))
    counts, exact = np.bincount(tokens, minlength=vocabulary), (left.double() / left.double().sum() * num).numpy()
    assert counts[exact == 0].sum() == 0
    assert stats.chisquare(counts[exact > 0], exact[exact > 0]).pvalue > 1e-3


def test_a_recovered_token_depends_on_its_requests_seed_alone_and_only_requests_with_drafts_take_a_number() -> None:
    target = torch.softmax(torch.randn(3, 600), -1)
    generators = seeded(0, 1, 2)
    both = recovered(target, None, [0, 0, 0], [1, 0, 2], generators)
    by_hand = seeded(0, 1, 2)
    for row in (0, 2):
        torch.empty(1, dtype=torch.float64).uniform_(generator=by_hand[row])
    states = [[each[row].get_state() for row in range(3)] for each in (generators, by_hand)]
    assert all(torch.equal(one, other) for one, other in zip(*states, strict=True))
    assert recovered(target[1:], None, [0, 0], [0, 0, 2], seeded(0, 1, 2)) == both[1:]


@pytest.mark.parametrize("num_seeds", [0, 20_000])
def test_greedy_drafts_are_verified_exactly(num_seeds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two certain drafts: token 0, to which the policy gives 0.5, and then token 2 with 0.4; then the bonus token 7.

    A rejected 0 leaves 0.3 and 0.2 to the tokens 1 and 2, as the policy does: 0.5 x 0.6 and 0.5 x 0.4. A rejected 2
    leaves 0.45 and 0.15 to 0 and 1: 0.5 x 0.6 x 0.75 and 0.5 x 0.6 x 0.25. At temperature 2 the policy's logits are
    halved first.
    """
    from vllm.triton_utils import dispatcher
    from vllm.v1.sample import rejection_sampler

    class ModulesOfVllm:
        """Modules in which vLLM looks for kernels; those of others, once imported, may refuse a look."""

        @property
        def modules(self) -> dict[str, Any]:
            return {name: module for name, module in sys.modules.items() if name.startswith("vllm.")}

    monkeypatch.setattr(dispatcher, "sys", ModulesOfVllm())
    current_platform.register_triton_kernel_overrides()  # as an engine's start does on CPUs
    vllm_plugin.install()
    num = 20_000
    torch.manual_seed(8)
    given = metadata(seeded(*range(num_seeds)), [2.0] * num)
    logits = 2 * torch.tensor([[0.5, 0.3, 0.2], [0.45, 0.15, 0.4]]).log().repeat(num, 1)
    ends, ids = 2 * torch.arange(1, num + 1), torch.tensor([0, 2], dtype=torch.int32).repeat(num)
    bonus = torch.full((num, 1), 7, dtype=torch.int32)
    scaled = rejection_sampler.apply_sampling_constraints(logits, ends, given)
    tokens = rejection_sampler.rejection_sample(ids, [2] * num, 2, ends, None, scaled, bonus, given)
    seen = Counter(map(tuple, tokens.tolist()))
    exact = {(1, -1, -1): 0.3, (2, -1, -1): 0.2, (0, 0, -1): 0.225, (0, 1, -1): 0.075, (0, 2, 7): 0.2}
    assert seen.keys() == exact.keys()
    assert stats.chisquare([seen[each] for each in exact], [num * share for share in exact.values()]).pvalue > 1e-3


def test_a_probe_that_is_asked_has_drafts_verified_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests with 2, 0 and 1 drafts from the policy itself, all accepted and followed by a bonus token;
    then two whose drafts the policy never gives.
    """
    from vllm.v1.sample import rejection_sampler

    monkeypatch.setattr(rejection_sampler, "rejection_sample", vllm_plugin.SHIPPED_VERIFICATION)
    vllm_plugin.EngineProbe().verify_in_blocks()
    logits = torch.randn(3, 300)
    same = torch.softmax(logits, -1)

    def verified(drafts: list[int], rows: list[int], draft: torch.Tensor, logits: torch.Tensor) -> list[list[int]]:
        given = metadata(seeded(*range(len(rows))), [1.0] * len(rows))
        ends, ids = torch.tensor(rows).cumsum(0), torch.tensor(drafts, dtype=torch.int32)
        bonus = torch.tensor([[90 + row] for row in range(len(rows))], dtype=torch.int32)
        found = rejection_sampler.rejection_sample(ids, rows, 3, ends, draft, logits, bonus, given)
        assert found.dtype == torch.int32
        return found.tolist()

    assert verified([5, 6, 7], [2, 0, 1], same, logits) == [[5, 6, 90, -1], [91, -1, -1, -1], [7, 92, -1, -1]]
    never = logits[:2].index_fill(1, torch.tensor([5]), -torch.inf)
    first, second = verified([5, 5], [1, 1], same[:2], never)
    assert first[1:] == second[1:] == [-1, -1, -1]
    assert 5 not in (first[0], second[0]) and not {90, 91} & {first[0], second[0]}


_INTERPRETED = """
import types
from triton.backends import backends

# To vLLM's CPU build Triton is there if it has a backend for CPUs; the interpreter needs none.
driver = types.SimpleNamespace(is_active=lambda: False)
backends.setdefault("cpu", types.SimpleNamespace(driver=driver, compiler=None))

import torch
import vllm.v1.worker.cpu.shm  # vLLM's stand-ins for pinned memory
from vllm.v1.worker.gpu.sample import gumbel

from slipstream.engine import vllm_plugin

cpu = torch.device("cpu")
sample, scale = gumbel.gumbel_sample, gumbel.apply_temperature
print(repr(vllm_plugin.broken_v2(cpu)))
gumbel.gumbel_sample = lambda *args, is_drafting, **kwargs: sample(*args, is_drafting=False, **kwargs)
print(vllm_plugin.broken_v2(cpu))
gumbel.gumbel_sample = lambda logits, rows, temperature, seeds, *args, **kwargs: sample(
    logits, rows, temperature, torch.arange(3), *args, **kwargs
)
print(vllm_plugin.broken_v2(cpu))
gumbel.apply_temperature = lambda *args: None
print(vllm_plugin.broken_v2(cpu))
"""


def test_the_second_runners_sampler_passes_its_check_and_each_fault_of_it_is_named() -> None:
    """Its Triton kernels, in Triton's interpreter: there is no GPU here."""
    how: dict[str, Any] = {"env": {**os.environ, "TRITON_INTERPRET": "1"}, "capture_output": True, "text": True}
    run = subprocess.run([sys.executable, "-c", _INTERPRETED], check=False, **how)
    assert run.returncode == 0, run.stderr
    whole, shared, ignored, lost = run.stdout.strip().splitlines()[-4:]
    assert whole == "''"
    assert shared.startswith("drafts get the noise of the policy's draws")
    assert "noise must follow from the seed" in ignored
    assert lost == "apply_temperature gave [6.0, 6.0, 6.0]: it loses sampling parameters"
