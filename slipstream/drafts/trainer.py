"""Training of an EAGLE-3 draft on detached hidden states: before RL, and the seam for training it during RL.

The trainer never sees the policy, only what the policy left behind, so no gradient can reach it.

Legend: `N` packed tokens, `H` hidden size, `V` the policy's vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

import torch
from safetensors.torch import load_file
from speculators.models.eagle3.core import Eagle3DraftModel
from torch import Tensor

from slipstream.drafts.chats import PackedChats, States, rows_of
from slipstream.drafts.config import DraftConfig
from slipstream.drafts.draft_optimizer import DraftOptimizer
from slipstream.drafts.eagle3 import build_draft, draft_ids, draft_tensors, load_draft, policy_head, save_draft
from slipstream.drafts.losses import DISTANCES, Judging, chunk_losses, overlaps
from slipstream.drafts.passes import head_inputs
from slipstream.grpo.config import OptimizerMethod
from slipstream.learner.checkpoint import CheckpointError
from slipstream.learner.checkpoint.on_disk import write_json, write_tensors
from slipstream.learner.optimizer import TrainingMemory
from slipstream.storage import sum_of

SumOverRanks = Callable[[Tensor], Tensor]
"""Adds up a tensor over trainers of which each has a part of the sequences, and which all call it alike."""

_CPU = torch.device("cpu")


class DraftTrainer:
    """A draft, its optimizer and its schedule."""

    is_collective = False  # every rank has all of it

    def __init__(
        self,
        policy: Path,
        config: DraftConfig,
        *,
        num_threads: int | None = None,
        device: torch.device = _CPU,
        token_ids: Sequence[int] | None = None,
        model: Eagle3DraftModel | None = None,  # type: ignore[valid-type]  # its decorator hides that it is a class
    ) -> None:
        """Train `model`, or without one a fresh draft of `policy`, on `device`.

        Args:
            token_ids: see `build_draft`.
        """
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._config = config
        self._device = device
        self._model = (build_draft(policy, config, token_ids=token_ids) if model is None else model).to(device)
        self._policy_head_VH: Tensor = self._model.verifier_lm_head.weight
        if self._model.use_draft_vocab:
            self._policy_head_VH = policy_head(policy).to(device)
            self._cut_policy_head()
        named = [(name, each) for name, each in self._model.named_parameters() if each.requires_grad]
        self._trained = [parameter for _, parameter in named]
        self._optimizer = DraftOptimizer(named, self._optimizer_method())
        self._memory = TrainingMemory(self._model, self._optimizer.steppers, device=device)
        self._num_steps = 0

    @classmethod
    def from_draft(
        cls,
        draft: Path,
        policy: Path,
        config: DraftConfig,
        *,
        num_threads: int | None = None,
        device: torch.device = _CPU,
    ) -> Self:
        """Train the saved `draft` further: its weights, a fresh optimizer, and the schedule from its first step.

        Raises:
            ConfigError: see `load_draft`.
        """
        model = load_draft(draft, policy, config)
        return cls(policy, config, num_threads=num_threads, device=device, model=model)

    @property
    def num_parameters(self) -> int:
        """Trained parameters."""
        return sum(parameter.numel() for parameter in self._trained)

    def step(
        self,
        sequences: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int],
        states: States,
        *,
        temperature: float = 1.0,
        sum_over_ranks: SumOverRanks | None = None,
    ) -> float:
        """One update; returns the loss summed over the TTT passes.

        Args:
            temperature: at which responses are sampled: the draft learns softmax(logits / temperature) of the policy,
                as softmax(its own logits / temperature), which is what it drafts from.
            sum_over_ranks: None: this trainer has all the sequences.
        Raises:
            FloatingPointError: the loss is not finite.
        """
        self._memory.take()
        self._optimizer.zero_grad()
        rows = self._rows(sequences, prompt_lengths, states)
        num_tokens = sum(int(row.loss_mask.sum()) for row in rows)
        if sum_over_ranks is not None:
            num_tokens = int(sum_over_ranks(torch.tensor(num_tokens)))
        if num_tokens == 0:
            return 0.0  # responses of a single token leave nothing to draft
        judging = self._judging(temperature)
        losses = [self._backward(row, judging, int(row.loss_mask.sum()) / num_tokens) for row in rows]
        total = sum(float(loss) for loss in losses)
        if sum_over_ranks is not None:
            total = self._sum_gradients(total, sum_over_ranks)
        if not math.isfinite(total):
            raise FloatingPointError(f"draft loss of step {self._num_steps} must be finite, got {total}")
        # A group of its own: under one shared clip the draft's larger gradients would shrink the policy's step.
        torch.nn.utils.clip_grad_norm_(self._trained, self._config.clip_grad)
        self._optimizer.step(learning_rate=self._learning_rate())
        self._num_steps += 1
        return total

    def _backward(self, row: PackedChats, judging: Judging, share: float) -> Tensor:
        """Add up the gradient of a row's loss times `share`; returns that."""
        inputs = head_inputs(self._model, row, self._num_passes())
        # The head goes backward chunk by chunk into these copies, and the passes once, when all is known of them.
        leaves = [each.detach().requires_grad_() for each in inputs]
        total = torch.zeros((), device=self._device)
        for part in chunk_losses(self._model, leaves, row, judging):
            loss = part * share
            loss.backward()
            total += loss.detach()
        known = [(each, leaf.grad) for each, leaf in zip(inputs, leaves, strict=True) if leaf.grad is not None]
        torch.autograd.backward([each for each, _ in known], [grad for _, grad in known])
        return total

    def _sum_gradients(self, loss: float, sum_over_ranks: SumOverRanks) -> float:
        """Add up the parameters' gradients, in one piece, and the loss."""
        # A rank whose responses are all too short to draft for has no gradient.
        own = [torch.zeros_like(each) if each.grad is None else each.grad for each in self._trained]
        flat = torch.cat([*(grad.flatten() for grad in own), own[0].new_tensor([loss])])
        *grads, total = sum_over_ranks(flat).split([*(each.numel() for each in self._trained), 1])
        for parameter, grad in zip(self._trained, grads, strict=True):
            parameter.grad = grad.view_as(parameter)
        return float(total)

    @torch.no_grad()
    def evaluate(
        self,
        sequences: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int],
        states: States,
        *,
        temperature: float = 1.0,
        sum_over_ranks: SumOverRanks | None = None,
    ) -> tuple[list[float], float]:
        """Held-out acceptance under rejection sampling at `temperature`.

        The chance to accept draft token i is sum_v min(p(v), q(v)) of policy and draft after the chat's own tokens
        (teacher forcing). The length is 1 + the mean over windows of the sum over i of the product of the chances
        up to i.

        Args:
            sum_over_ranks: None: this trainer has all the sequences.
        Returns:
            The mean chance by position, and the mean acceptance length.
        """
        rows = self._rows(sequences, prompt_lengths, states)
        none = torch.zeros(self._config.ttt_steps, 0, device=self._device)
        windows = torch.cat([none, *(self._windows(row, temperature) for row in rows)], dim=1)
        accepted, num = windows.cumprod(dim=0).sum(dim=0).sum(), windows.new_tensor(windows.shape[1])
        sums = torch.cat([windows.sum(dim=1), torch.stack([accepted, num])])
        if sum_over_ranks is not None:
            sums = sum_over_ranks(sums)
        *rates, length = (sums[:-1] / sums[-1]).tolist()
        return rates, 1.0 + length

    @torch.no_grad()
    def follow(self, embeddings_VH: Tensor, head_VH: Tensor) -> None:
        """Take over the policy's present embeddings and output layer, of which the draft has frozen copies.

        A draft that is trained while the policy moves learns from, and is fed with, the policy's own.
        """
        self._model.embed_tokens.weight.copy_(embeddings_VH)
        self._policy_head_VH.copy_(head_VH)
        if self._model.use_draft_vocab:
            self._cut_policy_head()

    @torch.no_grad()
    def _cut_policy_head(self) -> None:
        self._model.verifier_lm_head.weight.copy_(self._policy_head_VH[draft_ids(self._model)])

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The draft's tensors under the names that vLLM loads; they share memory with it."""
        yield from draft_tensors(self._model).items()

    def rest(self) -> int:
        """Give back what updates alone need, until the next one, or a checkpoint; how many bytes of the device."""
        return self._memory.give_back()

    def save(self, path: Path) -> None:
        """Write the draft as vLLM loads it."""
        save_draft(self._model, path)

    def save_checkpoint(self, path: Path) -> None:
        """Write weights, moments and step, so that a resumed training goes on bit for bit."""
        self._memory.take()
        path.mkdir(parents=True, exist_ok=True)
        tensors = {f"{index}.parameter": each.detach() for index, each in enumerate(self._trained)}
        tensors |= self._optimizer.moments()
        total = write_tensors(path / "draft.safetensors", {name: tensor.cpu() for name, tensor in tensors.items()})
        write_json(path / "draft.json", {"num_steps": self._num_steps, "xxh3": total.xxh3})

    @torch.no_grad()
    def load_checkpoint(self, path: Path) -> None:
        """Restore what `save_checkpoint` wrote.

        Raises:
            CheckpointError: the file of tensors is not the one that was saved.
        """
        state = json.loads((path / "draft.json").read_text())
        if sum_of(path / "draft.safetensors").xxh3 != state["xxh3"]:
            fault = "draft.safetensors does not have the digest it was saved with"
            raise CheckpointError(
                f"checkpoint {path} is damaged: {fault}; remove {path.parent} to train the draft anew"
            )
        self._memory.take()
        self._num_steps = state["num_steps"]
        tensors = load_file(path / "draft.safetensors")
        for index, parameter in enumerate(self._trained):
            parameter.copy_(tensors[f"{index}.parameter"])
        self._optimizer.restore(tensors, num_updates=self._num_steps)

    def _rows(
        self, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int], states: States
    ) -> list[PackedChats]:
        limit = self._config.tokens_per_row
        return rows_of(sequences, prompt_lengths, states, max_tokens=limit, device=self._device)

    def _judging(self, temperature: float) -> Judging:
        return Judging(
            distance=DISTANCES[self._config.loss],
            decay=self._config.ttt_step_loss_decay,
            temperature=temperature,
            chunk_tokens=self._config.loss_chunk_tokens,
        )

    def _windows(self, batch: PackedChats, temperature: float) -> Tensor:
        """[ttt_steps, windows]: chance to accept each token of every draft window that lies within one response."""
        num_steps = self._config.ttt_steps
        found = overlaps(
            self._model,
            head_inputs(self._model, batch, num_steps),
            batch,
            self._judging(temperature),
            policy_head_VH=self._policy_head_VH,
        )
        num = max(batch.input_ids.shape[1] - num_steps + 1, 0)
        documents = batch.document_ids[0]
        inside = torch.ones(num, dtype=torch.bool, device=self._device)
        for i in range(num_steps):
            inside &= batch.loss_mask[0, i : i + num] & (documents[i : i + num] == documents[:num])
        return found[:, :num][:, inside]

    def _learning_rate(self) -> float:
        return self._config.learning_rate_at(self._num_steps)

    def _num_passes(self) -> int:
        return self._config.ttt_steps

    def _optimizer_method(self) -> OptimizerMethod:
        return OptimizerMethod.ADAMW
