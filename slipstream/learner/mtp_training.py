"""The MTP layer of a MiMo, which predicts the token after the next, and its training.

Megatron's `MultiTokenPredictionBlock` computes another function: it reads the states after the final norm where MiMo
reads those before the norm, concatenates embedding and state in the other order, and shows the first position its
token. So only the transformer layer inside is Megatron's `TransformerLayer`.

The layer learns from detached hidden states of the policy, so no gradient reaches the policy. The layer has its own
gradient buffers, optimizer and gradient clipping; it reads the policy's embeddings and output layer without training
them.

Legend: `T` tokens, `B` sequences of a micro-batch, `N` selected or drafted tokens, `H` hidden size, `V` this rank's
part of the vocabulary. A window is the sequence of tokens drafted from one position; pass `i` drafts token `i` of every
window, at the position `i` later.

Source: vLLM's `mimo_mtp.py`, which follows XiaomiMiMo/MiMo-7B-RL.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slipstream.grpo.config import OptimizerConfig
from slipstream.learner import parallel
from slipstream.learner.architecture import Architecture
from slipstream.learner.batches import Batching, MicroBatch, Sequences
from slipstream.learner.checkpoint import CheckpointError
from slipstream.learner.checkpoint.policy import MAIN, held_parameters
from slipstream.learner.config import LearnerConfig
from slipstream.learner.cpu import host
from slipstream.learner.logprobs import largest, output_weight
from slipstream.learner.optimizer import Training
from slipstream.learner.weights import hf_from_shards, mtp_mappings, shard_from_hf

_NUM_UPDATES = "num_updates"
States = Sequence[tuple[Tensor, Tensor]]
"""For each sequence the residual stream after the last layer, before the final norm, and the output layer's input."""


class MtpLayer(MegatronModule):
    """Layer from a hidden state and the token that follows it to the state that predicts the token after that one."""

    def __init__(self, config: TransformerConfig, *, norm: Any, layer: ModuleSpec) -> None:
        """Build the layer with undefined weights; `norm` and `layer` are the specs of the model's own layers."""
        super().__init__(config=config)
        sizes = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.token_layernorm = build_module(norm, **sizes)
        self.hidden_layernorm = build_module(norm, **sizes)
        # Not split over ranks, as in vLLM, because every rank has whole states.
        hidden = config.hidden_size
        self.input_proj = torch.nn.Linear(2 * hidden, hidden, bias=False, dtype=config.params_dtype)
        self.layer = build_module(layer, config=config)
        self.final_layernorm = build_module(norm, **sizes)

    def forward(
        self,
        states_TBH: Tensor,
        embeddings_TBH: Tensor,
        *,
        positions_BT: Tensor,
        angles_S11D: Tensor,
        packed: PackedSeqParams | None = None,
    ) -> Tensor:
        """Compute the output layer's input, [T, B, H].

        Args:
            states_TBH: the residual stream of each position after the last layer, before the final norm; to draft
                further, this function's output for the position before.
            embeddings_TBH: embedding of the token that follows each position; position 0 does not read it.
            positions_BT: positions of the states: 0, 1, … within each sequence.
            angles_S11D: angles of the rotary embedding of each token, or of positions 0, 1, … if every row starts
                there.
        """
        is_first_TB1 = (positions_BT == 0).t().unsqueeze(-1)
        tokens_TBH = self.token_layernorm(embeddings_TBH.masked_fill(is_first_TB1, 0.0))
        joined = torch.cat([self.hidden_layernorm(states_TBH), tokens_TBH], dim=-1)
        mixed_TBH, _ = self.layer(
            self.input_proj(joined), attention_mask=None, rotary_pos_emb=angles_S11D, packed_seq_params=packed
        )
        return self.final_layernorm(mixed_TBH)


def soft_cross_entropy(logits_NV: Tensor, targets_NV: Tensor) -> Tensor:
    """Compute -sum over the whole vocabulary of p log q in nats, [N], from this rank's logits of q and targets p."""
    normalizer_N = _log_normalizer(logits_NV)
    dot_N = cast(Tensor, reduce_from_tensor_model_parallel_region((targets_NV * logits_NV).sum(-1)))
    return normalizer_N - dot_N


def probabilities(logits_NV: Tensor) -> Tensor:
    """Compute this rank's part [N, V] of the softmax over the whole vocabulary."""
    return (logits_NV - _log_normalizer(logits_NV)[:, None]).exp()


def logits_of(hidden_NH: Tensor, weight_VH: Tensor, temperature: float) -> Tensor:
    """Compute this rank's part [N, V] of the logits in float32.

    The gradient of the states covers all ranks' parts; the weight gets no gradient.
    """
    whole_NH = cast(Tensor, copy_to_tensor_model_parallel_region(hidden_NH))
    return (whole_NH @ weight_VH.detach().t()).float() / temperature


def _log_normalizer(logits_NV: Tensor) -> Tensor:
    """Compute log sum exp of the logits over the whole vocabulary, [N]."""
    largest_N = largest(logits_NV.detach())
    mass_N = (logits_NV - largest_N[:, None]).exp().sum(-1)
    return largest_N + cast(Tensor, reduce_from_tensor_model_parallel_region(mass_N)).log()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chats:
    """Micro-batch with the policy's hidden states."""

    batch: MicroBatch  # the labels are the tokens that follow each position
    states_TBH: Tensor
    last_TBH: Tensor  # after the final norm
    has_target_BT: Tensor  # True where the policy's distribution after the following token is known

    def drafts(self, index: int) -> Tensor:
        """Mark the positions [B, T] of token `index` of every window whose first token follows a response token."""
        mask_BT = self.batch.mask_BT.roll(index, 1) & (self.batch.inputs.positions_BT >= index)
        return mask_BT & self.has_target_BT


class MtpTrainer:
    """Gradient buffers and optimizer of the MTP layer of one policy; every rank calls each method."""

    def __init__(
        self,
        gpt: GPTModel,
        mtp: MtpLayer,
        *,
        architecture: Architecture,
        learner: LearnerConfig,
        optimizer: OptimizerConfig,
        batching: Batching,
    ) -> None:
        self._gpt, self._mtp, self._batching, self._device = gpt, mtp, batching, parallel.device()
        self._chunk_tokens = learner.logprob_chunk_tokens
        # The moments of a single layer are too small to be distributed over ranks.
        self._training = Training(mtp, replace(learner, distributed_optimizer=False), optimizer)
        self.memory = self._training.memory
        self._architecture, self._shard = architecture, parallel.current_shard()
        self._held = held_parameters(mtp, self._training.optimizer, mtp_mappings(architecture))
        self.num_updates = 0

    def step(
        self,
        sequences: Sequences,
        loss_starts: Sequence[int],
        states: States,
        *,
        learning_rate: float,
        temperature: float = 1.0,
        num_passes: int = 1,
        decay: float = 1.0,
    ) -> float:
        """Do one optimizer update; each data-parallel rank passes its share of the sequences.

        Args:
            loss_starts: index of each response's first token, which the policy samples; later tokens are drafted.
            states: hidden states of each token; those of the last token are not needed.
            num_passes: number of tokens to draft from one position.
            decay: factor on the loss from one pass to the next.
        Returns:
            Weighted sum over the passes of the mean KL(policy || draft) of a drafted token, in nats.
        Raises:
            FloatingPointError: the gradient is not finite.
        """
        chats = list(self._chats(sequences, loss_starts, states))
        weights = [decay**index for index in range(num_passes)]
        num_tokens = parallel.sum_over_data_ranks(sum(int(each.drafts(0).sum()) for each in chats))
        self._training.begin(learning_rate=learning_rate)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for each in chats:
            with host.cuda_as_cpu(), host.model_arithmetic():
                loss = self._loss(each, temperature, weights) / max(num_tokens, 1)
                loss.backward()
                total += loss.detach()
        with host.cuda_as_cpu():
            self._training.module.finish_grad_sync()
        grad_norm = self._training.step()
        self.num_updates += 1
        if not math.isfinite(grad_norm):
            raise FloatingPointError(f"the MTP layer's gradient must be finite, got {grad_norm}")
        return float(parallel.summed_over_data_ranks(total))

    @torch.no_grad()
    def evaluate(
        self,
        sequences: Sequences,
        loss_starts: Sequence[int],
        states: States,
        *,
        num_tokens: int,
        temperature: float = 1.0,
    ) -> tuple[list[float], float]:
        """Compute the acceptance of drafted windows of `num_tokens` under rejection sampling.

        Returns:
            Over all data-parallel ranks, the mean over windows of sum_v min(p(v), q(v)) by position, and the mean
            acceptance length: 1 + the sum over positions of the product of those probabilities up to the position.
        """
        # Acceptance probability of each position, product up to each position, number of windows.
        sums = torch.zeros(2 * num_tokens + 1, dtype=torch.float64, device=self._device)
        for each in self._chats(sequences, loss_starts, states):
            with host.cuda_as_cpu(), host.model_arithmetic():
                chances_KW = self._chances(each, num_tokens, temperature).double()
            sums[:num_tokens] += chances_KW.sum(1)
            sums[num_tokens:-1] += chances_KW.cumprod(0).sum(1)
            sums[-1] += chances_KW.shape[1]
        means = parallel.summed_over_data_ranks(sums)
        means = means / means[-1]
        return means[:num_tokens].tolist(), 1.0 + float(means[num_tokens:-1].sum())

    def state(self) -> dict[str, Tensor]:
        """Gather the state that the next update depends on, independent of the layout; tensors may share its memory."""
        self.memory.onload()
        found = {_NUM_UPDATES: torch.tensor([self.num_updates])}
        for held in self._held:
            assert held.stepped is not None
            for kind, own in {MAIN: held.stepped.main, **held.stepped.kept()}.items():
                shards = parallel.tensor_parallel_shards(own.detach())
                whole = hf_from_shards(held.mapping, shards, self._architecture)
                found |= {f"{kind}/{name}": tensor for name, tensor in whole}
        return found

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore a `state` bit for bit, under this or another layout.

        Raises:
            CheckpointError: the state lacks a parameter of this layer.
        """
        names = {f"{MAIN}/{name}" for mapping in mtp_mappings(self._architecture) for name in mapping.hf}
        if missing := sorted(names - state.keys()):
            raise CheckpointError(f"the checkpoint must hold the policy's MTP layer, has no {missing[0]}")
        self.memory.onload()
        self.num_updates = int(state[_NUM_UPDATES])
        for held in self._held:
            assert held.stepped is not None
            for kind, own in {MAIN: held.stepped.main, **held.stepped.reset(self.num_updates)}.items():
                whole = {name: state[f"{kind}/{name}"] for name in held.mapping.hf}
                ((_, mine),) = shard_from_hf(whole.__getitem__, self._architecture, self._shard, [held.mapping])
                own.copy_(mine)
            held.parameter.copy_(held.stepped.main)

    def _loss(self, chats: _Chats, temperature: float, weights: Sequence[float]) -> Tensor:
        total = torch.zeros((), device=self._device)
        policy_BTH = chats.last_TBH.roll(-1, 0).transpose(0, 1)  # the policy's state where a token is drafted
        for index, (weight, drafted_TBH) in enumerate(zip(weights, self._drafted(chats), strict=False)):
            mask_BT = chats.drafts(index)
            hidden_NH, last_NH = drafted_TBH.transpose(0, 1)[mask_BT], policy_BTH[mask_BT]
            total = total + weight * self._divergence(hidden_NH, last_NH, temperature)
        return total

    def _divergence(self, hidden_NH: Tensor, last_NH: Tensor, temperature: float) -> Tensor:
        """Sum KL(policy || draft) over tokens, with the logits of at most `logprob_chunk_tokens` tokens at once."""
        size = self._chunk_tokens or max(len(hidden_NH), 1)
        of_part = partial(_divergence, output_weight(self._gpt), temperature)
        parts = [
            cast(Tensor, checkpoint(of_part, *each, use_reentrant=False)) if self._chunk_tokens else of_part(*each)
            for each in zip(hidden_NH.split(size), last_NH.split(size), strict=True)
        ]
        return torch.stack(parts).sum()

    def _chances(self, chats: _Chats, num_tokens: int, temperature: float) -> Tensor:
        """Compute acceptance probabilities [num_tokens, windows] of the windows that lie within one response."""
        inside_BT = torch.stack([chats.drafts(i).roll(-i, 1) for i in range(num_tokens)]).all(0)
        chances = []
        for index, drafted_TBH in zip(range(num_tokens), self._drafted(chats), strict=False):
            hidden_BTH = drafted_TBH.roll(-index, 0).transpose(0, 1)[inside_BT]
            last_BTH = chats.last_TBH.roll(-index - 1, 0).transpose(0, 1)[inside_BT]
            chances.append(_overlap(output_weight(self._gpt), temperature, hidden_BTH, last_BTH))
        return torch.stack(chances)

    def _drafted(self, chats: _Chats) -> Iterator[Tensor]:
        """Yield the output layer's input [T, B, H] of each pass, without end.

        A pass attends to its own keys alone, whereas an engine keeps the first pass's keys of verified tokens.
        """
        inputs = chats.batch.inputs
        embedding: Any = self._gpt.embedding
        with torch.no_grad():
            embeddings_TBH = embedding.word_embeddings(chats.batch.labels_BT).transpose(0, 1)
        longest = int(inputs.positions_BT.max()) + 1
        angles_S11D: Tensor = self._gpt.rotary_pos_emb(longest)
        if inputs.packed is not None:
            angles_S11D = angles_S11D[inputs.positions_BT[0]]
        positions_TB1 = inputs.positions_BT.t().unsqueeze(-1)
        states_TBH, index = chats.states_TBH, 0
        while True:
            drafted_TBH = self._mtp(
                states_TBH,
                embeddings_TBH,
                positions_BT=inputs.positions_BT,
                angles_S11D=angles_S11D,
                packed=inputs.packed,
            )
            yield drafted_TBH
            index += 1
            # A window's next token is drafted one position later, from the state of its last token.
            states_TBH = torch.where(positions_TB1 < index, chats.states_TBH, drafted_TBH.roll(1, 0))

    def _chats(self, sequences: Sequences, loss_starts: Sequence[int], states: States) -> Iterator[_Chats]:
        # A position needs the token after it, which the last position lacks.
        lengths = [min(len(tokens) - 1, len(last)) for tokens, (_, last) in zip(sequences, states, strict=True)]
        cut = [list(tokens[: length + 1]) for tokens, length in zip(sequences, lengths, strict=True)]
        for batch in self._batching.microbatches(cut, loss_starts, self._device):
            batch_size, num_tokens = batch.labels_BT.shape
            has_target_BT = torch.zeros_like(batch.mask_BT)
            gathered = [states[0][0].new_zeros(num_tokens, batch_size, states[0][0].shape[-1]) for _ in "12"]
            for index, (row, columns) in zip(batch.indices, batch.inputs.places, strict=True):
                has_target_BT[row, columns.start : columns.stop - 1] = True
                for into, own in zip(gathered, states[index], strict=True):
                    into[columns, row] = own[: lengths[index]].detach()
            states_TBH, last_TBH = (each.to(self._device) for each in gathered)
            yield _Chats(batch=batch, states_TBH=states_TBH, last_TBH=last_TBH, has_target_BT=has_target_BT)


def _divergence(weight_VH: Tensor, temperature: float, hidden_NH: Tensor, last_NH: Tensor) -> Tensor:
    with torch.no_grad():
        policy_NV = logits_of(last_NH, weight_VH, temperature)
        targets_NV = probabilities(policy_NV)
        entropy_N = soft_cross_entropy(policy_NV, targets_NV)
    return (soft_cross_entropy(logits_of(hidden_NH, weight_VH, temperature), targets_NV) - entropy_N).sum()


def _overlap(weight_VH: Tensor, temperature: float, hidden_NH: Tensor, last_NH: Tensor) -> Tensor:
    """Compute sum_v min(p(v), q(v)) over the whole vocabulary, [N]."""
    policy_NV, draft_NV = (probabilities(logits_of(each, weight_VH, temperature)) for each in (last_NH, hidden_NH))
    shared_N = torch.minimum(policy_NV, draft_NV).sum(-1)
    return torch.stack(parallel.tensor_parallel_shards(shared_N)).sum(0)
