"""Drafts as one rank of the learner trains them: before RL on chats that it holds, or beside the policy."""

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
from slipstream.grpo.config import OptimizerConfig
from slipstream.learner.checkpoint import CheckpointError
from slipstream.learner.config import LearnerConfig
from slipstream.ragged import Ragged
from slipstream.records.steps import DraftUpdate

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.grpo.update import Trained, Update
    from slipstream.learner.megatron import MegatronPolicy

NUM_STEPS = "num_steps"
_TENSORS, _STATE = "draft.safetensors", "draft.json"

Sequences = Sequence[Sequence[int]]
IndexedChats = tuple[Sequence[int], Ragged, Sequence[int]]
"""A part of some chats: their indices in the whole, their tokens, and where each response begins."""

States = Sequence[tuple["Tensor", "Tensor"]]
"""For each sequence of T tokens the auxiliary hidden states [T, AH] and what the output layer sees [T, H]."""

Chats = tuple[Sequences, Sequence[int], States]
"""Tokens of chats, where each response begins, and the policy's hidden states."""


@dataclass(frozen=True, slots=True)
class HeldChats:
    """This rank's share of what the draft trains on; without `states` they are computed at each step."""

    places: Mapping[int, int]  # in what follows, by the index in the whole
    sequences: Sequences
    prompt_lengths: Sequence[int]
    states: States | None

    @classmethod
    def of(cls, part: IndexedChats, policy: MegatronPolicy, config: DraftConfig) -> HeldChats:
        """Take a share.

        States that fit the cache are captured here, in one order: a resumed training computes the same bits again.
        """
        indices, sequences, prompt_lengths = part
        layers = layer_ids(policy, config)
        fits = policy.hidden_states_bytes(sequences, layers) <= config.states_cache_gib * 2**30
        states = policy.hidden_states(sequences, layers) if fits else None
        places = {index: place for place, index in enumerate(indices)}
        return cls(places, sequences, prompt_lengths, states)

    def mine(self, indices: Sequence[int], policy: MegatronPolicy, config: DraftConfig) -> Chats:
        """Those of the chats with these indices in the whole that this rank holds, with their states."""
        places = [self.places[index] for index in indices if index in self.places]
        sequences, lengths = [self.sequences[at] for at in places], [self.prompt_lengths[at] for at in places]
        if self.states is None:
            return sequences, lengths, policy.hidden_states(sequences, layer_ids(policy, config))
        return sequences, lengths, [self.states[at] for at in places]


def layer_ids(policy: MegatronPolicy, config: DraftConfig) -> tuple[int, ...]:
    """Layers of the policy whose states the draft reads."""
    return policy.architecture.mtp_layer_ids if config.method is DraftMethod.MTP else config.aux_hidden_state_layer_ids


class LearnerDraft(ABC):
    """A draft that learns from the states that the policy left behind; every rank calls each method.

    It never sees the policy's graph, so no gradient can reach the policy.

    Attributes:
        num_warmup_updates: of training beside the policy, over which the learning rate rises.
        reads_last_token: the last token of a sequence, after which nothing was computed, has a draft that counts.
    """

    num_warmup_updates = 1
    reads_last_token = False

    def __init__(self, config: DraftConfig, *, is_online: bool, writes: bool) -> None:
        """Begin.

        Args:
            is_online: it learns beside the policy, by the `draft.online_` fields.
            writes: whether this rank writes drafts and checkpoints.
        """
        self._config, self._is_online, self._writes = config, is_online, writes

    @property
    @abstractmethod
    def num_parameters(self) -> int:
        """Trained parameters."""

    @property
    @abstractmethod
    def num_updates(self) -> int:
        """Updates so far."""

    @abstractmethod
    def step(
        self, sequences: Sequences, prompt_lengths: Sequence[int], states: States, *, temperature: float = 1.0
    ) -> float:
        """One update; returns the loss summed over the passes.

        Args:
            temperature: at which responses are sampled: the draft learns softmax(logits / temperature) of the policy,
                as softmax(its own logits / temperature), which is what it drafts from.
        Raises:
            FloatingPointError: the loss or its gradient is not finite.
        """

    @abstractmethod
    def evaluate(
        self, sequences: Sequences, prompt_lengths: Sequence[int], states: States, *, temperature: float = 1.0
    ) -> tuple[list[float], float]:
        """Held-out acceptance under rejection sampling at `temperature`, over all ranks.

        The chance to accept draft token i is sum_v min(p(v), q(v)) of policy and draft after the chat's own tokens
        (teacher forcing). The length is 1 + the mean over windows of the sum over i of the product of the chances
        up to i.

        Returns:
            The mean chance by position, and the mean acceptance length.
        """

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The draft's tensors under the names that vLLM loads."""

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write the draft as vLLM loads it."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """All that its next update depends on; the tensors may share memory with it."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`, bit for bit.

        Raises:
            CheckpointError: it is none of this draft.
        """

    def offload(self) -> int:
        """Offload what updates alone need, until the next one, or a checkpoint; returns the bytes of the device."""
        return 0

    def follow(self, vocabulary_weights: Callable[[], tuple[Tensor, Tensor]]) -> None:
        """Take over the policy's present embeddings and output layer, where the draft has copies of them."""
        del vocabulary_weights

    def learn(
        self,
        sequences: Sequences,
        prompt_lengths: Sequence[int],
        states: States,
        *,
        temperature: float,
        num_ranks: int = 1,
    ) -> float:
        """`online_updates` updates, each on other rollouts of a step; returns their mean loss.

        Args:
            num_ranks: that share an update's tokens.
        """
        config = self._config
        parts = sample_parts(
            [len(tokens) for tokens in sequences],
            num_parts=config.online_updates,
            num_tokens=config.online_tokens // num_ranks,
            seed=f"{config.seed}/online/{self.num_updates}",  # each step's training samples anew
        )
        losses = [
            self.step(
                [sequences[i] for i in part],
                [prompt_lengths[i] for i in part],
                [states[i] for i in part],
                temperature=temperature,
            )
            for part in parts
        ]
        return sum(losses) / len(losses)

    def save_checkpoint(self, path: Path) -> None:
        """Write a `state`, so that a resumed training goes on bit for bit."""
        from slipstream.learner.checkpoint.on_disk import write_json, write_tensors

        state = self.state()
        if not self._writes:
            return
        counts = {NUM_STEPS: int(state.pop(NUM_STEPS))} if NUM_STEPS in state else {}
        path.mkdir(parents=True, exist_ok=True)
        total = write_tensors(path / _TENSORS, {name: tensor.cpu().contiguous() for name, tensor in state.items()})
        write_json(path / _STATE, {**counts, "xxh3": total.xxh3})

    def load_checkpoint(self, path: Path) -> None:
        """Restore what `save_checkpoint` wrote.

        Raises:
            CheckpointError: the file of tensors is not the one that was saved.
        """
        from safetensors.torch import load_file

        from slipstream.storage import sum_of

        counts = json.loads((path / _STATE).read_text())
        if sum_of(path / _TENSORS).xxh3 != counts.pop("xxh3"):
            raise CheckpointError(
                f"checkpoint {path} is damaged: {_TENSORS} does not have the digest it was saved with; remove "
                f"{path.parent} to train the draft anew"
            )
        self.restore({**load_file(path / _TENSORS), **counts})

    def _learning_rate(self) -> float:
        if not self._is_online:
            return self._config.learning_rate_at(self.num_updates)
        return self._config.online_learning_rate * min(1.0, (self.num_updates + 1) / self.num_warmup_updates)

    def _num_passes(self) -> int:
        return self._config.online_passes if self._is_online else self._config.ttt_steps


class MtpDraft(LearnerDraft):
    """The MTP layer of a learner's policy as a draft, and the schedule of its training.

    The layer stays in the policy, which says what it computes, and its gradient is always that of all data-parallel
    ranks. Saved is a directory of the layer's tensors alone, under the names that they have in the policy's checkpoint.
    Its loss is the divergence from the policy, whatever `draft.loss` says of drafts that stand beside it.
    """

    reads_last_token = True

    def __init__(
        self,
        policy: MegatronPolicy,
        config: DraftConfig,
        *,
        tokenizer_dir: Path,
        writes: bool = True,
        is_online: bool = False,
    ) -> None:
        """Train the layer that the policy holds.

        Args:
            tokenizer_dir: whose files are copied to where the draft is saved.
        Raises:
            ConfigError: the policy has no MTP layer.
        """
        super().__init__(config, is_online=is_online, writes=writes)
        self._policy, self._tokenizer_dir = policy, tokenizer_dir
        self._trainer = policy.start_mtp(
            OptimizerConfig(learning_rate=config.learning_rate, clip_grad=config.clip_grad, betas=(0.9, 0.95))
        )

    @property
    def num_parameters(self) -> int:
        """Trained parameters."""
        return sum(tensor.numel() for _, tensor in self._policy.mtp_weights())

    @property
    def num_updates(self) -> int:
        """Updates so far."""
        return self._trainer.num_updates

    def step(
        self, sequences: Sequences, prompt_lengths: Sequence[int], states: States, *, temperature: float = 1.0
    ) -> float:
        """One update; returns the loss summed over the passes."""
        return self._trainer.step(
            sequences,
            prompt_lengths,
            states,
            learning_rate=self._learning_rate(),
            temperature=temperature,
            num_passes=self._num_passes(),
            decay=self._config.ttt_step_loss_decay,
        )

    def evaluate(
        self, sequences: Sequences, prompt_lengths: Sequence[int], states: States, *, temperature: float = 1.0
    ) -> tuple[list[float], float]:
        """Held-out acceptance by position, and the mean acceptance length."""
        num_tokens = self._config.ttt_steps
        return self._trainer.evaluate(sequences, prompt_lengths, states, num_tokens=num_tokens, temperature=temperature)

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
    """Parts of some sequences in a random order, none twice, of `num_tokens` tokens at most or of one sequence.

    A part is empty where there are more parts than sequences.
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
    """Start training a fresh draft for the policy in `path` (its own MTP layer is one), or go on with the `given` one.

    Args:
        writes: whether this rank writes checkpoints.
        token_ids: that a fresh draft knows; None: all.
        is_online: it learns beside the policy.
    """
    if config.method is DraftMethod.MTP:
        if given is not None:
            policy.load_mtp(given)
        return MtpDraft(policy, config, tokenizer_dir=path, writes=writes, is_online=is_online)
    from slipstream.drafts.trainer import DraftTrainer
    from slipstream.learner.parallel import summed_over_data_ranks

    return DraftTrainer(
        path,
        config,
        given=given,
        token_ids=token_ids,
        device=policy.device,
        is_online=is_online,
        writes=writes,
        sum_over_ranks=summed_over_data_ranks if learner.parallel.data > 1 else None,
    )


def train_beside(
    policy: MegatronPolicy, draft: LearnerDraft, config: DraftConfig, update: Update, learner: LearnerConfig
) -> Trained:
    """One update of the policy, and the draft's on the hidden states of the same forward pass.

    Each data-parallel rank passes its share of the update, and the draft's gradient is that of all of them.

    The draft sees detached states and has its own optimizer and clip, so the policy's update is the one of
    a `train_step` without it to the last bit.
    """
    from slipstream.learner.megatron import Capture

    capture, batch = Capture(layer_ids(policy, config)), update.batch
    start = time.perf_counter()
    draft.follow(policy.vocabulary_weights)  # of the policy that the forward pass asks
    follow_s = time.perf_counter() - start
    trained = policy.train_step(update, capture=capture)
    start = time.perf_counter()
    kept = batch.token_ids if draft.reads_last_token else [tokens[:-1] for tokens in batch.token_ids]
    states = []
    for index, tokens in enumerate(kept):
        aux_TA, last_TH = capture.by_sequence[index]
        states.append((aux_TA[: len(tokens)], last_TH[: len(tokens)]))
    loss = draft.learn(
        kept, batch.prompt_lengths, states, temperature=update.temperature, num_ranks=learner.parallel.data
    )
    elapsed_s = follow_s + time.perf_counter() - start
    return replace(trained, draft=DraftUpdate(loss=loss, num_updates=config.online_updates, elapsed_s=elapsed_s))
