"""Training of an EAGLE-3 draft on detached hidden states: before RL, and the seam for training it during RL.

The trainer never sees the policy, only what the policy left behind, so no gradient can reach it.

Legend: `N` packed tokens, `H` hidden size, `V` vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from speculators.losses import resolve_loss_config
from torch import Tensor

from slipstream.drafts.config import DraftConfig
from slipstream.drafts.eagle3 import build_draft, draft_tensors, save_draft
from slipstream.policy.checkpoint.files import sum_of, write_json, write_tensors
from slipstream.policy.errors import CheckpointError

States = Sequence[tuple[Tensor, Tensor]]
"""For each sequence of T tokens the auxiliary hidden states [T, 3H] and what the output layer sees [T, H]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedChats:
    """Chats one behind the other, aligned as EAGLE-3 reads them; the batch dimension is 1."""

    input_ids: Tensor  # [1, N] the token after the one whose states stand beside it
    hidden_states: Tensor  # [1, N, 3H]
    last: Tensor  # [1, N, H] states of the token in input_ids: they predict the token after it
    loss_mask: Tensor  # [1, N] bool: what is predicted belongs to a response
    document_ids: Tensor  # [1, N]
    position_ids: Tensor  # [1, N] from 1 in each chat


class DraftTrainer:
    """A draft, its optimizer and its schedule."""

    def __init__(self, policy: Path, config: DraftConfig, *, num_threads: int | None = None) -> None:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._config = config
        self._model = build_draft(policy, config)
        self._trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(self._trained, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
        self._loss = resolve_loss_config(config.loss, "eager")  # the fused losses need Triton on a GPU
        self._num_steps = 0

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
        sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
    ) -> float:
        """One update; returns the loss summed over the TTT passes.

        Args:
            sum_over_ranks: adds up a tensor over trainers of which each has a part of the sequences and all make the
                same update; None: this one has them all.
        Raises:
            FloatingPointError: the loss is not finite.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.learning_rate_at(self._num_steps)
        self._optimizer.zero_grad()
        rows = self._rows(sequences, prompt_lengths, states)
        num_tokens = sum(int(row.loss_mask.sum()) for row in rows)
        if sum_over_ranks is not None:
            num_tokens = int(sum_over_ranks(torch.tensor(num_tokens)))
        total = 0.0
        for row in rows:
            loss = self._forward(row) * (int(row.loss_mask.sum()) / num_tokens)
            loss.backward()
            total += float(loss.item())
        if sum_over_ranks is not None:
            total = self._sum_gradients(total, sum_over_ranks)
        if not math.isfinite(total):
            raise FloatingPointError(f"draft loss of step {self._num_steps} must be finite, got {total}")
        # A group of its own: under one shared clip the draft's larger gradients would shrink the policy's step.
        torch.nn.utils.clip_grad_norm_(self._trained, self._config.clip_grad)
        self._optimizer.step()
        self._num_steps += 1
        return total

    def _sum_gradients(self, loss: float, sum_over_ranks: Callable[[Tensor], Tensor]) -> float:
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
        self, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int], states: States
    ) -> tuple[list[float], float]:
        """Held-out acceptance under rejection sampling at temperature 1.

        The chance to accept draft token i is sum_v min(p(v), q(v)) of policy and draft after the chat's own tokens
        (teacher forcing). The length is 1 + the mean over windows of the sum over i of the product of the chances
        up to i.

        Returns:
            The mean chance by position, and the mean acceptance length.
        """
        windows = torch.cat([self._windows(row) for row in self._rows(sequences, prompt_lengths, states)], dim=1)
        length = 1.0 + float(windows.cumprod(dim=0).sum(dim=0).mean())
        return [float(rate) for rate in windows.mean(dim=1)], length

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The draft's tensors under the names that vLLM loads; they share memory with it."""
        yield from draft_tensors(self._model).items()

    def save(self, path: Path) -> None:
        """Write the draft as vLLM loads it."""
        save_draft(self._model, path)

    def save_checkpoint(self, path: Path) -> None:
        """Write weights, moments and step, so that a resumed training goes on bit for bit."""
        path.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, Tensor] = {}
        for index, parameter in enumerate(self._trained):
            state: dict[str, Any] = self._optimizer.state[parameter]
            tensors[f"{index}.parameter"] = parameter.detach()
            tensors[f"{index}.exp_avg"] = state["exp_avg"]
            tensors[f"{index}.exp_avg_sq"] = state["exp_avg_sq"]
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
        self._num_steps = state["num_steps"]
        tensors = load_file(path / "draft.safetensors")
        for index, parameter in enumerate(self._trained):
            parameter.copy_(tensors[f"{index}.parameter"])
            self._optimizer.state[parameter] = {
                "step": torch.tensor(float(self._num_steps)),
                "exp_avg": tensors[f"{index}.exp_avg"],
                "exp_avg_sq": tensors[f"{index}.exp_avg_sq"],
            }

    def _rows(
        self, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int], states: States
    ) -> list[PackedChats]:
        """Chats in rows of at most `tokens_per_row` tokens (a longer chat has a row of its own), in their order."""
        rows: list[list[int]] = []
        taken = 0
        for index, tokens in enumerate(sequences):
            if not rows or taken + len(tokens) > self._config.tokens_per_row:
                rows.append([])
                taken = 0
            rows[-1].append(index)
            taken += len(tokens)
        packed = [
            pack_chats([sequences[i] for i in row], [prompt_lengths[i] for i in row], [states[i] for i in row])
            for row in rows
        ]
        # A row whose responses are all too short to draft for teaches nothing.
        return [row for row in packed if row.loss_mask.any()]

    def _windows(self, batch: PackedChats) -> Tensor:
        """[ttt_steps, windows]: chance to accept each token of every draft window that lies within one response."""
        overlaps = self._overlaps(batch)
        num_steps = self._config.ttt_steps
        num = max(batch.input_ids.shape[1] - num_steps + 1, 0)
        documents = batch.document_ids[0]
        inside = torch.ones(num, dtype=torch.bool)
        for i in range(num_steps):
            inside &= batch.loss_mask[0, i : i + num] & (documents[i : i + num] == documents[:num])
        return torch.stack([overlaps[i][:num][inside] for i in range(num_steps)])

    def _forward(self, batch: PackedChats) -> Tensor:
        _, loss, _ = self._model(
            hidden_states=batch.hidden_states,
            input_ids=batch.input_ids,
            document_ids=batch.document_ids,
            loss_mask=batch.loss_mask,
            position_ids=batch.position_ids,
            verifier_last_hidden_states=batch.last,
            ttt_steps=self._config.ttt_steps,
            ttt_step_loss_decay=self._config.ttt_step_loss_decay,
            loss_config=self._loss,
        )
        return loss

    def _overlaps(self, batch: PackedChats) -> list[Tensor]:
        """For each TTT pass i, sum_v min(p, q) of the draft token i of the window that starts at each position."""
        logits: list[Tensor] = []
        hook = self._model.lm_head.register_forward_hook(lambda _module, _inputs, output: logits.append(output))
        try:
            self._forward(batch)
        finally:
            hook.remove()
        policy = self._model.verifier_lm_head(batch.last)[0].softmax(-1)  # [N, V]
        overlaps = []
        for i, draft_logits in enumerate(logits):
            draft = draft_logits[0].softmax(-1)
            num = draft.shape[0] - i
            overlap = torch.zeros(draft.shape[0])
            overlap[:num] = torch.minimum(policy[i:], draft[:num]).sum(-1)
            overlaps.append(overlap)
        return overlaps


def pack_chats(sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int], states: States) -> PackedChats:
    """Pack chats and shift them: input ids, last states and mask move left by one within each chat, states stay.

    For a chat x0 .. xT with states g0 .. gT and last states y0 .. yT this gives rows (x1, g0, y1) .. (xT, gT-1, yT).
    Row j predicts the token after x(j+1); the first draft follows the first response token.
    """
    ids, hidden, last, mask, documents, places = [], [], [], [], [], []
    for index, (tokens, start, (aux_TA, last_TH)) in enumerate(zip(sequences, prompt_lengths, states, strict=True)):
        num = len(tokens) - 1
        ids.append(torch.tensor(tokens[1:]))
        hidden.append(aux_TA[:-1].float())
        last.append(last_TH[1:].float())
        position = torch.arange(1, num + 1)
        # y of the chat's last token predicts what nobody sampled: it teaches nothing that will be asked for.
        mask.append((position >= start) & (position < num))
        documents.append(torch.full((num,), index))
        places.append(position)
    return PackedChats(
        input_ids=torch.cat(ids)[None],
        hidden_states=torch.cat(hidden)[None],
        last=torch.cat(last)[None],
        loss_mask=torch.cat(mask)[None],
        document_ids=torch.cat(documents)[None],
        position_ids=torch.cat(places)[None],
    )
