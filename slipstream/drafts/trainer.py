"""Training of an EAGLE-3 or DFlash draft on detached hidden states, before RL or, of EAGLE-3, beside the policy.

Weights, gradients and moments are float32. A GPU that holds its policy in bfloat16 multiplies matrices in bfloat16 in
an update (autocast), with softmax and loss in float32. Held-out acceptance is measured in float32 everywhere.

The loss compares draft and policy a few tokens at a time, and never holds the logits of all tokens. Let p be the
policy's distribution of a token and q the draft's, both softmax(logits / temperature) over the draft's vocabulary.
Rejection sampling accepts the draft's token with probability a = sum_v min(p, q). The losses are:

    kl_div      sum_v p log(p / q)
    tv          1 - a
    lk          -log(a), with a no smaller than 1e-5
    lk_hybrid   w kl_div + (1 - w) tv, with w = exp(-3 a) taken as a constant

Source: `speculators.losses.eager` of speculators 0.9, whose functions these are; lk and lk_hybrid come from Samarin
et al., "LK Losses" (arXiv 2602.23881).

Legend: `N` packed tokens, `C` of them in a chunk, `H` hidden size, `D` the draft's vocabulary, `V` the policy's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from speculators.losses import eager
from speculators.utils.loading import load_model_layers
from torch import Tensor

from slipstream.drafts.config import DraftConfig, Loss
from slipstream.drafts.dflash import block_inputs, build_dflash
from slipstream.drafts.eagle3 import AnyDraft, build_draft, draft_ids, draft_tensors, load_draft, save_draft
from slipstream.drafts.learner_draft import NUM_STEPS, Chats, LearnerDraft
from slipstream.drafts.methods import DraftMethod
from slipstream.drafts.passes import PackedChats, head_inputs, rows_of
from slipstream.grpo.config import OptimizerConfig, OptimizerMethod
from slipstream.learner.checkpoint import CheckpointError
from slipstream.learner.optimizer import BatchedMuon, Stepped, TrainingMemory
from slipstream.learner.packing import plan_shards
from slipstream.types import Dtype

DISTANCES: Mapping[Loss, Callable[[Tensor, Tensor], Tensor]] = {
    "kl_div": eager.kl_div_loss,
    "tv": eager.tv_loss,
    "lk": eager.neg_log_acceptance_loss,
    "lk_hybrid": eager.lk_hybrid_loss,
}
"""Functions of the draft's and the policy's logits, [1, C, D] each, to a distance of each token, [1, C]."""
_EPS = 1e-5  # as in speculators: the loss of a pass without counted tokens is 0


def chunk_losses(
    model: AnyDraft, head_inputs: Sequence[Tensor], batch: PackedChats, config: DraftConfig, temperature: float
) -> Iterator[Tensor]:
    """Yield parts of a row's loss, each with a graph of its own: go backward before taking the next.

    The loss is the sum over passes i of `ttt_step_loss_decay` ** i times the mean distance over the counted tokens.
    Each pass has `head_inputs` of [1, N, H].
    """
    num, num_passes, chunk = batch.loss_mask.shape[1], len(head_inputs), config.reader.loss_chunk_tokens
    distance_of, decay = DISTANCES[config.reader.loss], config.pretrain.ttt_step_loss_decay
    mask_1N = batch.loss_mask.float()
    counts = [mask_1N[:, number:].sum(dim=1) + _EPS for number in range(num_passes)]
    for start in range(0, num, chunk):
        stop = min(start + chunk, num)
        with torch.no_grad():  # states of later passes lie beyond the chunk
            states = batch.last[:, start : stop + num_passes - 1]
            targets = model.verifier_lm_head(states).float() / temperature
        loss = torch.zeros((), device=mask_1N.device)
        for number, hidden_1NH in enumerate(head_inputs):
            size = min(stop, num - number) - start
            if size <= 0:
                break
            logits = (model.lm_head(hidden_1NH[:, start:stop]).float() / temperature)[:, :size]
            decayed = mask_1N[:, start + number : start + number + size] * decay**number
            counted = distance_of(logits, targets[:, number : number + size]) * decayed
            loss = loss + (counted.sum(dim=1) / counts[number]).mean()
        yield loss


_CPU = torch.device("cpu")
_PARAMETER = "parameter"  # name of a trained parameter beside those of its moments


class DraftTrainer(LearnerDraft):
    """An EAGLE-3 or DFlash draft with its optimizer and learning rate; every rank holds all of it."""

    sum_over_ranks: Callable[[Tensor], Tensor] | None = None  # of all trainers; None where one has all sequences
    share: tuple[int, int] = (0, 1)  # number among the trainers that share out the same sequences, and their count

    def __init__(
        self,
        policy: Path,
        config: DraftConfig,
        *,
        given: Path | None = None,
        token_ids: Sequence[int] | None = None,
        device: torch.device = _CPU,
        is_online: bool = False,
        writes: bool = True,
        products: Dtype = Dtype.FLOAT32,
    ) -> None:
        """Start training a fresh draft of `policy`, or the saved draft in `given`, with a fresh optimizer.

        Args:
            token_ids: ids that a fresh draft knows (`build_draft`).
            products: type in which an update multiplies matrices.
        """
        super().__init__(config, is_online=is_online, writes=writes)
        self._device = device
        self._is_bfloat16 = products is Dtype.BFLOAT16
        self._head_inputs: Callable[[Any, PackedChats, int], list[Tensor]] = head_inputs
        if config.method is DraftMethod.DFLASH:
            assert given is None, "the recipe refuses it"
            self._head_inputs, model = block_inputs, build_dflash(policy, config, token_ids=token_ids)
        elif given is None:
            model = build_draft(policy, config, token_ids=token_ids)
        else:
            model = load_draft(given, policy, config)
        self._model: AnyDraft = model.to(device)
        self._policy_head_VH: Tensor = self._model.verifier_lm_head.weight
        if self._model.use_draft_vocab:
            self._policy_head_VH = policy_head(policy).to(device)
            self._cut_policy_head()
        named = [(name, each) for name, each in self._model.named_parameters() if each.requires_grad]
        self._trained = [parameter for _, parameter in named]
        self.layer_ids = tuple(model.target_layer_ids)
        self.num_parameters = sum(parameter.numel() for parameter in self._trained)
        self._optimizer = DraftOptimizer(named, self._settings)
        self._memory = TrainingMemory(self._model, self._optimizer.steppers, device=device)
        self._num_steps = 0

    @property
    def num_updates(self) -> int:
        """Updates so far."""
        return self._num_steps

    def step(self, chats: Chats, *, temperature: float = 1.0) -> float:
        """One update; returns the loss summed over the passes."""
        self._memory.onload()
        self._model.zero_grad()
        rows = self._rows(chats)
        num_tokens = sum(int(row.loss_mask.sum()) for row in rows)
        if self.sum_over_ranks is not None:
            num_tokens = int(self.sum_over_ranks(torch.tensor(num_tokens)))
        if num_tokens == 0:
            return 0.0  # responses of one token leave nothing to draft
        losses = [self._backward(row, temperature, int(row.loss_mask.sum()) / num_tokens) for row in rows]
        total = sum(float(loss) for loss in losses)
        if self.sum_over_ranks is not None:
            total = self._sum_gradients(total, self.sum_over_ranks)
        # A clip of its own: under a shared one the draft's larger gradients would shrink the policy's step.
        norm = float(torch.nn.utils.clip_grad_norm_(self._trained, self._settings.clip_grad))
        if not (math.isfinite(total) and math.isfinite(norm)):
            got = f"{total} and {norm}"
            raise FloatingPointError(f"draft loss of step {self._num_steps} and its gradient must be finite, got {got}")
        self._optimizer.step(learning_rate=self._learning_rate())
        self._num_steps += 1
        return total

    def _backward(self, row: PackedChats, temperature: float, share: float) -> Tensor:
        """Accumulate the gradient of a row's loss times `share`; returns that loss."""
        with self._products():
            inputs = self._head_inputs(self._model, row, self._num_passes())
        # The head goes backward chunk by chunk into these copies; the passes go backward once, afterwards.
        leaves = [each.detach().requires_grad_() for each in inputs]
        total = torch.zeros((), device=self._device)
        parts = chunk_losses(self._model, leaves, row, self.config, temperature)
        while True:
            with self._products():
                part = next(parts, None)
            if part is None:
                break
            loss = part * share
            loss.backward()
            total += loss.detach()
        known = [(each, leaf.grad) for each, leaf in zip(inputs, leaves, strict=True) if leaf.grad is not None]
        torch.autograd.backward([each for each, _ in known], [grad for _, grad in known])
        return total

    def _products(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._is_bfloat16)

    def _sum_gradients(self, loss: float, sum_over_ranks: Callable[[Tensor], Tensor]) -> float:
        """Sum gradients and loss over ranks, in one tensor; returns the loss."""
        # A rank whose responses are all too short to draft for has no gradient.
        own = [torch.zeros_like(each) if each.grad is None else each.grad for each in self._trained]
        flat = torch.cat([*(grad.flatten() for grad in own), own[0].new_tensor([loss])])
        *grads, total = sum_over_ranks(flat).split([*(each.numel() for each in self._trained), 1])
        for parameter, grad in zip(self._trained, grads, strict=True):
            parameter.grad = grad.view_as(parameter)
        return float(total)

    @torch.no_grad()
    def evaluate(self, chats: Chats, *, temperature: float = 1.0) -> tuple[list[float], float]:
        """Held-out acceptance by position, and the mean acceptance length."""
        none = torch.zeros(self.config.pretrain.ttt_steps, 0, device=self._device)
        windows = torch.cat([none, *(self._windows(row, temperature) for row in self._rows(chats))], dim=1)
        accepted, num = windows.cumprod(dim=0).sum(dim=0).sum(), windows.new_tensor(windows.shape[1])
        sums = torch.cat([windows.sum(dim=1), torch.stack([accepted, num])])
        if self.sum_over_ranks is not None:
            sums = self.sum_over_ranks(sums)
        *rates, length = (sums[:-1] / sums[-1]).tolist()
        return rates, 1.0 + length

    @torch.no_grad()
    def follow(self, vocabulary_weights: Callable[[], tuple[Tensor, Tensor]]) -> None:
        """Copy the policy's current embeddings and output layer into the draft."""
        embeddings_VH, head_VH = vocabulary_weights()
        self._model.embed_tokens.weight.copy_(embeddings_VH)
        self._policy_head_VH.copy_(head_VH)
        if self._model.use_draft_vocab:
            self._cut_policy_head()

    @torch.no_grad()
    def _cut_policy_head(self) -> None:
        self._model.verifier_lm_head.weight.copy_(self._policy_head_VH[draft_ids(self._model.d2t)])

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The draft's tensors under the names that vLLM loads."""
        yield from draft_tensors(self._model).items()

    def offload(self) -> int:
        """Offload gradients and optimizer; returns the freed device bytes."""
        return self._memory.offload()

    def save(self, path: Path) -> None:
        """Write the draft as vLLM loads it."""
        if self._writes:
            save_draft(self._model, path)

    def state(self) -> dict[str, Tensor]:
        """All that the next update depends on."""
        self._memory.onload()
        return {NUM_STEPS: torch.tensor([self._num_steps]), **self._optimizer.tensors()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`, bit for bit."""
        expected = {f"{index}.{_PARAMETER}": each.shape for index, each in enumerate(self._trained)}
        if any(name not in state or state[name].shape != shape for name, shape in expected.items()):
            raise CheckpointError(
                f"the checkpoint must hold the draft's {len(expected)} trained tensors, got {len(state)} others: it is "
                "of another draft, or of a run that trained none"
            )
        self._memory.onload()
        self._num_steps = int(state[NUM_STEPS])
        self._optimizer.restore(state, num_updates=self._num_steps)

    def _rows(self, chats: Chats) -> list[PackedChats]:
        """Pack this trainer's share of the sequences, which is balanced by tokens."""
        index, count = self.share
        mine = plan_shards([len(tokens) for tokens in chats.token_ids], count)[index]
        return rows_of(chats.select(mine), max_tokens=self.config.reader.tokens_per_row, device=self._device)

    def _windows(self, batch: PackedChats, temperature: float) -> Tensor:
        """[ttt_steps, windows] probability of accepting each token of every draft window within one response.

        Tokens outside the draft's vocabulary count as never drafted.
        """
        num_steps, chunk = self.config.pretrain.ttt_steps, self.config.reader.loss_chunk_tokens
        num = max(batch.loss_mask.shape[1] - num_steps + 1, 0)  # windows that end within the row
        found = torch.zeros(num_steps, num, device=self._device)
        inputs = self._head_inputs(self._model, batch, num_steps)
        for start in range(0, num, chunk):
            stop = min(start + chunk, num)
            states = batch.last[0, start : stop + num_steps - 1]
            policy = (torch.nn.functional.linear(states, self._policy_head_VH) / temperature).softmax(-1)
            if self._model.d2t is not None:
                policy = policy[:, draft_ids(self._model.d2t)]
            for i, hidden_1NH in enumerate(inputs):
                draft = (self._model.lm_head(hidden_1NH[0, start:stop]) / temperature).softmax(-1)
                found[i, start:stop] = torch.minimum(policy[i : i + stop - start], draft).sum(-1)
        # A window that leaves its chat meets the chat's last position, which no mask has.
        inside = torch.stack([batch.loss_mask[0, i : i + num] for i in range(num_steps)]).all(0)
        return found[:, inside]


def policy_head(policy: Path) -> Tensor:
    """[V, H] float32 output layer of the policy."""
    names = ("lm_head.weight", "model.embed_tokens.weight")  # tied embeddings are the output layer
    found = load_model_layers(list(names), str(policy))
    return next(found[name] for name in names if name in found).float()


class DraftOptimizer:
    """AdamW of a draft's parameters, or Muon for the layer's matrices and AdamW for the rest.

    Muon needs fewer tokens to learn, and training beside the policy has few (research/log.md).
    """

    def __init__(self, named: Sequence[tuple[str, torch.nn.Parameter]], config: OptimizerConfig) -> None:
        """Start without moments; `named` are the trained parameters in their order."""
        is_muon, decay = config.method is OptimizerMethod.MUON, config.weight_decay
        by_muon = {each: is_muon and each.dim() == 2 and not name.startswith("lm_head.") for name, each in named}
        matrices, rest = ([each for each, by in by_muon.items() if by is muon] for muon in (True, False))
        betas = config.betas[0], config.betas[1]
        adamw = torch.optim.AdamW(rest, lr=0.0, betas=betas, weight_decay=decay, fused=True)
        self.steppers: tuple[torch.optim.Optimizer, ...] = (adamw,)
        if matrices:
            dtype = torch.float32 if matrices[0].device.type == "cpu" else torch.bfloat16
            self.steppers = (adamw, BatchedMuon(matrices, lr=0.0, dtype=dtype, weight_decay=decay))
        self._stepped = [Stepped(each, each, 0, each.numel(), self.steppers[by]) for each, by in by_muon.items()]

    def step(self, *, learning_rate: float) -> None:
        """Make one update from the parameters' gradients."""
        for optimizer in self.steppers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            optimizer.step()

    def tensors(self) -> dict[str, Tensor]:
        """Return parameters and moments by `<index of the parameter>.<name>`, sharing memory."""
        return {
            f"{index}.{name}": tensor
            for index, each in enumerate(self._stepped)
            for name, tensor in {_PARAMETER: each.main.detach(), **each.kept()}.items()
        }

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor], *, num_updates: int) -> None:
        """Continue from `tensors` after `num_updates` updates."""
        for index, each in enumerate(self._stepped):
            for name, tensor in {_PARAMETER: each.main, **each.reset(num_updates)}.items():
                tensor.copy_(tensors[f"{index}.{name}"])
