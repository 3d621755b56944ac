"""Real engines and learners at their smallest: what integration tests, fault tests and those of GPUs have in common."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from slipstream.config import from_mapping, merge, to_mapping
from slipstream.drafts.config import DraftConfig
from slipstream.engine.config import EngineConfig, SamplingConfig
from slipstream.engine.protocol import GenerationResult
from slipstream.losslessness.config import LosslessnessConfig
from slipstream.losslessness.sampling import Sample, Subject
from slipstream.losslessness.verdict import certify
from slipstream.ragged import Ragged
from slipstream.recipe import Recipe
from slipstream.records.files import write_record
from slipstream.records.stages import CertificateRecord, TuningRecord
from slipstream.records.steps import ArmRecord, ScheduleEntry
from slipstream.refit.channel import Delivery, Exported, Snapshot
from slipstream.refit.config import EngineState, RefitConfig, WeightFiles
from slipstream.refit.fingerprint import Turn, weight_totals
from slipstream.refit.gate import RefitGate
from slipstream.stages.context import RunContext
from slipstream.types import Arm, Dtype, Prompt


def prompts(rows: Iterable[Iterable[int]]) -> tuple[Prompt, ...]:
    """Prompts of these tokens."""
    return tuple(Prompt(id=str(i), text="", token_ids=tuple(row), answer="1") for i, row in enumerate(rows))


ENGINE = EngineConfig(
    max_model_len=128, max_num_seqs=16, dtype=Dtype.FLOAT32, enforce_eager=True, num_threads=1, kv_cache_gib=0.1
)
SAMPLING = SamplingConfig(temperature=0.8, max_response_tokens=24)
DRAFT = DraftConfig()  # of a policy of four layers, whose last three it reads
PROMPTS = prompts((2, 10 + i, 20, 30 + i) for i in range(4))
CERTIFICATE = LosslessnessConfig(
    num_tokens=4000,
    num_repeated_prompts=2,
    num_repeats=128,
    num_greedy_prompts=4,
    num_replications=20,
    max_detectable_bias=0.5,  # of so few tokens
)
_PROCESS = {"dtype": "float32", "num_threads": 1}
_ENGINE = {"max_model_len": 128, "max_num_seqs": 16, "kv_cache_gib": 0.1, **_PROCESS}
_LEARNER = {"max_tokens_per_microbatch": 512, **_PROCESS}
_REPEATS = {"num_repeated_prompts": 2, "num_repeats": 32, "num_greedy_prompts": 4, "num_replications": 4}
RECIPE: dict[str, Any] = {
    "sampling": {"max_response_tokens": 16},
    "evaluation": {"sampling": {"max_response_tokens": 16}},
    "tuning": {"candidate_ks": [0, 2]},
    "engine": {**_ENGINE, "num_kept_idle": 1},
    "learner": {**_LEARNER, "num_kept_idle": 1},
    "grpo": {"num_steps": 4, "prompts_per_step": 2, "group_size": 4, "checkpoint_every_steps": 2},
    "losslessness": {**_REPEATS, "num_tokens": 400, "max_detectable_bias": 0.99},
}

UNTRACKED: dict[str, Any] = {"uri": "http://127.0.0.1:9", "replay_every_s": 0.1, "close_wait_s": 0.0}
"""A section `tracking`: nothing listens there, points stay in the spool, and no store is set up."""


def run_context(root: Path, execution: str = "e", **values: Any) -> RunContext:
    return RunContext(execution=execution, root=str(root), **values)


def tuned(directory: Path, *entries: tuple[int, int, int], k: int = 3, **values: Any) -> Path:
    """Write what tuning hands on, with a table of (first batch, last batch, k); its directory."""
    table = tuple(ScheduleEntry(batch_from=start, batch_to=end, num_speculative_tokens=k) for start, end, k in entries)
    record = TuningRecord(chosen_k=k, reason="told so", points=(), schedule=table, **values)
    write_record(record, directory / "tuning.json")
    return directory


def replace_in(patch: pytest.MonkeyPatch, module: Any, **fakes: Any) -> None:
    """Put fakes in the place of what a module, or a class, has under their names."""
    for name, fake in fakes.items():
        patch.setattr(module, name, fake)


def draft_with(base: DraftConfig | None = None, /, **values: Any) -> DraftConfig:
    """`base`, or the defaults, with `values` as a recipe's `draft` says them."""
    return from_mapping(DraftConfig, merge({} if base is None else to_mapping(base), values), "draft")


def tokens(result: GenerationResult) -> list[tuple[int, ...]]:
    return [tuple(rollout.token_ids) for group in result.groups for rollout in group.rollouts]


def logprobs(result: GenerationResult) -> np.ndarray:
    """Log-probabilities of all rollouts' tokens in a row."""
    return np.concatenate([rollout.rollout_logprobs for group in result.groups for rollout in group.rollouts])


def require_equal(one: GenerationResult, other: GenerationResult) -> None:
    """Fail unless tokens, log-probabilities and counts of drafts are equal to the last bit."""
    assert tokens(one) == tokens(other)
    assert np.array_equal(logprobs(one), logprobs(other))
    assert one.acceptance == other.acceptance


def exact_logprobs(policy: Any, prompt: Sequence[int], ids: Sequence[int], temperature: float = 1.0) -> np.ndarray:
    """Log-probabilities of the tokens `ids` after a prompt, by a model of transformers."""
    import torch

    sequence = torch.tensor([[*prompt, *ids]])
    with torch.no_grad():
        rows = (policy(sequence).logits[0, len(prompt) - 1 : -1] / temperature).log_softmax(-1)
    return rows.gather(1, sequence[0, len(prompt) :, None])[:, 0].numpy()


def require_logprobs_of(model: Path, result: GenerationResult, *, temperature: float) -> None:
    """Fail unless the rollouts' log-probabilities are those that transformers computes of the model."""
    from transformers import Qwen3ForCausalLM

    policy = Qwen3ForCausalLM.from_pretrained(model)
    for group in result.groups:
        for rollout in group.rollouts:
            exact = exact_logprobs(policy, group.prompt.token_ids, rollout.token_ids, temperature)
            assert np.allclose(exact, rollout.rollout_logprobs, atol=2e-4)


def certified(
    drawn: Sample, baseline: Sample, learner: Any, config: LosslessnessConfig, **how: Any
) -> CertificateRecord:
    """The certificate of a sample: `how` may give `sampling` and what was judged `earlier`."""
    subject = Subject(num_speculative_tokens=3, policy_fingerprint="", draft_fingerprint="", versions={})
    return certify(drawn, baseline, learner, config=config, subject=subject, started_s=0.0, **how)


def gate_of(
    engine: Any, learner: Any, channel: Any, draft: Path | None = None, config: RefitConfig | None = None, **how: Any
) -> RefitGate:
    """The gate of engines whose draft is not trained: `how` may give `probes`."""
    how = {"channel": channel, "draft": draft, "config": config or RefitConfig(), **how}
    return RefitGate(engine, learner, trains_draft=False, **how)


class OneRank:
    """A learner of one rank in this process that holds one policy, asked as the ranks of a driver are."""

    def __init__(self, policy: Path) -> None:
        from slipstream.learner.config import LearnerConfig
        from slipstream.workers.learner_process import LearnerProcess

        self._process = LearnerProcess(LearnerConfig())
        self._process.load(policy, None)

    def conditionals(
        self, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int], sampling: SamplingConfig, *, seed: int
    ) -> Any:
        part = Ragged.of(sequences, np.int32), prompt_lengths
        return np.concatenate(self._process.conditionals(part, sampling, seed=seed))

    def next_token_probabilities(self, prefixes: Sequence[Sequence[int]], sampling: SamplingConfig) -> Any:
        return self._process.next_token_probabilities(Ragged.of(prefixes, np.int32), sampling)

    def token_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[Any]:
        return list(self._process.token_logprobs(Ragged.of(sequences, np.int32)))

    def start_fingerprints(
        self, dtypes: Mapping[str, str], turn: Turn, *, is_draft: bool = False
    ) -> Callable[[], dict[str, int]]:
        assert not is_draft  # it is not trained here
        return lambda: weight_totals([self._process.weight_fingerprints(dtypes, turn)])


class FileChannel:
    """A channel that brings the weights of a file, whatever the learner holds, to an engine."""

    keeps_weights = takes_digest = True

    def __init__(self, engine: Any, model: Path, *, digest: str = "") -> None:
        self.engine, self.path, self._digest = engine, model / "model.safetensors", digest

    def start_export(self, policy_version: int, *, draft_version: int | None = None) -> Callable[[], Exported]:
        assert draft_version is None
        content = self.path.read_bytes()
        digest = self._digest or xxhash.xxh3_64(content).hexdigest()
        policy = Snapshot(path=str(self.path), version=policy_version, digest=digest)
        return lambda: Exported(policy_version=policy_version, policy=policy)

    def start_delivery(self, exported: Exported, *, draft_version: int | None = None) -> Callable[[], Delivery]:
        policy = exported.policy
        assert policy is not None
        states = self.refit(policy_version=policy.version)
        return lambda: Delivery(states=states, digest=policy.digest, origin=policy.path)

    def engines_changed(self) -> None:
        """All engines read where they are told to."""

    def refit(self, *, policy_version: int) -> list[EngineState]:
        return self.engine.refit(WeightFiles(policy=self.path, policy_version=policy_version))


def write_config(path: Path, *, num_layers: int, num_positions: int) -> Path:
    """A model directory without weights: a tokenizer and the config of a Qwen3."""
    from slipstream.data.tokenizer import write_tokenizer

    write_tokenizer(path, max_length=num_positions)
    config: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 64}
    config |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": num_layers, "head_dim": 16}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": num_positions}
    config |= {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False, "eos_token_id": 3}
    (path / "config.json").write_text(json.dumps(config))
    return path


def additions(policy: Path, *, num: int = 8, addend: int = 1) -> list[Prompt]:
    """Prompts in the policy's chat template."""
    from transformers import AutoTokenizer

    from slipstream.data.chat import render
    from slipstream.data.config import DataConfig

    tokenizer = AutoTokenizer.from_pretrained(policy)
    texts = [f"{i}+{addend}=?" for i in range(num)]
    config = DataConfig(max_prompt_tokens=64)
    ids = [render(text, config=config, tokenizer=tokenizer) for text in texts]
    return [Prompt(id=text, text=text, token_ids=own, answer="1") for text, own in zip(texts, ids, strict=True)]


def odd_sum(prompt: Sequence[int], ids: Sequence[int]) -> str:
    """A right answer for about half of what an untrained policy says, none of which would earn a reward."""
    return "\\boxed{1}" if sum(ids) % 2 else ""


def train_arm(
    recipe: Recipe,
    policy: Path,
    directory: Path,
    *,
    prompts: Sequence[Prompt] = (),
    k: int = 0,
    draft: Path | None = None,
    schedule: Sequence[ScheduleEntry] = (),
    within: Callable[[Any], Any] = lambda engines: engines,
    log: Callable[[Mapping[str, float], int], None] = lambda metrics, step: None,
) -> ArmRecord:
    """Train the speculative arm of a draft, or the autoregressive one, on engines that `within` may wrap."""
    from slipstream.drafts.methods import speculative_config
    from slipstream.train.arm import ArmPlan, Run
    from slipstream.workers import engines

    speculative = speculative_config(recipe.draft, draft, k, schedule=tuple(schedule)) if k else None
    how = {"config": recipe.engine, "speculative_config": speculative, "layout": recipe.layout}

    @contextmanager
    def start_engine() -> Iterator[Any]:
        with engines.start_engine(policy, **how, kv_cache=recipe.loop.in_flight_kv_cache) as started:
            yield within(started)

    directory.mkdir(parents=True, exist_ok=True)
    arm = Arm.SPECULATIVE if k else Arm.AUTOREGRESSIVE
    plan: dict[str, Any] = {"num_speculative_tokens": k, "draft": draft, "schedule": tuple(schedule)}
    return Run(
        recipe=recipe,
        plan=ArmPlan(arm=arm, start_engine=start_engine, **plan),
        policy=policy,
        prompts=list(prompts) or additions(policy),
        decode=odd_sum,
        directory=directory,
        log=log,
    ).train()
