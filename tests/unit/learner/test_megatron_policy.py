"""The learner on one CPU rank, against transformers and against itself."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from slipstream.grpo.config import Correction, Level, LossConfig, LossKind, OptimizerConfig, OptimizerMethod
from slipstream.grpo.update import part_of
from slipstream.learner import optimizer as optimizers
from slipstream.learner import packing
from slipstream.learner.batches import Batching, forward, label_counts
from slipstream.learner.config import Packing, Recompute
from slipstream.learner.cpu import host
from slipstream.learner.cpu.layer import CpuTransformerLayer
from slipstream.learner.megatron import Capture, MegatronPolicy
from slipstream.learner.policy_source import learning_rate_at, pretrain
from slipstream.records.steps import TrainStats
from slipstream.types import Dtype
from tests.unit.learner import families, policies
from tests.unit.learner.policies import LEARNER, OPTIMIZER, SCRATCH, VOCAB, new_policy, random_sequences, update_of

BY_SEQUENCE = LossConfig(correction=Correction.SEQUENCE, truncated_importance_sampling=1e3)


def _train(policy: MegatronPolicy, steps: Sequence[int]) -> list[TrainStats]:
    return [policy.train_step(update_of(policy, seed=step)).stats for step in steps]


@pytest.mark.parametrize(("dtype", "chunk"), [(Dtype.FLOAT32, None), (Dtype.BFLOAT16, None), (Dtype.BFLOAT16, 7)])
def test_the_first_update_is_exactly_on_policy(dtype: Dtype, chunk: int | None) -> None:
    policy = new_policy(dtype=dtype, logprob_chunk_tokens=chunk)
    update = update_of(policy, kl_coefficient=0.1)
    stats = policy.train_step(update).stats
    # Ratios of exactly 1 make the loss minus the mean advantage, and k3 to oneself is 0.
    lengths = [len(row) for row in update.batch.rollout_logprobs]
    expected = -float(np.dot(update.batch.advantages, lengths)) / sum(lengths)
    assert stats.loss == pytest.approx(expected, abs=1e-6)
    assert (stats.kl, stats.clip_fraction, stats.num_tokens, policy.version) == (0.0, 0.0, sum(lengths), 1)
    assert stats.grad_norm > 0


def test_a_gradient_that_is_not_finite_stops_the_run() -> None:
    policy = new_policy()
    with pytest.raises(FloatingPointError, match=r"^the gradient of update 1 is not finite: (nan|inf)$"):
        policy.train_step(update_of(policy, advantages=[float("inf"), *[0.5] * 8]))


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
@pytest.mark.parametrize(
    "loss",
    [
        LossConfig(),
        LossConfig(truncated_importance_sampling=1.2),
        replace(BY_SEQUENCE, mask_band=(0.5, 1.4), mask_level=Level.SEQUENCE),
    ],
    ids=["uncorrected", "by token", "by sequence, masked"],
)
def test_an_update_without_logprobs_takes_its_own_and_is_the_same_to_the_last_bit(
    dtype: Dtype, loss: LossConfig
) -> None:
    """What `grpo.recompute_logprobs: auto` rests on, with and without a correction for the engine."""
    given, own = new_policy(dtype=dtype), new_policy(dtype=dtype)
    for step in range(3):
        update = update_of(given, seed=step)
        logprobs = update.trainer_logprobs
        assert logprobs is not None
        # Ratios of 1.20 to 1.49: the later ones lie outside the band, and the products stay below the cap.
        rollout = tuple(tuple((row - 0.18 - 0.02 * number).tolist()) for number, row in enumerate(logprobs))
        update = replace(update, batch=replace(update.batch, rollout_logprobs=rollout), loss=loss)
        expected = given.train_step(update)
        found = own.train_step(replace(update, trainer_logprobs=None))
        assert (found.stats, expected.own_logprobs) == (expected.stats, None)
        assert found.own_logprobs is not None
        for row, other in zip(found.own_logprobs, logprobs, strict=True):
            np.testing.assert_array_equal(row, other)
    assert policies.same_weights(given, own)


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
def test_muon_steps_layers_orthogonally_and_adamw_the_rest(dtype: Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """It iterates in the learner's type, for only some processors multiply bfloat16 fast."""
    rate, seen, genuine = 1e-2, set[torch.dtype](), optimizers.orthogonal
    monkeypatch.setattr(optimizers, "orthogonal", lambda given, **how: seen.add(how["dtype"]) or genuine(given, **how))
    policy = new_policy(optimizer=OptimizerConfig(method=OptimizerMethod.MUON, learning_rate=rate), dtype=dtype)
    before = {name: weight.clone() for name, weight in policy.weights()}
    policy.lm_step(random_sequences(), [1] * 9)
    moved = {name: (weight - before[name]).float() for name, weight in policy.weights()}
    assert seen == {torch.float32 if dtype is Dtype.FLOAT32 else torch.bfloat16}
    update = moved["model.layers.0.self_attn.o_proj.weight"]
    gains = torch.linalg.svdvals(update) / (rate * 0.2 * max(update.shape) ** 0.5)
    assert gains.min() > 0.2 and gains.max() < 1.5  # as near to orthogonal as three iterations bring it
    for name in ("model.norm.weight", "lm_head.weight"):
        # AdamW's first step is the learning rate, with a sign; a bfloat16 near 1 is known to 0.004.
        assert moved[name].abs().max() == pytest.approx(rate, abs=5e-4 if dtype is Dtype.FLOAT32 else 4e-3), name


@pytest.mark.parametrize("kind", LossKind)
def test_microbatching_and_packing_change_no_gradient_beyond_rounding(kind: LossKind) -> None:
    """Responses of mean ratios from 0.88 to 1.08, some of which each kind clips."""

    def trained(**change: Any) -> list[TrainStats]:
        policy, stats = new_policy(**change), []
        for step in range(2):
            update = update_of(policy, seed=step)
            before = [row + 0.125 - 0.025 * number for number, row in enumerate(update.trainer_logprobs or ())]
            loss = LossConfig(kind=kind, clip_low=0.05, clip_high=0.05)
            update = replace(update, trainer_logprobs=before, loss=loss, max_response_tokens=32)
            stats.append(policy.train_step(update).stats)
        return stats

    whole = trained(max_tokens_per_microbatch=512)
    assert (whole[0].clip_fraction > 0) == (kind is not LossKind.RLOO)
    for other in (trained(max_tokens_per_microbatch=30), trained(packing=Packing.ALWAYS)):
        for a, b in zip(whole, other, strict=True):
            assert a.loss == pytest.approx(b.loss, rel=1e-5, abs=1e-6)
            assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-5)
            assert a.clip_fraction == b.clip_fraction


@pytest.mark.parametrize("kind", LossKind)
def test_an_update_is_one_without_the_responses_that_do_not_count(kind: LossKind) -> None:
    policy, other = new_policy(), new_policy()
    loss = LossConfig(kind=kind, clip_low=0.05, clip_high=0.05)
    whole = replace(update_of(policy), loss=loss, max_response_tokens=32)
    expected = other.train_step(part_of(whole, [0, 2, 3, 5, 6, 7])).stats
    counts = [index not in (1, 4, 8) for index in range(9)]
    found = policy.train_step(replace(whole, batch=replace(whole.batch, counts=counts))).stats
    assert replace(found, entropy=None) == replace(
        expected,
        entropy=None,
        num_all_tokens=sum(label_counts(whole.batch.token_ids, whole.batch.prompt_lengths)),
        num_computed_tokens=found.num_computed_tokens,
        loss=pytest.approx(expected.loss, rel=1e-5, abs=1e-6),
        grad_norm=pytest.approx(expected.grad_norm, rel=1e-5),
    )
    nothing = policy.train_step(replace(whole, batch=replace(whole.batch, counts=[False] * 9))).stats
    assert (nothing.loss, nothing.grad_norm) == (0.0, 0.0)


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
@pytest.mark.parametrize("method", list(OptimizerMethod))
@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "split"])
def test_a_resumed_policy_goes_on_bit_for_bit(
    method: OptimizerMethod, dtype: Dtype, is_split: bool, tmp_path: Path
) -> None:
    learner = replace(LEARNER, dtype=dtype, distributed_optimizer=is_split)
    optimizer = replace(OPTIMIZER, method=method, warmup_steps=4)
    policy = new_policy(learner=learner, optimizer=optimizer)
    _train(policy, range(2))
    policy.save_checkpoint(tmp_path / "checkpoint", {"position": 7})  # written while the policy learns on
    uninterrupted = _train(policy, range(2, 5))

    policy.finish_checkpoint()
    fresh = new_policy(replace(SCRATCH, seed=99), learner, optimizer)
    assert fresh.load_checkpoint(tmp_path / "checkpoint") == {"position": 7}
    assert fresh.version == 2
    assert _train(fresh, range(2, 5)) == uninterrupted
    assert policies.same_weights(policy, fresh)


def test_an_update_equals_torchs_on_transformers(tmp_path: Path) -> None:
    policy = new_policy(optimizer=replace(OPTIMIZER, weight_decay=0.0, clip_grad=0.5))
    hf = Qwen3ForCausalLM.from_pretrained(policies.save(policy, tmp_path), dtype=torch.float32)
    adam = torch.optim.AdamW(hf.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(3):
        sequences = random_sequences(seed=step)
        expected, norm = policies.torch_step(hf, adam, sequences, 4)
        assert norm > 0.5  # so that clipping is part of what is compared
        assert policy.lm_step(sequences, [4] * len(sequences)) == pytest.approx(expected, abs=1e-5)
    policies.require_close(policy, dict(hf.named_parameters()), atol=1e-5)


def test_pretraining_learns_a_pattern() -> None:
    policy = new_policy()
    documents = [(tuple((start + i) % VOCAB for i in range(20)), 4) for start in range(VOCAB)]
    optimizer = replace(SCRATCH.optimizer, learning_rate=1e-2, warmup_steps=5)
    config = replace(SCRATCH, num_steps=60, tokens_per_step=200, optimizer=optimizer)
    losses = pretrain(policy.lm_step, itertools.cycle(documents), config)
    assert losses[0] == pytest.approx(np.log(VOCAB), abs=0.2)
    assert losses[-1] < 0.3
    assert (len(losses), policy.version) == (60, 0)


def test_pretraining_warms_up_then_decays_towards_zero() -> None:
    optimizer = replace(SCRATCH.optimizer, learning_rate=1.0, warmup_steps=2)
    config = replace(SCRATCH, num_steps=12, optimizer=optimizer)
    assert [learning_rate_at(step, config) for step in (0, 1, 2, 11)] == pytest.approx([0.5, 1.0, 1.0, 0.1])


def test_documents_that_end_and_a_response_without_a_token_are_refused() -> None:
    policy = new_policy()
    with pytest.raises(ValueError, match="ended after 1 of 30"):
        pretrain(policy.lm_step, iter([((1, 2, 3), 0)]), SCRATCH)
    with pytest.raises(ValueError, match="sequence 1 must have a prompt and a response, got 2 of 2 tokens"):
        policy.logprobs([[1, 2, 3], [1, 2]], [1, 2], 1.0)


@pytest.mark.parametrize(("name", "ragged"), [("qwen3", False), ("yarn", True), ("qwen2", True), ("smollm2", True)])
def test_the_cpu_layer_is_megatrons_in_value_and_gradient(
    name: str, ragged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    families.write_model(tmp_path, name, initializer_range=0.04)
    monkeypatch.setattr(packing, "_RECTANGLE_COST", 100)
    lengths = [29, 27, 12, 11, 5, 4] if ragged else [20] * 6
    assert len(packing.plan_rectangles(lengths)) == (4 if ragged else 1)
    width = max(lengths)
    policy = MegatronPolicy.load(tmp_path, learner=LEARNER, optimizer=None)
    layer = policy._gpt.decoder.layers[1]
    assert type(layer) is CpuTransformerLayer
    padding_BT = torch.arange(width) >= torch.tensor(lengths).unsqueeze(1)
    real_TB = ~padding_BT.t()
    x_TBH = torch.randn(width, len(lengths), policy.architecture.hidden_size, requires_grad=True)
    upstream = torch.randn(int(real_TB.sum()), policy.architecture.hidden_size)
    with host.cuda_as_cpu():
        angles = policy._gpt.rotary_pos_emb(width)

    def outcome() -> tuple[torch.Tensor, ...]:
        with host.cuda_as_cpu():
            out, _ = layer(hidden_states=x_TBH, attention_mask=None, rotary_pos_emb=angles, padding_mask=padding_BT)
        real = out[real_TB]
        return real, *torch.autograd.grad(real, (x_TBH, *layer.parameters()), upstream)

    ours = outcome()
    monkeypatch.delattr(CpuTransformerLayer, "forward")  # leaves that of Megatron
    for got, want in zip(ours, outcome(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


_FAMILY = (  # a group of rollouts and another one: equal ones, a prefix of another, and a shared prompt
    *((4, 5, 6, 7, 8, 9), (4, 5, 6, 7, 8), (4, 5, 6, 7, 8, 9), (4, 5, 6, 2)),
    *((4, 5, 3, 3, 1), (9, 5, 6, 7), (9, 5, 6, 7)),
)


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL])
def test_a_shared_token_is_computed_once_and_taught_by_all(
    recompute: Recompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    different = {tokens[:end] for tokens in _FAMILY for end in range(1, len(tokens) + 1)}
    inputs = {tokens[:end] for tokens in _FAMILY for end in range(1, len(tokens))}
    computed: set[int] = set()
    linear = torch.nn.functional.linear

    def counting(rows: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        computed.add(len(rows))
        return linear(rows, *others)

    monkeypatch.setattr(torch.nn.functional, "linear", counting)

    def outcome() -> list[torch.Tensor]:
        policy = new_policy(recompute=recompute)
        states = policy.hidden_states(_FAMILY, [0, 1, 2])
        trained = policy.train_step(update_of(policy, _FAMILY))
        assert trained.stats.num_computed_tokens == len(inputs)
        rows = policy.logprobs(_FAMILY, [2] * len(_FAMILY), 1.0)
        found = [torch.tensor(trained.stats.grad_norm), *(torch.from_numpy(row) for row in rows)]
        return [*found, *(part for both in states for part in both), *(weight for _, weight in policy.weights())]

    ours = outcome()
    assert computed == {len(different), len(inputs)}  # of states, and of what predicts
    monkeypatch.delattr(CpuTransformerLayer, "forward")  # leaves that of Megatron, which computes every token
    for got, want in zip(ours, outcome(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width", [53, 64])
def test_the_cpu_layers_bits_do_not_depend_on_the_number_of_threads(width: int) -> None:
    """Large enough to be shared out; torch's own gradient of a softmax fails this at a width of 53 with AVX2."""
    policy = new_policy(replace(SCRATCH, max_position_embeddings=width))
    layer = policy._gpt.decoder.layers[1]
    x_TBH = torch.randn(width, 24, SCRATCH.shape.hidden_size, requires_grad=True)
    upstream = torch.randn_like(x_TBH)
    with host.cuda_as_cpu():
        angles = policy._gpt.rotary_pos_emb(width)
    threads, outcomes = torch.get_num_threads(), []
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            with host.cuda_as_cpu():
                out, _ = layer(hidden_states=x_TBH, attention_mask=None, rotary_pos_emb=angles)
            outcomes.append((out, *torch.autograd.grad(out, x_TBH, upstream)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, other) for one, other in zip(*outcomes, strict=True))


@pytest.mark.parametrize("is_cpu_layer", [True, False], ids=["the CPU's layer", "Megatron's"])
@pytest.mark.parametrize("recompute", [Recompute.SELECTIVE, Recompute.FULL])
def test_what_is_computed_anew_for_the_gradient_is_what_was_not_kept(
    recompute: Recompute, is_cpu_layer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_cpu_layer:
        monkeypatch.delattr(CpuTransformerLayer, "forward")  # leaves that of Megatron
    kept, anew = new_policy(), new_policy(recompute=recompute)
    assert _train(anew, range(3)) == _train(kept, range(3))
    assert policies.same_weights(kept, anew)


@pytest.mark.parametrize(("recompute", "share"), [(Recompute.SELECTIVE, 0.7), (Recompute.FULL, 0.2)])
def test_recomputing_keeps_less_for_the_gradient(recompute: Recompute, share: float) -> None:
    def kept_bytes(recompute: Recompute) -> int:
        """Of the different tensors that a forward pass keeps."""
        policy, held = new_policy(recompute=recompute), {}
        inputs = Batching(max_tokens=60).inputs(torch.randint(0, VOCAB, (2, 30)).tolist(), policy.device)
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: held.setdefault(x.data_ptr(), x), lambda x: x)
        with host.cuda_as_cpu(), hooks:
            forward(policy._gpt, inputs)
        parameters = {parameter.data_ptr() for parameter in policy._gpt.parameters()}
        return sum(tensor.nbytes for at, tensor in held.items() if at not in parameters)

    assert kept_bytes(recompute) < share * kept_bytes(Recompute.NONE)


@pytest.mark.parametrize("recompute", Recompute)
@pytest.mark.parametrize("chunk", [None, 7])
def test_packed_sequences_are_computed_as_padded_ones_are(recompute: Recompute, chunk: int | None) -> None:
    outcomes = []
    for packed in (Packing.NEVER, Packing.ALWAYS):
        policy = new_policy(logprob_chunk_tokens=chunk, recompute=recompute, packing=packed)
        own = update_of(policy, kl_coefficient=0.1)
        batch, logprobs = own.batch, own.trainer_logprobs
        assert logprobs is not None
        states = [tensor for pair in policy.hidden_states(batch.token_ids, [0, 2, 1]) for tensor in pair]
        chosen = policy.map_logits(
            batch.token_ids, batch.prompt_lengths, lambda logits, labels: logits.gather(1, labels[:, None]), width=1
        )
        capture = Capture([1])
        trained = policy.train_step(replace(own, trainer_logprobs=None), capture=capture)
        assert trained.own_logprobs is not None
        captured = [tensor for states in capture.states for tensor in states]
        weights = [tensor.clone() for _, tensor in policy.weights()]
        counted = replace(trained.stats, num_computed_tokens=0)  # padded ones share prefixes
        stats = torch.tensor(list(dataclasses.astuple(counted)), dtype=torch.float64)
        rows = [torch.tensor(row) for row in [*logprobs, *trained.own_logprobs]]
        outcomes.append([stats, torch.tensor(chosen), *rows, *states, *captured, *weights])
    assert len(policy._microbatches(random_sequences(), [3] * 9)) == 3  # of at most 64 tokens
    for expected, got in zip(*outcomes, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-5)


def test_an_optimizer_split_over_one_rank_makes_the_same_updates() -> None:
    whole, split = (_train(new_policy(distributed_optimizer=is_split), range(3)) for is_split in (False, True))
    for one, other in zip(whole, split, strict=True):
        assert dataclasses.asdict(other) == pytest.approx(dataclasses.asdict(one), rel=1e-5, abs=1e-7)
