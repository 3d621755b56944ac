"""Draft training in one learner rank, either before RL on stored chats or beside the policy during RL."""

from __future__ import annotations

import json
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.drafts.config import DraftConfig
from slipstream.drafts.methods import DraftMethod
from slipstream.learner.checkpoint import CheckpointError
from slipstream.learner.config import LearnerConfig
from slipstream.ragged import Ragged
from slipstream.records.steps import DraftUpdate
from slipstream.types import Dtype

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.grpo.update import Trained, Update
    from slipstream.learner.megatron import MegatronPolicy

NUM_STEPS = "num_steps"
_TENSORS, _STATE = "draft.safetensors", "draft.json"

Sequences = Sequence[Sequence[int]]
IndexedChats = tuple[Sequence[int], Ragged, Sequence[int]]
"""This rank's chats: their indices among all chats, their tokens, and their prompt lengths."""

States = Sequence[tuple["Tensor", "Tensor"]]
"""For each sequence of T tokens the auxiliary hidden states [T, AH] and the input of the output layer [T, H]."""


@dataclass(frozen=True, slots=True)
class Chats:
    """Chats with the policy's responses; without `states` until the policy has computed them."""

    token_ids: Sequences
    prompt_lengths: Sequence[int]
    states: States = ()

    def select(self, indices: Sequence[int]) -> Chats:
        """Return the chats with these indices."""
        return Chats(
            [self.token_ids[i] for i in indices],
            [self.prompt_lengths[i] for i in indices],
            [self.states[i] for i in indices] if self.states else (),
        )


@dataclass(frozen=True, slots=True)
class HeldChats:
    """This rank's share of the training chats; without `states` each step computes them again."""

    places: Mapping[int, int]  # position in `chats` and `states`, by index among all chats
    chats: Chats  # without states
    layers: tuple[int, ...]  # of the policy, whose states the draft reads
    states: States | None

    @classmethod
    def of(cls, part: IndexedChats, policy: MegatronPolicy, layers: tuple[int, ...], *, cache_gib: float) -> HeldChats:
        """Hold a share of the chats, with their hidden states if these fit `cache_gib`.

        States are computed in one fixed order, so a resumed training gets the same bits.
        """
        indices, sequences, prompt_lengths = part
        fits = policy.hidden_states_bytes(sequences, layers) <= cache_gib * 2**30
        states = policy.hidden_states(sequences, layers) if fits else None
        places = {index: place for place, index in enumerate(indices)}
        return cls(places, Chats(sequences, prompt_lengths), layers, states)

    def mine(self, indices: Sequence[int], policy: MegatronPolicy) -> Chats:
        """Return this rank's chats among those with the given indices, with their states."""
        places = [self.places[index] for index in indices if index in self.places]
        if self.states is not None:
            return replace(self.chats, states=self.states).select(places)
        chats = self.chats.select(places)
        return replace(chats, states=policy.hidden_states(chats.token_ids, self.layers))


class LearnerDraft(ABC):
    """A draft that trains on the policy's detached hidden states; every rank calls each method.

    The draft never sees the policy's graph, so no gradient reaches the policy.
    """

    reads_last_token = False  # True if training uses the last token of a sequence, after which there is no state
    layer_ids: tuple[int, ...]  # layers of the policy whose states the draft reads
    num_parameters: int  # trained ones alone

    def __init__(self, config: DraftConfig, *, is_online: bool, writes: bool) -> None:
        """Set the mode: `is_online` trains beside the policy, and a rank that `writes` saves drafts and checkpoints."""
        self.config, self._is_online, self._writes = config, is_online, writes
        own = config.dflash if config.method is DraftMethod.DFLASH else config.pretrain
        self._schedule = replace(config.pretrain, optimizer=own.optimizer)
        self._settings = config.online.optimizer if is_online else self._schedule.optimizer

    @property
    @abstractmethod
    def num_updates(self) -> int:
        """Number of updates so far."""

    @abstractmethod
    def step(self, chats: Chats, *, temperature: float = 1.0) -> float:
        """Make one update; returns the loss summed over the passes.

        Args:
            temperature: sampling temperature of the responses. The draft learns the policy's
                softmax(logits / temperature) with its own softmax(logits / temperature), from which it drafts.
        Raises:
            FloatingPointError: the loss or its gradient is not finite.
        """

    @abstractmethod
    def evaluate(self, chats: Chats, *, temperature: float = 1.0) -> tuple[list[float], float]:
        """Measure held-out acceptance under rejection sampling at `temperature`, over all ranks.

        The probability of accepting draft token i is sum_v min(p(v), q(v)) of policy and draft after the chat's own
        tokens (teacher forcing). The mean acceptance length is 1 + the mean over windows of the sum over i of the
        product of the probabilities up to i. Returns the mean probability by position, and the length.
        """

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the draft's tensors under the names that vLLM loads."""

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write the draft in the format that vLLM loads."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Return everything that the next update depends on; tensors may share memory with the draft."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`, bit for bit.

        Raises:
            CheckpointError: the state belongs to another draft.
        """

    def offload(self) -> int:
        """Offload gradients and optimizer until the next update or checkpoint; returns the freed device bytes."""
        return 0

    def follow(self, vocabulary_weights: Callable[[], tuple[Tensor, Tensor]]) -> None:
        """Copy the policy's current embeddings and output layer into the draft, where it has copies."""
        del vocabulary_weights

    def learn(self, chats: Chats, *, temperature: float, num_ranks: int = 1) -> float:
        """Make `draft.online.updates` updates, each on other rollouts of the step; returns their mean loss.

        As many ranks as `num_ranks` share the tokens of an update.
        """
        config = self.config
        parts = sample_parts(
            [len(tokens) for tokens in chats.token_ids],
            num_parts=config.online.updates,
            num_tokens=config.online_tokens // num_ranks,
            seed=f"{config.seed}/online/{self.num_updates}",  # a new sample in every step
        )
        losses = [self.step(chats.select(part), temperature=temperature) for part in parts]
        return sum(losses) / len(losses)

    def save_checkpoint(self, path: Path) -> None:
        """Write the `state`, from which training resumes bit for bit."""
        from slipstream.learner.checkpoint.on_disk import write_json, write_tensors

        state = self.state()
        if not self._writes:
            return
        counts = {NUM_STEPS: int(state.pop(NUM_STEPS))} if NUM_STEPS in state else {}
        path.mkdir(parents=True, exist_ok=True)
        total = write_tensors(path / _TENSORS, {name: tensor.cpu().contiguous() for name, tensor in state.items()})
        write_json(path / _STATE, {**counts, "xxh3": total.xxh3})

    def load_checkpoint(self, path: Path) -> None:
        """Restore what `save_checkpoint` wrote; raises a `CheckpointError` if the tensors' digest differs."""
        from safetensors.torch import load_file

        from slipstream.storage import sum_of

        counts = json.loads((path / _STATE).read_text())
        if sum_of(path / _TENSORS).xxh3 != counts.pop("xxh3"):
            raise CheckpointError(f"checkpoint {path} is damaged: {_TENSORS} differs from the digest it was saved with")
        self.restore({**load_file(path / _TENSORS), **counts})

    def _learning_rate(self) -> float:
        rate_at = self._settings.warmed_rate if self._is_online else self._schedule.learning_rate_at
        return rate_at(self.num_updates)

    def _num_passes(self) -> int:
        return self.config.online_passes if self._is_online else self.config.pretrain.ttt_steps


class MtpDraft(LearnerDraft):
    """The MTP layer of a learner's policy, trained as a draft.

    The layer stays in the policy, which computes the states, and its gradient is summed over all data-parallel ranks. A
    saved draft is a directory of the layer's tensors under their names in the policy's checkpoint. The loss is the
    divergence from the policy for every value of `draft.eagle3.loss`.
    """

    reads_last_token = True

    def __init__(
        self, policy: MegatronPolicy, config: DraftConfig, *, tokenizer_dir: Path, writes: bool, is_online: bool
    ) -> None:
        """Start the training; tokenizer files of `tokenizer_dir` are copied beside a saved draft."""
        super().__init__(config, is_online=is_online, writes=writes)
        self._policy, self._tokenizer_dir = policy, tokenizer_dir
        self._trainer = policy.start_mtp(self._settings)
        self.layer_ids = policy.architecture.mtp_layer_ids
        self.num_parameters = sum(tensor.numel() for _, tensor in policy.mtp_weights())

    @property
    def num_updates(self) -> int:
        """Updates so far."""
        return self._trainer.num_updates

    def step(self, chats: Chats, *, temperature: float = 1.0) -> float:
        """One update; returns the loss summed over the passes."""
        return self._trainer.step(
            chats.token_ids,
            chats.prompt_lengths,
            chats.states,
            learning_rate=self._learning_rate(),
            temperature=temperature,
            num_passes=self._num_passes(),
            decay=self.config.pretrain.ttt_step_loss_decay,
        )

    def evaluate(self, chats: Chats, *, temperature: float = 1.0) -> tuple[list[float], float]:
        """Held-out acceptance by position, and the mean acceptance length."""
        held = chats.token_ids, chats.prompt_lengths, chats.states
        return self._trainer.evaluate(*held, num_tokens=self.config.pretrain.ttt_steps, temperature=temperature)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The draft's tensors under the names that vLLM loads."""
        return self._policy.mtp_weights()

    def save(self, path: Path) -> None:
        """Write the draft as vLLM loads it."""
        self._policy.save_mtp(path, self._tokenizer_dir)

    def state(self) -> dict[str, Tensor]:
        """All that the next update depends on."""
        return self._trainer.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`, bit for bit."""
        self._trainer.restore(state)


def sample_parts(lengths: Sequence[int], *, num_parts: int, num_tokens: int, seed: str) -> list[list[int]]:
    """Sample disjoint parts of the sequences in random order, each of one sequence or at most `num_tokens` tokens.

    Parts beyond the number of sequences are empty.
    """
    order = list(range(len(lengths)))
    random.Random(seed).shuffle(order)
    parts: list[list[int]] = []
    for number in range(num_parts):
        part, taken = [], 0
        for index in order[number::num_parts]:
            if part and taken + lengths[index] > num_tokens:
                break
            part.append(index)
            taken += lengths[index]
        parts.append(part)
    return parts


def start_training(
    policy: MegatronPolicy,
    path: Path,
    config: DraftConfig,
    learner: LearnerConfig,
    *,
    writes: bool,
    given: Path | None,
    token_ids: Sequence[int] | None = None,
    is_online: bool = False,
) -> LearnerDraft:
    """Start or continue training a draft for the policy in `path`; the policy's own MTP layer is one.

    Args:
        given: directory of a draft to continue; None starts a fresh one.
        token_ids: ids that a fresh draft knows; None keeps all.
    """
    if config.method is DraftMethod.MTP:
        if given is not None:
            policy.load_mtp(given)
        return MtpDraft(policy, config, tokenizer_dir=path, writes=writes, is_online=is_online)
    from slipstream.drafts.trainer import DraftTrainer
    from slipstream.learner.parallel import model_rank, summed_over_ranks

    trainer = DraftTrainer(
        path,
        config,
        given=given,
        token_ids=token_ids,
        device=policy.device,
        is_online=is_online,
        writes=writes,
        products=learner.dtype if policy.device.type == "cuda" else Dtype.FLOAT32,
    )
    if learner.parallel.world_size > 1:
        trainer.sum_over_ranks, trainer.share = summed_over_ranks, (model_rank(), learner.parallel.num_model_ranks)
    return trainer


def train_beside(policy: MegatronPolicy, draft: LearnerDraft, update: Update, learner: LearnerConfig) -> Trained:
    """Update the policy, and its draft on the hidden states of the same forward pass.

    Each data-parallel rank passes its share of the update. The ranks that split the policy between them split that
    share for the draft, whose gradient is summed over all ranks. The draft sees detached states and has its own
    optimizer and clip, so the policy's update is bit-identical to one of `train_step` without a draft.
    """
    from slipstream.learner.megatron import Capture

    capture, batch = Capture(draft.layer_ids), update.batch
    start = time.perf_counter()
    draft.follow(policy.vocabulary_weights)  # before the update, as in the forward pass below
    follow_s = time.perf_counter() - start
    trained = policy.train_step(update, capture=capture)
    start = time.perf_counter()
    kept = batch.token_ids if draft.reads_last_token else [tokens[:-1] for tokens in batch.token_ids]
    each = zip(kept, capture.states, strict=True)
    states = [(aux_TA[: len(tokens)], last_TH[: len(tokens)]) for tokens, (aux_TA, last_TH) in each]
    chats = Chats(kept, batch.prompt_lengths, states)
    loss = draft.learn(chats, temperature=update.temperature, num_ranks=learner.parallel.data)
    elapsed_s = follow_s + time.perf_counter() - start
    done = DraftUpdate(loss=loss, num_updates=draft.config.online.updates, elapsed_s=elapsed_s)
    return replace(trained, draft=done)
