"""An engine of two ranks on CPUs (gloo, a process a rank, the core in ours): rollouts, refit and its gate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.drafts.config import DraftConfig
from slipstream.drafts.methods import speculative_config
from slipstream.engine.config import EngineConfig, SamplingConfig
from slipstream.engine.protocol import GenerationResult
from slipstream.learner.config import LearnerConfig
from slipstream.ragged import Ragged
from slipstream.refit.channel import Delivery, Exported, open_channel, send
from slipstream.refit.config import Channel, RefitConfig, RefitError
from slipstream.refit.fingerprint import ALL, Turn, weight_totals
from slipstream.refit.gate import RefitGate
from slipstream.refit.snapshot import Snapshot, bytes_digest
from slipstream.types import Dtype, Prompt

pytestmark = pytest.mark.slow

DRAFT = DraftConfig(aux_hidden_state_layer_ids=(1, 2, 3))
ENGINE = EngineConfig(
    max_model_len=128,
    max_num_seqs=16,
    dtype=Dtype.FLOAT32,
    enforce_eager=True,
    num_threads=1,
    kv_cache_gib=0.1,
    tensor_parallel_size=2,
)
SAMPLING = SamplingConfig(temperature=0.8, max_response_tokens=16)
PROMPTS = tuple(Prompt(id=str(i), text="", token_ids=(2, 10 + i, 20, 30 + i), answer="") for i in range(4))


@pytest.fixture(scope="module")
def models(
    tmp_path_factory: pytest.TempPathFactory,
    make_policy: Callable[[Path, int], Path],
    make_draft: Callable[[Path, Path, int], Path],
) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    policies = {name: make_policy(root / name, seed) for name, seed in (("old", 0), ("new", 1))}
    return policies | {"draft": make_draft(root / "draft", policies["old"], 5)}


@pytest.fixture(scope="module")
def engine(models: dict[str, Path], ray_session: None) -> Iterator[Any]:
    from slipstream.workers.engines import start_engine

    draft = speculative_config(DRAFT, models["draft"], 3)
    with start_engine(models["old"], config=ENGINE, speculative_config=draft) as engine:
        yield engine


class Publisher:
    """A learner that holds the new policy, and a channel that brings it or another."""

    def __init__(self, engine: Any, models: dict[str, Path], sends: str) -> None:
        from slipstream.workers.learner_process import LearnerProcess

        self.engine = engine
        self.path = models[sends] / "model.safetensors"
        self.process = LearnerProcess(LearnerConfig())
        self.process.load(models["new"], None)

    keeps_weights = takes_digest = True

    def start_export(self, policy_version: int, *, draft_version: int | None = None) -> Callable[[], Exported]:
        import torch

        assert draft_version is None
        content = self.path.read_bytes()
        digest = bytes_digest([torch.tensor(list(content)).byte()])
        policy = Snapshot(path=str(self.path), version=policy_version, num_bytes=len(content), digest=digest)
        return lambda: Exported(policy_version=policy_version, policy=policy)

    def start_delivery(self, exported: Exported, *, draft_version: int | None = None) -> Callable[[], Delivery]:
        policy = exported.policy
        assert policy is not None
        states = self.engine.start_refit(self.path, policy_version=policy.version)
        return lambda: Delivery(states=states(), digest=policy.digest, num_bytes=policy.num_bytes, origin=policy.path)

    def engines_changed(self) -> None:
        """All engines read where they are told to."""

    def start_fingerprints(
        self, dtypes: Mapping[str, str], turn: Turn, *, is_draft: bool = False
    ) -> Callable[[], dict[str, int]]:
        assert not is_draft  # it is not trained here
        return lambda: weight_totals([self.process.weight_fingerprints(dtypes, turn)])

    def token_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[Any]:
        return list(self.process.token_logprobs(Ragged.of(sequences, np.int64)))


def gate(engine: Any, publisher: Any, draft: Path) -> RefitGate:
    return RefitGate(
        engine, publisher, channel=publisher, trains_draft=False, draft=draft, config=RefitConfig(), probes=()
    )


def test_rollouts_are_the_policys_before_and_after_a_refit_through_the_gate(
    engine: Any, models: dict[str, Path]
) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import Qwen3ForCausalLM

    results = {"old": engine.generate(PROMPTS, sampling=SAMPLING, group_size=4, seed=1)}
    again = engine.generate(PROMPTS[::-1], sampling=SAMPLING, group_size=4, seed=1)
    assert [group.rollouts for group in again.groups[::-1]] == [group.rollouts for group in results["old"].groups]
    check = gate(engine, Publisher(engine, models, "new"), models["draft"]).refit(1)
    files = [models[name] / "model.safetensors" for name in ("new", "draft")]
    assert check.num_tensors == sum(len(load_file(file)) for file in files)
    results["new"] = engine.generate(PROMPTS, sampling=SAMPLING, group_size=4, seed=1)
    for name, result in results.items():
        assert result.acceptance is not None and result.acceptance.num_drafts > 0
        model = Qwen3ForCausalLM.from_pretrained(models[name])
        for group in result.groups:
            for rollout in group.rollouts:
                tokens = torch.tensor([[*group.prompt.token_ids, *rollout.token_ids]])
                with torch.no_grad():
                    logprobs = (model(tokens).logits[0, :-1] / SAMPLING.temperature).log_softmax(-1)
                start = len(group.prompt.token_ids) - 1
                own = logprobs[start:].gather(1, tokens[0, start + 1 :, None])[:, 0]
                assert np.allclose(own.numpy(), rollout.rollout_logprobs, atol=2e-4)


def test_the_gate_names_a_shard_of_another_policy(engine: Any, models: dict[str, Path]) -> None:
    with pytest.raises(RefitError, match=r"must hold policy version 2 to the last bit: \d+ of \d+ tensors differ"):
        gate(engine, Publisher(engine, models, "old"), models["draft"]).refit(2)


def test_both_ranks_cut_their_shards_from_what_comes_over_gloo(engine: Any, models: dict[str, Path]) -> None:
    """A learner of one rank sends whole tensors of policy and draft, in buckets that end inside of them."""
    from slipstream.workers.learners import start_learner

    results, held = {}, {}
    with start_learner(LearnerConfig(dtype=Dtype.FLOAT32, num_threads=1)) as learner:
        learner.load(models["new"], None)
        learner.start_draft(models["new"], DRAFT)
        for version, channel in enumerate((Channel.SHARED_MEMORY, Channel.GLOO), start=1):
            engine.refit(models["old"], policy_version=0, draft=models["draft"])
            config = RefitConfig(channel=channel, bucket_mib=0.02, timeout_s=60.0)
            with open_channel(config, learner, engine) as opened:
                delivery = send(opened, version, draft_version=version)
            (state,) = delivery.states
            assert (state.policy_digest, state.draft_digest) == (delivery.digest, delivery.draft_digest)
            held[channel] = [engine.start_fingerprints(is_draft=is_draft, turn=ALL)() for is_draft in (False, True)]
            results[channel] = engine.generate(PROMPTS, sampling=SAMPLING, group_size=4, seed=1)
    shared, gloo = results[Channel.SHARED_MEMORY], results[Channel.GLOO]
    assert held[Channel.GLOO] == held[Channel.SHARED_MEMORY]
    assert _drawn(gloo) == _drawn(shared)
    assert gloo.acceptance == shared.acceptance


def _drawn(result: GenerationResult) -> list[tuple[Sequence[int], Sequence[float]]]:
    return [(rollout.token_ids, rollout.rollout_logprobs) for group in result.groups for rollout in group.rollouts]
