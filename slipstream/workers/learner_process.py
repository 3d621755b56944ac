"""What runs in a learner process: the policy, its optimizer, and the trainer of its draft."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.drafts.config import DraftConfig
from slipstream.drafts.pretrain import DraftProgress
from slipstream.drafts.methods import DraftMethod
from slipstream.grpo.config import OptimizerConfig
from slipstream.imports import uncollected
from slipstream.policy.config import LearnerConfig, ScratchConfig
from slipstream.ragged import Ragged
from slipstream.refit.channel import choice
from slipstream.refit.channel.choice import Location
from slipstream.refit.fingerprint import Turn, WeightPart, part_fingerprints
from slipstream.refit.snapshot import Snapshot, SnapshotWriter
from slipstream.rollout.config import SamplingConfig
from slipstream.types import TrainBatch
from slipstream.workers.files import here

if TYPE_CHECKING:
    import torch

    from slipstream.drafts.mtp import MtpDraft
    from slipstream.drafts.trainer import DraftTrainer
    from slipstream.grpo.update import Trained, Update
    from slipstream.policy.megatron import MegatronPolicy
    from slipstream.policy.rendezvous import Rendezvous
    from slipstream.refit.channel.sender import EngineControl, Sender, Sent, StreamSettings
    from slipstream.refit.channel.source import WeightSource

Sequences = Sequence[Sequence[int]]
Learned = tuple[Ragged, Sequence[int]]
"""A part of some sequences, and from which token on each counts."""
_POLICY, _DRAFT = "policy", "draft"  # the models whose weights travel


@dataclass(frozen=True, slots=True)
class _DraftChats:
    """What the draft trains on; without `states` they are computed at each step."""

    sequences: Sequences
    prompt_lengths: Sequence[int]
    states: list[tuple[torch.Tensor, torch.Tensor]] | None


class LearnerProcess:
    """One rank of the learner; every method is called on all ranks.

    Those that take a part of a batch are handed the share of the rank's data-parallel group, as arrays, and return what
    they say of it, a row a sequence; the others have the same arguments on all ranks.
    """

    def __init__(self, config: LearnerConfig, *, rank: int = 0, world_size: int = 1, origin: str = "") -> None:
        """Not yet a member of the group of `world_size` ranks, see `join`.

        Args:
            origin: node whose files the paths name that are to be read; empty for this one.
        """
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self._origin = origin
        self._rendezvous: Rendezvous | None = None
        self._policy: MegatronPolicy | None = None
        self._reference: MegatronPolicy | None = None
        self._draft: DraftTrainer | MtpDraft | None = None
        self._draft_chats: _DraftChats | None = None
        self._sources: dict[str, WeightSource] = {}  # by model
        self._snapshots: dict[tuple[Path, str], SnapshotWriter] = {}  # by directory and model
        self._sender: Sender | None = None

    def listen(self, address: str) -> int:
        """Open the port of this host on which the ranks will meet; rank 0 alone is asked. Returns the port."""
        with uncollected():
            from slipstream.policy.rendezvous import Rendezvous

        self._rendezvous = Rendezvous.listen(address, world_size=self._world_size)
        return self._rendezvous.port

    def join(self, address: str, port: int, *, own_address: str) -> None:
        """Form one process group with the others; returns when all are in it.

        Args:
            own_address: of this host: its network interface carries the collectives.
        """
        with uncollected():
            from slipstream.policy.rendezvous import Rendezvous

        if self._rendezvous is None:
            self._rendezvous = Rendezvous(address=address, port=port, world_size=self._world_size)
        self._rendezvous.join(self._rank, own_address=own_address)

    def load(self, path: Path, optimizer: OptimizerConfig | None, *, with_reference: bool = False) -> int:
        """Load the policy, and a frozen copy as reference for the KL; returns the number of parameters."""
        path = here(path, self._origin)
        self._policy = self._load(path, optimizer)
        self._sources.pop(_POLICY, None)
        self._reference = self._load(path, None) if with_reference else None
        return self._policy.architecture.num_parameters()

    def create(self, scratch: ScratchConfig, vocab_size: int, eos_token_id: int, optimizer: OptimizerConfig) -> int:
        """A policy with random weights; returns the number of parameters."""
        with uncollected():
            from slipstream.policy.megatron import MegatronPolicy

        self._policy = MegatronPolicy.from_scratch(
            scratch,
            vocab_size=vocab_size,
            eos_token_id=eos_token_id,
            learner=self._config,
            optimizer=optimizer,
            rank=self._rank,
            world_size=self._world_size,
        )
        self._sources.pop(_POLICY, None)
        return self._policy.architecture.num_parameters()

    def release(self) -> None:
        """Forget all that was loaded; the process group stays."""
        self._policy = self._reference = self._draft = self._draft_chats = None
        self.close_stream()
        self._sources, self._snapshots = {}, {}
        gc.collect()

    def sees(self, path: Path) -> bool:
        """Whether `path` is there, on this host."""
        return path.exists()

    def mtp_loss(self) -> float | None:
        """Of the policy's MTP layer in the last `lm_step`; None where none was trained."""
        return self._loaded.mtp_loss

    def lm_step(self, part: Learned, *, learning_rate: float | None = None) -> float:
        """One next-token update; returns its loss."""
        sequences, loss_starts = part
        return self._loaded.lm_step(sequences, loss_starts, learning_rate=learning_rate)

    def logprobs(self, part: TrainBatch, temperature: float) -> Ragged:
        """Trainer logprobs of the response tokens."""
        return _float32(self._loaded.logprobs(part.token_ids, part.prompt_lengths, temperature))

    def token_logprobs(self, part: Ragged) -> Ragged:
        """Logprob of each token but the first, given those before it, at temperature 1."""
        return _float32(self._loaded.logprobs(part, [1] * len(part), 1.0))

    def ref_logprobs(self, part: TrainBatch, temperature: float) -> Ragged | None:
        """Logprobs under the reference policy, None without one."""
        if self._reference is None:
            return None
        return _float32(self._reference.logprobs(part.token_ids, part.prompt_lengths, temperature))

    def conditionals(self, part: Learned, sampling: SamplingConfig, *, seed: int) -> list[np.ndarray]:
        """What the policy says about each response token: a sequence's are [N, columns of `policy.conditionals`]."""
        from slipstream.policy.conditionals import COLUMNS, conditionals

        sequences, prompt_lengths = part
        function = partial(
            conditionals,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            generator=self._generator(seed),
        )
        values = self._loaded.map_logits(sequences, prompt_lengths, function, width=len(COLUMNS))
        lengths = [len(tokens) - start for tokens, start in zip(sequences, prompt_lengths, strict=True)]
        ends = np.cumsum(lengths, dtype=np.int64)
        return [values[end - length : end] for end, length in zip(ends, lengths, strict=True)]

    def next_token_probabilities(self, part: Ragged, sampling: SamplingConfig) -> np.ndarray:
        """The distribution that is sampled after each prefix, [prefixes, vocabulary]."""
        from slipstream.policy.conditionals import processed_logprobs

        def function(logits_NV: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
            del labels_N
            return processed_logprobs(
                logits_NV, temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k
            ).exp()

        extended = [[*prefix, 0] for prefix in part]  # some token has to come: what it is does not matter
        width = self._loaded.architecture.vocab_size
        return self._loaded.map_logits(extended, [len(prefix) for prefix in part], function, width=width)

    def train_step(self, part: Update) -> Trained:
        """One update of the policy; the stats are those of the whole update."""
        return self._loaded.train_step(part)

    def train_step_with_draft(self, update: Update, config: DraftConfig) -> tuple[Trained, float]:
        """One update of the policy, and one of the draft on the hidden states of the same forward pass.

        Each data-parallel rank passes its share of the update, and the draft's gradient is that of all of them.

        The draft sees detached states and has its own optimizer and clip, so the policy's update is the one of
        `train_step` to the last bit. Returns what `train_step` does, and the draft's loss.
        """
        from slipstream.policy.capture import Capture
        from slipstream.policy.collectives import summed_over_data_ranks

        capture, batch = Capture(self._layer_ids(config)), update.batch
        trained = self._loaded.train_step(update, capture=capture)
        # Nothing was computed after the last token, yet it is known: what an MTP layer drafts there counts.
        kept = batch.token_ids if self._drafts_with_mtp else [tokens[:-1] for tokens in batch.token_ids]
        states = []
        for index, tokens in enumerate(kept):
            aux_TA, last_TH = capture.by_sequence[index]
            states.append((aux_TA[: len(tokens)], last_TH[: len(tokens)]))
        total = summed_over_data_ranks if self._config.parallel.data > 1 else None
        return trained, self._drafting.step(kept, batch.prompt_lengths, states, sum_over_ranks=total)

    def location(self) -> Location:
        """Where this rank computes."""
        import torch

        if not torch.cuda.is_available():
            return choice.here()
        return choice.here(str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid))

    def weight_bytes(self) -> int:
        """Size of the policy as it is sent to engines; collective."""
        return self._source(_POLICY).num_bytes()

    def publish(self, directory: Path, version: int) -> Snapshot | None:
        """Write the policy for engines on this host; rank 0 alone writes and returns the snapshot."""
        return self._publish(_POLICY, directory, version)

    def publish_draft(self, directory: Path, version: int) -> Snapshot | None:
        """The same of the draft."""
        return self._publish(_DRAFT, directory, version)

    def open_stream(self, settings: StreamSettings, engines: EngineControl) -> None:
        """Join a channel with the engines, which rank 0 steers; one that was open is left."""
        from slipstream.refit.channel.sender import open_sender
        from slipstream.workers.engine_control import node_address

        self.close_stream()
        self._sender = open_sender(
            settings, engines=engines, source=self._source(_POLICY), rank=self._rank, address=node_address()
        )

    def stream(self, *, is_draft: bool) -> Sent:
        """Send the policy, or the draft, to the engines; what rank 0 returns counts."""
        assert self._sender is not None, "open_stream comes first"
        return self._sender.send(self._source(_DRAFT if is_draft else _POLICY), is_draft=is_draft)

    def close_stream(self) -> None:
        """Leave the channel, if there is one."""
        if self._sender is not None:
            self._sender.close()
        self._sender = None

    def weight_fingerprints(self, dtypes: Mapping[str, str], turn: Turn) -> dict[WeightPart, int]:
        """Fingerprints, as these types, of the parts of the policy that this rank answers for and whose turn it is."""
        held = (weights for weights in self._loaded.held_weights() if turn.takes(weights.parts[0].name))
        return part_fingerprints(held, dtypes)

    def save_hf(self, path: Path, tokenizer_dir: Path) -> None:
        """Write the policy as transformers and vLLM read it."""
        self._loaded.save_hf(path, here(tokenizer_dir, self._origin))

    def save_checkpoint(self, path: Path, extra: dict[str, Any]) -> None:
        """Write all that a resumed run needs, in the background."""
        self._loaded.save_checkpoint(path, extra)

    def finish_checkpoint(self) -> None:
        """Wait for the checkpoint that is being written."""
        self._loaded.finish_checkpoint()

    def load_checkpoint(self, path: Path) -> dict[str, Any]:
        """Restore what `save_checkpoint` wrote; returns its `extra`."""
        return self._loaded.load_checkpoint(path)

    def start_draft(self, policy: Path, config: DraftConfig) -> int:
        """A fresh draft for the loaded policy, or its own MTP layer; returns the number of trained parameters."""
        own_policy = here(policy, self._origin)
        if config.method is DraftMethod.MTP:
            from slipstream.drafts.mtp import MtpDraft

            self._draft = MtpDraft(self._loaded, config, tokenizer_dir=own_policy, writes=self._rank == 0)
        else:
            from slipstream.drafts.trainer import DraftTrainer

            self._draft = DraftTrainer(own_policy, config, num_threads=self._config.num_threads)
        self._sources.pop(_DRAFT, None)
        return self._draft.num_parameters

    def hold_draft_chats(self, sequences: Sequences, prompt_lengths: Sequence[int], config: DraftConfig) -> bool:
        """Take the chats that `draft_step` names by index; whether their hidden states fit the cache.

        Those that fit are captured here, in one order: a resumed training computes the same bits again.
        """
        layer_ids = self._layer_ids(config)
        num_bytes = sum(map(len, sequences)) * self._loaded.hidden_states_bytes_per_token(layer_ids)
        fits = num_bytes <= config.states_cache_gib * 2**30
        states = self._loaded.hidden_states(sequences, layer_ids) if fits else None
        self._draft_chats = _DraftChats(sequences, prompt_lengths, states)
        return fits

    def draft_step(self, indices: Sequence[int], config: DraftConfig) -> float:
        """One update of the draft on the frozen policy's hidden states of these chats; returns the loss."""
        chats = self._draft_chats
        assert chats is not None, "hold_draft_chats comes first"
        sequences = [chats.sequences[index] for index in indices]
        if chats.states is None:
            states = self._loaded.hidden_states(sequences, self._layer_ids(config))
        else:
            states = [chats.states[index] for index in indices]
        return self._drafting.step(sequences, [chats.prompt_lengths[index] for index in indices], states)

    def evaluate_draft(self, sequences: Sequences, prompt_lengths: Sequence[int], config: DraftConfig) -> DraftProgress:
        """Held-out acceptance of the draft."""
        states = self._loaded.hidden_states(sequences, self._layer_ids(config))
        rates, length = self._drafting.evaluate(sequences, prompt_lengths, states)
        return DraftProgress(rate_by_position=tuple(rates), mean_acceptance_length=length)

    def save_draft(self, path: Path) -> None:
        """Write the draft as vLLM loads it; rank 0 alone writes, and gathering an MTP layer is collective."""
        if self._rank == 0 or self._drafts_with_mtp:
            self._drafting.save(path)

    def save_draft_checkpoint(self, path: Path) -> None:
        """Write what resumed draft training needs; rank 0 alone writes, and gathering an MTP layer is collective."""
        if self._rank == 0 or self._drafts_with_mtp:
            self._drafting.save_checkpoint(path)

    def load_draft_checkpoint(self, path: Path) -> None:
        """Restore what `save_draft_checkpoint` wrote."""
        self._drafting.load_checkpoint(path)

    def _source(self, model: str) -> WeightSource:
        from slipstream.refit.channel.source import WeightSource

        weights = self._loaded.weights if model == _POLICY else self._drafting.weights
        return self._sources.setdefault(model, WeightSource(weights, model=model))

    def _publish(self, model: str, directory: Path, version: int) -> Snapshot | None:
        source = self._source(model)
        if self._rank == 0:
            writer = self._snapshots.setdefault((directory, model), SnapshotWriter(directory, model))
            return writer.write(source, version=version)
        for _ in source:  # gathering is collective: every rank must run through it
            pass
        return None

    def _generator(self, seed: int) -> torch.Generator:
        """Where the learner computes; ranks that compute different tokens draw different numbers."""
        import torch

        data_rank = self._config.parallel.data_rank(self._rank)
        own = int(np.random.SeedSequence([seed, data_rank]).generate_state(1)[0]) if data_rank else seed
        return torch.Generator(device=self._loaded.device).manual_seed(own)

    @property
    def _loaded(self) -> MegatronPolicy:
        assert self._policy is not None, "load or create comes first"
        return self._policy

    def _layer_ids(self, config: DraftConfig) -> tuple[int, ...]:
        """Of the states that the draft reads."""
        if config.method is DraftMethod.MTP:
            return self._loaded.architecture.mtp_layer_ids
        return config.aux_hidden_state_layer_ids

    @property
    def _drafts_with_mtp(self) -> bool:
        from slipstream.drafts.mtp import MtpDraft

        return isinstance(self._draft, MtpDraft)

    @property
    def _drafting(self) -> DraftTrainer | MtpDraft:
        assert self._draft is not None, "start_draft comes first"
        return self._draft

    def _load(self, path: Path, optimizer: OptimizerConfig | None) -> MegatronPolicy:
        with uncollected():
            from slipstream.policy.megatron import MegatronPolicy

        return MegatronPolicy.load(
            path,
            learner=self._config,
            optimizer=optimizer,
            rank=self._rank,
            world_size=self._world_size,
        )


def _float32(rows: Sequence[np.ndarray]) -> Ragged:
    return Ragged.of(rows, np.float32)
