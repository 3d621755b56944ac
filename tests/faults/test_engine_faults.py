"""Faults of the engine and of refits, injected into real vLLM: each must end in a verdict or an error that names it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
from safetensors.torch import load_file

from slipstream.drafts.methods import speculative_config
from slipstream.engine.config import SamplingConfig
from slipstream.engine.protocol import Trace
from slipstream.grpo.config import KvCache
from slipstream.losslessness.sampling import Sample, draw
from slipstream.losslessness.verdict import BIASED, LOSSLESS, judged
from slipstream.records.stages import CertificateRecord
from slipstream.refit.config import EngineState, RefitError, WeightFiles
from slipstream.refit.fingerprint import ALL
from slipstream.refit.gate import RefitGate
from slipstream.train.batch import assemble
from slipstream.types import Prompt
from slipstream.workers.engines import start_engine
from tests import small
from tests.faults.faulty_engine import started
from tests.small import DRAFT, FileChannel, OneRank, certified
from tests.unit.train.world import CONFIG as GRPO

pytestmark = pytest.mark.slow

ENGINE = replace(small.ENGINE, max_model_len=400, max_num_seqs=32, kv_cache_gib=0.25)
SAMPLING = SamplingConfig(max_response_tokens=48)
Inject = Callable[..., Any]

# Three blocks of the prefix cache are 384 tokens on a CPU. With a draft the last cached one is computed again, so
# prompts of less than two are never read from the cache. Faults that show without one are tried on short prompts, which
# cost the exact policy a fifth as much.
PROMPTS, SHORT = (
    small.prompts((2, *(4 + (7 * i + 3 * j) % 60 for j in range(length))) for i in range(8)) for length in (300, 12)
)
CONFIG = replace(small.CERTIFICATE, num_repeats=256, num_replications=4)


@dataclass(frozen=True, repr=False)  # pytest would print tens of thousands of tokens
class Bench:
    """A speculative engine with faults to inject, the autoregressive engine's sample, and the exact policies."""

    engine: Any  # RemoteEngine
    actor: Any
    models: dict[str, Path]
    exact: dict[str, OneRank]  # by policy
    baseline: Sample

    def refit(self, policy: str, version: int, draft: str = "", draft_version: int = 0) -> None:
        path = self.models[draft] if draft else None
        files = WeightFiles(policy=self.models[policy], policy_version=version, draft=path, draft_version=draft_version)
        self.engine.refit(files)


@pytest.fixture(scope="module")
def bench(models: dict[str, Path], ray_session: None) -> Iterator[Bench]:
    exact = {name: OneRank(models[name]) for name in ("old", "new")}
    with start_engine(models["old"], config=ENGINE) as autoregressive:
        baseline = draw(autoregressive, PROMPTS, config=CONFIG, sampling=SAMPLING, batch=32, seed=100)
    engine, actor = started(models["old"], ENGINE, speculative_config(DRAFT, models["old_draft"], 3))
    yield Bench(engine=engine, actor=actor, models=models, exact=exact, baseline=baseline)
    engine.close()


@pytest.fixture
def inject(bench: Bench) -> Iterator[Inject]:
    """Injects faults for one test; afterwards the engine is whole and holds the old policy and draft."""
    yield lambda *faults: ray.get(bench.actor.inject.remote(*faults))
    ray.get(bench.actor.heal.remote())
    bench.refit("old", 0, "old_draft")


class Sampled:
    """The engine as it would be if it had read other sampling settings."""

    def __init__(self, engine: Any, **settings: float) -> None:
        self.engine, self.settings = engine, settings

    def trace(self, prompts: Any, *, sampling: SamplingConfig, group_size: int, seed: int) -> list[Trace]:
        changed = replace(sampling, **self.settings) if sampling.temperature > 0 else sampling
        return self.engine.trace(prompts, sampling=changed, group_size=group_size, seed=seed)


def certificate(
    bench: Bench,
    engine: Any = None,
    *,
    policy: str = "old",
    sampling: SamplingConfig = SAMPLING,
    prompts: Sequence[Prompt] = SHORT,
) -> CertificateRecord:
    """Certificate of an engine's sample; tests beside the baseline say nothing unless `prompts` are its own."""
    sample = draw(engine or bench.engine, prompts, config=CONFIG, sampling=sampling, batch=32, seed=1)
    return certified(sample, bench.baseline, bench.exact[policy], CONFIG, sampling=sampling)


def conditional_rejections(record: CertificateRecord) -> list[str]:
    """Tests against the policy's own conditionals that reject: the baseline takes no part in them."""
    return [finding.name for finding in record.findings if finding.reject and "beside" not in finding.name]


def test_the_engine_as_it_is_gets_its_certificate(bench: Bench) -> None:
    record = certificate(bench, prompts=PROMPTS)
    assert record.verdict == LOSSLESS, record.reason
    assert "pit, draft position 1" in {finding.name for finding in record.findings}
    assert not [finding for finding in record.control if finding.reject]


def test_without_the_sampler_fix_the_certificate_fails(bench: Bench, inject: Inject) -> None:
    inject("no sampler fix")
    record = certificate(bench)
    assert record.verdict == BIASED
    assert conditional_rejections(record)


def test_without_the_sampler_fix_an_engine_refuses_to_start(bench: Bench, inject: Inject) -> None:
    inject("no sampler fix")
    with pytest.raises(RuntimeError, match=r"expand_batch_to_tokens gave .* loses sampling parameters"):
        ray.get(bench.actor.check_again.remote())


def test_an_engine_whose_drafts_ignore_seeds_refuses_to_start(bench: Bench, inject: Inject) -> None:
    inject("drafts ignore seeds")
    with pytest.raises(RuntimeError, match=r"draft 0 of two requests with seed 7 is .*: speculative rollouts would"):
        ray.get(bench.actor.check_again.remote())


def test_always_accepting_the_first_draft_token_fails(bench: Bench, inject: Inject) -> None:
    inject("accepts the first")
    record = certificate(bench)
    assert record.verdict == BIASED
    assert "pit, draft position 1" in conditional_rejections(record)


def test_another_temperature_fails(bench: Bench) -> None:
    assert conditional_rejections(certificate(bench, Sampled(bench.engine, temperature=0.9)))


def test_ignoring_top_p_fails(bench: Bench) -> None:
    asked = replace(SAMPLING, top_p=0.8)
    assert conditional_rejections(certificate(bench, Sampled(bench.engine, top_p=1.0), sampling=asked))


def test_top_p_and_a_temperature_are_sampled_exactly(bench: Bench) -> None:
    asked = replace(SAMPLING, temperature=0.7, top_p=0.9, top_k=20)
    assert conditional_rejections(certificate(bench, sampling=asked)) == []


def test_a_policy_one_refit_behind_fails(bench: Bench) -> None:
    assert conditional_rejections(certificate(bench, policy="new"))


def test_a_stale_prefix_cache_fails(bench: Bench, inject: Inject) -> None:
    inject("prefix cache kept")
    bench.engine.trace(PROMPTS, sampling=SAMPLING, group_size=1, seed=0)  # fills the cache under the old policy
    bench.refit("new", 1)
    assert conditional_rejections(certificate(bench, policy="new", prompts=PROMPTS))


def in_flight(bench: Bench, kv_cache: KvCache) -> Sample:
    """Sample of an engine that changes between the old and the new policy every few steps."""
    bench.engine.run_in_flight(kv_cache)
    versions = tuple(
        WeightFiles(policy=bench.models[name], policy_version=version, draft=bench.models[f"{name}_draft"])
        for version, name in enumerate(("old", "new"))
    )
    across = partial(bench.engine.trace, refits=versions, steps_between=5)
    sample = draw(bench.engine, PROMPTS, config=CONFIG, sampling=SAMPLING, batch=32, seed=1, across=across)
    bench.engine.run_in_flight(None)
    assert {version for trace in sample.traces for version in trace.policy_versions} == {0, 1}
    return sample


def rejections_of_versions(bench: Bench, sample: Sample, *, old: int = 0) -> list[str]:
    """Conditional tests that reject when tokens of version `old` are held against the old policy, others the new."""
    earlier = {old: judged(sample.traces, bench.exact["old"], sampling=SAMPLING, seed=CONFIG.seed)}
    how: dict[str, Any] = {"sampling": SAMPLING, "earlier": earlier}
    return conditional_rejections(certified(sample, bench.baseline, bench.exact["new"], CONFIG, **how))


@pytest.fixture(scope="module")
def recomputed(bench: Bench) -> Sample:
    """Sample of an engine in flight; the engine is afterwards as it was."""
    sample = in_flight(bench, KvCache.RECOMPUTE)
    bench.refit("old", 0, "old_draft")
    return sample


def test_an_engine_that_is_refitted_while_it_draws_samples_each_version_exactly(
    bench: Bench, recomputed: Sample
) -> None:
    assert rejections_of_versions(bench, recomputed) == []


def test_tokens_held_against_another_version_than_they_carry_are_seen(bench: Bench, recomputed: Sample) -> None:
    assert "pit, all tokens" in rejections_of_versions(bench, recomputed, old=1)


def test_caches_that_are_kept_across_a_refit_are_seen_by_the_certificate(bench: Bench, inject: Inject) -> None:
    """Between two policies that have nothing in common; `keep` promises less than `recompute`, and says so."""
    assert rejections_of_versions(bench, in_flight(bench, KvCache.KEEP))


class Brought(FileChannel):
    """A channel to the faulty engine, and the learner that it is held against."""

    def __init__(self, bench: Bench, policy: str, *, sends: str | None = None, digest: str = "") -> None:
        super().__init__(bench.engine, bench.models[sends or policy], digest=digest)
        self.learner = bench.exact[policy]


def gate(bench: Bench, brought: Brought, draft: str = "old_draft", *, with_probes: bool = True) -> RefitGate:
    probes = [prompt.token_ids for prompt in PROMPTS] if with_probes else ()
    return small.gate_of(bench.engine, brought.learner, brought, bench.models[draft], probes=probes)


def test_the_gate_compares_every_tensor_of_policy_and_draft(bench: Bench, inject: Inject) -> None:
    check = gate(bench, Brought(bench, "new")).refit(1)
    files = [bench.models[name] / "model.safetensors" for name in ("new", "old_draft")]
    assert check.num_tensors == sum(len(load_file(file)) for file in files)


def test_bytes_that_were_altered_on_their_way_are_an_error(bench: Bench, inject: Inject) -> None:
    with pytest.raises(RefitError, match="engine 0 must read policy version 1 as the learner wrote it"):
        gate(bench, Brought(bench, "new", digest="of what was written")).refit(1)


def test_weights_of_another_policy_are_named(bench: Bench, inject: Inject) -> None:
    with pytest.raises(RefitError, match=r"engine 0 must hold policy version 1 to the last bit: \d+ of 47 tensors"):
        gate(bench, Brought(bench, "new", sends="old")).refit(1)


def test_one_flipped_bit_in_the_engine_is_named(bench: Bench, inject: Inject) -> None:
    class Flipping(Brought):
        """A channel to an engine whose memory loses a bit after the refit."""

        def refit(self, *, policy_version: int) -> list[EngineState]:
            states = super().refit(policy_version=policy_version)
            ray.get(bench.actor.flip.remote("model.norm.weight"))
            return states

    checked = gate(bench, Flipping(bench, "old"))
    with pytest.raises(RefitError, match=r"1 of 47 tensors differ: model\.norm\.weight"):
        checked.refit(1)


def test_a_layer_that_multiplies_with_other_weights_than_it_shows_is_an_error(bench: Bench, inject: Inject) -> None:
    gate(bench, Brought(bench, "old"))
    ray.get(bench.actor.flip.remote("lm_head.weight"))  # the shown copy; the packed one stays as it was
    with pytest.raises(RuntimeError, match=r"lm_head\.weight must be what its layer multiplies with"):
        bench.engine.start_fingerprints(is_draft=False, turn=ALL)()


def test_an_engine_that_hides_its_tensors_is_compared_by_logprobs(
    bench: Bench, inject: Inject, caplog: pytest.LogCaptureFixture
) -> None:
    inject("tensors hidden")
    check = gate(bench, Brought(bench, "new")).refit(1)
    assert check.num_tensors == 0
    assert check.probe_difference is not None and 0 < check.probe_difference < 1e-3  # both compute in float32
    assert "the engine's tensors cannot be read" in caplog.text
    assert "the draft's tensors cannot be read" in caplog.text
    with pytest.raises(RefitError, match=r"engine 0 must hold policy version 2: the logprobs of \d+ probe tokens"):
        gate(bench, Brought(bench, "new", sends="old")).refit(2)
    with pytest.raises(LookupError, match="its backend hides it"):
        gate(bench, Brought(bench, "new"), with_probes=False)


def test_a_draft_that_was_not_refitted_is_named(bench: Bench, inject: Inject) -> None:
    inject("draft not refitted")
    bench.refit("old", 0, "new_draft", 1)
    with pytest.raises(RefitError, match="engine 0 must hold the draft to the last bit"):
        gate(bench, Brought(bench, "old"), draft="new_draft").refit(1)


def test_a_draft_refitted_twice_while_the_policy_was_refitted_once_is_an_error(bench: Bench, inject: Inject) -> None:
    bench.refit("old", 1, "old_draft", 1)
    bench.refit("old", 1, "new_draft", 2)
    result = bench.engine.generate(PROMPTS[:2], sampling=SAMPLING, group_size=2, seed=0)
    with pytest.raises(RuntimeError, match=r"rollouts must come from draft version 1, got \{2\}"):
        assemble(result.groups, [0.0, 1.0] * 2, config=GRPO, policy_version=1, draft_version=1)


def test_a_prefix_cache_that_was_not_reset_is_an_error(bench: Bench, inject: Inject) -> None:
    inject("prefix cache reset skipped")
    with pytest.raises(RefitError, match="engine 0 must reset its prefix cache with every refit"):
        gate(bench, Brought(bench, "old")).refit(1)
