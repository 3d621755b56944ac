"""How one rank of the learner trains a draft: before RL on chats that it holds, or beside the policy."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.drafts.config import DraftConfig
from slipstream.drafts.methods import DraftMethod
from slipstream.learner.config import LearnerConfig
from slipstream.ragged import Ragged
from slipstream.records.steps import DraftUpdate

if TYPE_CHECKING:
    import torch

    from slipstream.drafts.mtp import MtpDraft
    from slipstream.drafts.online import OnlineDraft
    from slipstream.drafts.trainer import DraftTrainer
    from slipstream.grpo.update import Trained, Update
    from slipstream.learner.megatron import MegatronPolicy

Sequences = Sequence[Sequence[int]]
IndexedChats = tuple[Sequence[int], Ragged, Sequence[int]]
"""A part of some chats: their indices in the whole, their tokens, and where each response begins."""

Chats = tuple[Sequences, Sequence[int], "list[tuple[torch.Tensor, torch.Tensor]]"]
"""Tokens of chats, where each response begins, and the policy's hidden states."""


@dataclass(frozen=True, slots=True)
class HeldChats:
    """This rank's share of what the draft trains on; without `states` they are computed at each step."""

    places: Mapping[int, int]  # in what follows, by the index in the whole
    sequences: Sequences
    prompt_lengths: Sequence[int]
    states: list[tuple[torch.Tensor, torch.Tensor]] | None

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
    """Of the policy's states that the draft reads."""
    return policy.architecture.mtp_layer_ids if config.method is DraftMethod.MTP else config.aux_hidden_state_layer_ids


def sum_over_ranks(learner: LearnerConfig) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What adds up the parts of the data-parallel ranks; None for one that has everything."""
    from slipstream.learner.parallel import summed_over_data_ranks

    return summed_over_data_ranks if learner.parallel.data > 1 else None


def fresh_trainer(
    policy: MegatronPolicy,
    path: Path,
    config: DraftConfig,
    learner: LearnerConfig,
    *,
    writes: bool,
    given: Path | None,
    token_ids: Sequence[int] | None,
) -> DraftTrainer | MtpDraft:
    """What trains a fresh draft for the policy in `path` (its own MTP layer is one), or the `given` one.

    Args:
        writes: whether this rank writes checkpoints.
        token_ids: that a fresh draft knows; None: all.
    """
    from slipstream.drafts.trainer import DraftTrainer

    if config.method is DraftMethod.MTP:
        return _mtp_draft(policy, path, config, writes=writes, given=given, is_online=False)
    num_threads, device = learner.num_threads, policy.device
    if given is None:
        return DraftTrainer(path, config, num_threads=num_threads, device=device, token_ids=token_ids)
    return DraftTrainer.from_draft(given, path, config, num_threads=num_threads, device=device)


def online_trainer(
    policy: MegatronPolicy, path: Path, config: DraftConfig, learner: LearnerConfig, *, writes: bool, draft: Path
) -> OnlineDraft | MtpDraft:
    """What goes on training the saved `draft` beside the policy in `path`."""
    from slipstream.drafts.online import OnlineDraft

    if config.method is DraftMethod.MTP:
        return _mtp_draft(policy, path, config, writes=writes, given=draft, is_online=True)
    return OnlineDraft.from_draft(draft, path, config, num_threads=learner.num_threads, device=policy.device)


def _mtp_draft(
    policy: MegatronPolicy, path: Path, config: DraftConfig, *, writes: bool, given: Path | None, is_online: bool
) -> MtpDraft:
    from slipstream.drafts.mtp import MtpDraft

    if given is not None:
        policy.load_mtp(given)
    return MtpDraft(policy, config, tokenizer_dir=path, writes=writes, is_online=is_online)


def train_beside(
    policy: MegatronPolicy,
    draft: OnlineDraft | MtpDraft,
    config: DraftConfig,
    update: Update,
    learner: LearnerConfig,
) -> Trained:
    """One update of the policy, and the draft's on the hidden states of the same forward pass.

    Each data-parallel rank passes its share of the update, and the draft's gradient is that of all of them.

    The draft sees detached states and has its own optimizer and clip, so the policy's update is the one of
    a `train_step` without it to the last bit.
    """
    from slipstream.drafts.mtp import MtpDraft
    from slipstream.learner.forward_passes import Capture

    capture, batch = Capture(layer_ids(policy, config)), update.batch
    start = time.perf_counter()
    if not isinstance(draft, MtpDraft):
        draft.follow(*policy.vocabulary_weights())  # of the policy that the forward pass asks
    follow_s = time.perf_counter() - start
    trained = policy.train_step(update, capture=capture)
    start = time.perf_counter()
    # Nothing was computed after the last token, yet it is known: what an MTP layer drafts there counts.
    kept = batch.token_ids if isinstance(draft, MtpDraft) else [tokens[:-1] for tokens in batch.token_ids]
    states = []
    for index, tokens in enumerate(kept):
        aux_TA, last_TH = capture.by_sequence[index]
        states.append((aux_TA[: len(tokens)], last_TH[: len(tokens)]))
    loss = draft.learn(
        kept,
        batch.prompt_lengths,
        states,
        temperature=update.temperature,
        num_ranks=learner.parallel.data,
        sum_over_ranks=sum_over_ranks(learner),
    )
    elapsed_s = follow_s + time.perf_counter() - start
    return replace(trained, draft=DraftUpdate(loss=loss, num_updates=config.online_updates, elapsed_s=elapsed_s))
