"""The real engine refitted while its rollouts run: nothing lost, each token of the version that it carries."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import ray

from slipstream.drafts.methods import speculative_config
from slipstream.engine.config import SamplingConfig
from slipstream.engine.protocol import GroupRequest, group_requests
from slipstream.grpo.config import KvCache
from slipstream.refit.config import WeightFiles
from slipstream.types import Rollout, RolloutGroup
from slipstream.workers.engines import RemoteEngine, start_engine
from tests import small
from tests.small import DRAFT, exact_logprobs, prompts

pytestmark = pytest.mark.slow
logger = logging.getLogger(__name__)

ENGINE = replace(small.ENGINE, max_model_len=384, max_num_seqs=12, kv_cache_gib=0.2)
SAMPLING = SamplingConfig(temperature=1.0, max_response_tokens=80)
GROUP = 4
NUM_GROUPS = 6  # twice as many rollouts as run at once: half of them wait inside vLLM
NUM_REFITS = 5


@pytest.fixture(scope="module")
def models(
    tmp_path_factory: pytest.TempPathFactory,
    make_policy: Callable[[Path, int], Path],
    make_draft: Callable[[Path, Path, int], Path],
) -> dict[str, Path]:
    """Six policies, each a small step from the one before, and two drafts."""
    root = tmp_path_factory.mktemp("models")
    policies = {"0": make_policy(root / "0", 0)}
    for version in range(1, NUM_REFITS + 1):
        policies[str(version)] = _moved(policies[str(version - 1)], root / str(version), version)
    return policies | {f"draft{seed}": make_draft(root / f"draft{seed}", policies["0"], seed) for seed in (5, 6)}


@pytest.fixture(scope="module", params=[0, 3])
def engine(request: pytest.FixtureRequest, models: dict[str, Path], ray_session: None) -> Iterator[RemoteEngine]:
    """Autoregressive, and with three draft tokens."""
    draft = speculative_config(DRAFT, models["draft5"], request.param) if request.param else None
    with start_engine(models["0"], config=ENGINE, speculative_config=draft, kv_cache=KvCache.RECOMPUTE) as started:
        yield started


def _moved(policy: Path, path: Path, seed: int) -> Path:
    import torch
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(policy)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.002 * torch.randn_like(parameter)
    model.save_pretrained(path)
    return path


def _requests(first: int) -> tuple[GroupRequest, ...]:
    # Two blocks of the KV cache, of 32 tokens, and more: with a draft the last block that is found is not used.
    rows = ((2, *(4 + (7 * i + 3 * j) % 60 for j in range(78))) for i in range(NUM_GROUPS))
    made = group_requests(prompts(rows), group_size=GROUP, seed=first)
    return tuple(replace(request, index=first + request.index) for request in made)


def _finish(engine: RemoteEngine) -> dict[int, RolloutGroup]:
    found: dict[int, RolloutGroup] = {}
    while engine.under_way:
        found.update(engine.advance(max_s=30.0).groups)
    return found


def _has_draft(engine: RemoteEngine) -> bool:
    return engine.states()[0].draft_version is not None


def _refit(engine: RemoteEngine, models: dict[str, Path], version: int) -> None:
    """To the next policy, and every time to another draft, as a learner that trains both would."""
    draft = models[f"draft{5 + version % 2}"] / "model.safetensors" if _has_draft(engine) else None
    before = engine.states()[0].num_prefix_cache_resets
    policy = models[str(version)] / "model.safetensors"
    files = WeightFiles(policy=policy, policy_version=version, draft=draft, draft_version=100 + version)
    (state,) = engine.refit(files)
    assert (state.policy_version, state.num_prefix_cache_resets) == (version, before + 1)


def _in_flight(engine: RemoteEngine, models: dict[str, Path], kv_cache: KvCache) -> dict[int, RolloutGroup]:
    """All groups, generated across five refits, 12 steps apart."""
    engine.run_in_flight(kv_cache)
    _refit(engine, models, 0)
    requests = _requests(first=40)
    engine.submit(requests, sampling=SAMPLING)
    found: dict[int, RolloutGroup] = {}
    for version in range(1, NUM_REFITS + 1):
        for _ in range(12):  # steps
            found.update(engine.advance(max_s=0.0).groups)
        assert engine.under_way
        _refit(engine, models, version)
    found.update(_finish(engine))
    assert set(found) == {request.index for request in requests}
    assert [found[request.index].prompt for request in requests] == [request.prompt for request in requests]
    return found


def _differences(groups: Sequence[RolloutGroup], models: dict[str, Path]) -> list[np.ndarray]:
    """Engine's logprob of each token of each rollout, less that of the policy version that the token carries."""
    from transformers import Qwen3ForCausalLM

    policies = [Qwen3ForCausalLM.from_pretrained(models[str(version)]) for version in range(NUM_REFITS + 1)]
    found = []
    for group in groups:
        for rollout in group.rollouts:
            own = [exact_logprobs(policy, group.prompt.token_ids, rollout.token_ids) for policy in policies]
            versions = [span.policy_version for span in rollout.spans for _ in range(span.num_tokens)]
            exact = [own[version][at] for at, version in enumerate(versions)]
            found.append(np.asarray(rollout.rollout_logprobs) - np.asarray(exact))
    return found


def _check_spans(rollout: Rollout, *, has_draft: bool) -> None:
    spans = rollout.spans
    assert sum(span.num_tokens for span in spans) == len(rollout.token_ids) == len(rollout.rollout_logprobs)
    assert all(span.num_tokens > 0 for span in spans)
    assert [span.policy_version for span in spans] == sorted({span.policy_version for span in spans})
    assert (rollout.policy_version, rollout.draft_version) == (spans[0].policy_version, spans[0].draft_version)
    for span in spans:  # draft and policy change together
        assert span.draft_version == (100 + span.policy_version if has_draft else None)


def test_with_recomputed_caches_each_token_is_of_the_version_that_it_carries(
    engine: RemoteEngine, models: dict[str, Path]
) -> None:
    groups = tuple(_in_flight(engine, models, KvCache.RECOMPUTE).values())
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    for rollout in rollouts:
        _check_spans(rollout, has_draft=_has_draft(engine))
    assert max(len(rollout.spans) for rollout in rollouts) >= 3
    assert len({rollout.policy_version for rollout in rollouts}) >= 3  # some begin late
    assert max(np.abs(each).max() for each in _differences(groups, models)) < 1e-4


def test_with_kept_caches_rollouts_begin_exactly_and_later_tokens_are_a_little_off(
    engine: RemoteEngine, models: dict[str, Path]
) -> None:
    groups = tuple(_in_flight(engine, models, KvCache.KEEP).values())
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    inside, after = [], []
    for rollout, difference in zip(rollouts, _differences(groups, models), strict=True):
        _check_spans(rollout, has_draft=_has_draft(engine))
        first = rollout.spans[0].num_tokens
        inside.append(difference[:first])
        after.append(difference[first:])
    assert np.abs(np.concatenate(inside)).max() < 1e-4  # as long as no weights have entered, and after a late start
    size = np.abs(np.concatenate(after))
    logger.warning("kept caches: %d tokens are %.4f nats off, at most %.3f", len(size), size.mean(), size.max())
    assert np.isfinite(size).all()
    assert len(size) > 500
    # The bias that docs/guarantees.md gives for policies this far apart, in nats a token: 0.07, and 0.8 at most.
    assert 0.02 < size.mean() < 0.2
    assert 0.2 < size.max() < 2.5


def test_a_kept_cache_is_never_found_by_what_starts_later(engine: RemoteEngine, models: dict[str, Path]) -> None:
    """The same prompt before and after the refit: half of its rollouts run, half wait in vLLM when it comes."""
    engine.run_in_flight(KvCache.KEEP)
    _refit(engine, models, 0)
    early = replace(_requests(first=60)[0], seeds=tuple(range(24)))
    engine.submit([early], sampling=SAMPLING)
    engine.advance(max_s=0.0)
    _refit(engine, models, 5)
    engine.submit([replace(early, index=61, seeds=(1, 2))], sampling=SAMPLING)
    found = _finish(engine)
    late = [rollout for rollout in found[60].rollouts if rollout.policy_version == 5]
    assert len(late) == 24 - ENGINE.max_num_seqs
    groups = (RolloutGroup(prompt=early.prompt, rollouts=(*late, *found[61].rollouts)),)
    assert max(np.abs(each).max() for each in _differences(groups, models)) < 1e-4


def test_what_is_started_anew_is_drawn_by_the_present_weights_with_its_new_seeds(
    engine: RemoteEngine, models: dict[str, Path]
) -> None:
    engine.run_in_flight(KvCache.RECOMPUTE)
    _refit(engine, models, 0)
    requests = _requests(first=80)[:2]
    engine.submit(requests, sampling=SAMPLING)
    engine.advance(max_s=0.0)
    engine.advance(max_s=0.0)
    _refit(engine, models, 1)
    num = engine.restart([80, 99], seeds=lambda request: tuple(seed + 1 for seed in request.seeds))
    assert 0 < num <= GROUP
    assert engine.under_way[0].seeds == tuple(seed + 1 for seed in requests[0].seeds)
    found = _finish(engine)
    count = engine.workers[0].actor.__ray_call__
    assert ray.get(count.remote(lambda own: own._counts._num_preemptions)) == 0  # what starts anew reports none
    anew = [rollout for rollout in found[80].rollouts if not rollout.versions and rollout.policy_version == 1]
    assert len(anew) == num
    assert {rollout.policy_version for rollout in found[81].rollouts} == {0}
    engine.run_in_flight(None)
    again = engine.generate([requests[0].prompt], sampling=SAMPLING, group_size=1, seed=0)
    assert len(again.groups[0].rollouts) == 1  # nothing of the other mode is left


def test_no_step_is_taken_between_new_weights_and_their_version(engine: RemoteEngine, models: dict[str, Path]) -> None:
    engine.run_in_flight(KvCache.RECOMPUTE)
    _refit(engine, models, 0)
    engine.submit(_requests(first=20)[:1], sampling=SAMPLING)
    ray.get(engine.workers[0].actor.start_update.remote(is_draft=False))
    with pytest.raises(RuntimeError, match="must adopt the weights that it received"):
        engine.advance(max_s=1.0)
    _refit(engine, models, 1)  # the one before is abandoned
    found = _finish(engine)
    assert {rollout.policy_version for rollout in found[20].rollouts} == {1}
