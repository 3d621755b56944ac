"""Process of a learner rank: policy, optimizer, draft trainer, and the sending half of a refit."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.drafts.config import DraftConfig
from slipstream.drafts.learner_draft import Chats, HeldChats, IndexedChats, LearnerDraft, start_training, train_beside
from slipstream.drafts.pretrain import DraftProgress
from slipstream.engine.config import SamplingConfig
from slipstream.grpo.config import OptimizerConfig
from slipstream.imports import uncollected
from slipstream.learner.config import LearnerConfig, LoraConfig, ScratchConfig
from slipstream.ragged import Ragged
from slipstream.refit.channel import EngineControl, Location, Snapshot, here
from slipstream.refit.config import WeightFormat
from slipstream.refit.fingerprint import Turn, WeightPart, held_whole, part_fingerprints
from slipstream.types import Dtype, TrainBatch
from slipstream.workers.cores import num_cores, set_threads
from slipstream.workers.reservation import require_gpu
from slipstream.workers.session import node_address, require_here

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import TCPStore

    from slipstream.grpo.update import Trained, Update
    from slipstream.learner.megatron import MegatronPolicy
    from slipstream.refit.config import RefitConfig
    from slipstream.refit.stream import Sender, SnapshotWriter, WeightSource

POLICY, DRAFT = "policy", "draft"  # the models whose weights are sent

Learned = tuple[Ragged, Sequence[int]]
"""A rank's sequences, and for each the index of the first token that counts."""


class LearnerProcess:
    """One rank of the learner; every method is called on all ranks.

    A parameter `part` is the share of a batch that the rank's data-parallel rank computes, as arrays; the result has a
    row a sequence. All other arguments are the same on all ranks.
    """

    def __init__(
        self, config: LearnerConfig, *, rank: int = 0, world_size: int = 1, logical_gpus: bool = False
    ) -> None:
        """Start without a process group, which `join` forms; a rank whose GPU is only counted may use the CPU."""
        self._rank = rank
        if not logical_gpus:
            require_gpu(f"learner rank {rank}", problem=_without_cuda)
        self._config = config
        self._world_size = world_size
        self._store: TCPStore | None = None  # on rank 0, which listens
        self._policy: MegatronPolicy | None = None
        self._reference: Callable[..., Sequence[np.ndarray]] | None = None  # logprobs under the initial policy
        self._draft: LearnerDraft | None = None
        self._online: LearnerDraft | None = None  # a draft that is trained beside the policy
        self._draft_chats: HeldChats | None = None
        self._sources: dict[str, WeightSource] = {}  # by model; dropped when any model is loaded
        self._sent_as: WeightFormat | None = None  # as the policy is sent to engines
        self._draft_dtype: Dtype | None = None  # as a draft is sent to engines; None sends none
        self._snapshots: dict[tuple[Path, str], SnapshotWriter] = {}  # by directory and model
        self._sender: Sender | None = None

    def limit_threads(self, num_threads: int | None) -> None:
        """Compute on at most this many threads, beside engines on the same host; None ends the limit."""
        most = self._config.num_threads or num_cores()
        set_threads(min(num_threads or most, most))

    def listen(self, address: str) -> int:
        """Open the rendezvous port on this host and return it; called on rank 0 alone."""
        with uncollected():
            from slipstream.learner import rendezvous

        self._store = rendezvous.listen(address, world_size=self._world_size)
        return self._store.port

    def join(self, address: str, port: int, *, own_address: str) -> None:
        """Form one process group with the other ranks, which meet at rank 0's `address`; returns when all have joined.

        The network interface of this host's `own_address` carries the collectives.
        """
        with uncollected():
            from torch.distributed import TCPStore

            from slipstream.learner import rendezvous

        store = self._store or TCPStore(address, port, self._world_size, is_master=False)
        rendezvous.join(store, self._rank, world_size=self._world_size, own_address=own_address)

    def load(
        self,
        path: Path,
        optimizer: OptimizerConfig | None,
        *,
        with_reference: bool = False,
        lora: LoraConfig | None = None,
        sent_as: WeightFormat | None = None,
        computed_as: WeightFormat | None = None,
    ) -> None:
        """Load the policy, and a frozen copy as the reference of the KL.

        A policy with adapters is its own reference: it has kept the weights below them.

        Args:
            sent_as: format of the policy's matrices in the engines; None sends them as they are.
            computed_as: format in which the policy itself computes, as a judge of such engines; None for a policy that
                learns.
        """
        require_here(path)
        self._policy = self._load(path, optimizer, lora, computed_as)
        self._sources, self._sent_as, self._reference = {}, sent_as, None
        if with_reference:
            self._reference = self._load(path, None).logprobs if lora is None else self._policy.base_logprobs

    def create(self, scratch: ScratchConfig, vocab_size: int, eos_token_id: int, optimizer: OptimizerConfig) -> int:
        """Make a policy with random weights; returns the number of parameters."""
        with uncollected():
            from slipstream.learner.megatron import MegatronPolicy

        self._policy = MegatronPolicy.from_scratch(
            scratch, vocab_size=vocab_size, eos_token_id=eos_token_id, learner=self._config, optimizer=optimizer
        )
        self._sources = {}
        return self._policy.architecture.num_parameters()

    def release(self) -> None:
        """Release all models; the process group stays."""
        self._policy = self._reference = self._draft = self._draft_chats = self._online = None
        self.close_stream()
        self._sources, self._snapshots, self._draft_dtype, self._sent_as = {}, {}, None, None
        gc.collect()

    def offload(self) -> int:
        """Offload gradients and optimizer state until the next update; returns the number of freed bytes."""
        return self._loaded.offload() + (0 if self._draft is None else self._draft.offload())

    def sees(self, path: Path) -> bool:
        """Return True if `path` exists on this host."""
        return path.exists()

    def mtp_loss(self) -> float | None:
        """Loss of the policy's MTP layer in the last `lm_step`; None for a policy without one."""
        return self._loaded.mtp_loss

    def lm_step(self, part: Learned, *, learning_rate: float | None = None) -> float:
        """Update the policy on the next-token loss; returns the loss."""
        sequences, loss_starts = part
        return self._loaded.lm_step(sequences, loss_starts, learning_rate=learning_rate)

    def logprobs(self, part: TrainBatch, temperature: float) -> Ragged:
        """Compute the trainer logprobs of the response tokens."""
        found = self._loaded.logprobs(part.token_ids, part.prompt_lengths, temperature, routes=part.routes)
        return _float32(found)

    def token_logprobs(self, part: Ragged) -> Ragged:
        """Compute the logprob of each token but the first, given all tokens before it, at temperature 1."""
        return _float32(self._loaded.logprobs(part, [1] * len(part), 1.0))

    def ref_logprobs(self, part: TrainBatch, temperature: float) -> Ragged | None:
        """Compute the logprobs under the reference policy, with routes of its own; None without a reference."""
        if self._reference is None:
            return None
        return _float32(self._reference(part.token_ids, part.prompt_lengths, temperature))

    def conditionals(self, part: Learned, sampling: SamplingConfig, *, seed: int) -> list[np.ndarray]:
        """Compute the conditionals of each response token: [N, columns of `learner.logprobs`] for each sequence."""
        from slipstream.learner.logprobs import COLUMNS, conditionals

        sequences, prompt_lengths = part
        function = partial(conditionals, **_distribution(sampling), generator=self._generator(seed))
        values = self._loaded.map_logits(sequences, prompt_lengths, function, width=len(COLUMNS))
        lengths = [len(tokens) - start for tokens, start in zip(sequences, prompt_lengths, strict=True)]
        return list(Ragged(values, np.cumsum(lengths, dtype=np.int64)))

    def next_token_probabilities(self, part: Ragged, sampling: SamplingConfig) -> np.ndarray:
        """Compute the distribution that is sampled after each prefix: [prefixes, vocabulary]."""
        from slipstream.learner.logprobs import processed_logprobs

        def function(logits_NV: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
            del labels_N
            return processed_logprobs(logits_NV, **_distribution(sampling)).exp()

        extended = [[*prefix, 0] for prefix in part]  # logits are computed for a next token, whichever it is
        width = self._loaded.architecture.vocab_size
        return self._loaded.map_logits(extended, [len(prefix) for prefix in part], function, width=width)

    def train_step(self, part: Update) -> Trained:
        """Update the policy, and the draft where `part` says so; the stats cover the update on all ranks."""
        if not part.trains_draft:
            return self._loaded.train_step(part)
        assert self._online is not None, "continue_draft comes first"
        return train_beside(self._loaded, self._online, part, self._config)

    def save_hf(self, path: Path, tokenizer_dir: Path) -> None:
        """Write the policy in Hugging Face format."""
        self._loaded.save_hf(path, tokenizer_dir)

    def save_checkpoint(self, path: Path, extra: dict[str, Any]) -> None:
        """Write the checkpoint of the policy, and of a draft trained beside the policy, in the background."""
        self._loaded.save_checkpoint(path, extra, beside=self._online.state() if self._online else None)

    def finish_checkpoint(self) -> None:
        """Wait until the checkpoint is written."""
        self._loaded.finish_checkpoint()

    def load_checkpoint(self, path: Path) -> dict[str, Any]:
        """Restore what `save_checkpoint` wrote; returns its `extra`."""
        if self._online is None:
            return self._loaded.load_checkpoint(path)
        state: dict[str, torch.Tensor] = {}
        extra = self._loaded.load_checkpoint(path, beside=state)
        self._online.restore(state)
        return extra

    def inspect_checkpoint(self, path: Path) -> dict[str, Any]:
        """Return the `extra` of a complete checkpoint without restoring it; called on rank 0 alone."""
        from slipstream.learner.checkpoint.on_disk import inspect_checkpoint

        return inspect_checkpoint(path)["extra"]

    def continue_draft(self, draft: Path, policy: Path, config: DraftConfig, engine_dtype: Dtype) -> None:
        """Continue to train the saved `draft` beside the policy, in float32; engines get it in `engine_dtype`."""
        require_here(draft)
        self._draft = self._online = start_training(
            self._loaded, policy, config, self._config, writes=self._rank == 0, given=draft, is_online=True
        )
        self._draft_dtype, self._sources = engine_dtype, {}

    def start_draft(
        self, policy: Path, config: DraftConfig, given: Path | None = None, token_ids: Sequence[int] | None = None
    ) -> int:
        """Make a draft that knows `token_ids` (None: all), or load the `given` one; returns its parameter count."""
        require_here(given)
        self._draft = start_training(
            self._loaded, policy, config, self._config, writes=self._rank == 0, given=given, token_ids=token_ids
        )
        self._online, self._draft_dtype, self._sources = None, None, {}
        return self._draft.num_parameters

    def hold_draft_chats(self, part: IndexedChats, config: DraftConfig) -> bool:
        """Keep this rank's share of the draft's training chats; returns True if their hidden states fit the cache.

        Hidden states that fit are captured here, in a fixed order, so that a resumed training computes the same bits.
        """
        self._draft_chats = HeldChats.of(
            part, self._loaded, self._drafting.layer_ids, cache_gib=config.pretrain.states_cache_gib
        )
        return self._draft_chats.states is not None

    def draft_step(self, indices: Sequence[int], temperature: float) -> float:
        """Update the draft on the frozen policy's hidden states of these chats; returns the loss.

        A data-parallel rank has hidden states of the chats that it holds. The ranks that split the policy between them
        split these chats as well, and the gradients are summed over all ranks.
        """
        chats = self._draft_chats
        assert chats is not None, "hold_draft_chats comes first"
        return self._drafting.step(chats.mine(indices, self._loaded), temperature=temperature)

    def evaluate_draft(self, part: Learned, temperature: float) -> DraftProgress:
        """Compute the held-out acceptance of the draft over the chats of all ranks."""
        sequences, prompt_lengths = part
        states = self._loaded.hidden_states(sequences, self._drafting.layer_ids)
        rates, length = self._drafting.evaluate(Chats(sequences, prompt_lengths, states), temperature=temperature)
        return DraftProgress(rate_by_position=tuple(rates), mean_acceptance_length=length)

    def save_draft(self, path: Path) -> None:
        """Write the draft in vLLM's format; rank 0 alone writes, and gathering an MTP layer is collective."""
        self._drafting.save(path)

    def save_draft_checkpoint(self, path: Path) -> None:
        """Write the draft's checkpoint; rank 0 alone writes, and gathering an MTP layer is collective."""
        self._drafting.save_checkpoint(path)

    def load_draft_checkpoint(self, path: Path) -> None:
        """Restore what `save_draft_checkpoint` wrote."""
        self._drafting.load_checkpoint(path)

    def location(self) -> Location:
        """Return the host and the GPU of this rank."""
        import torch

        if not torch.cuda.is_available():
            return here()
        return here(str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid))

    def weight_bytes(self) -> int:
        """Compute the size of all models that are sent to engines; collective."""
        return sum(source.num_bytes() for source in self._sent_sources())

    def publish(self, directory: Path, version: int, *, is_draft: bool = False) -> Snapshot | None:
        """Write a snapshot of the policy, or of the draft; rank 0 alone writes and returns the snapshot."""
        from slipstream.refit.stream import SnapshotWriter

        model = DRAFT if is_draft else POLICY
        source = self._source(model)
        if self._rank == 0:
            writer = self._snapshots.setdefault((directory, model), SnapshotWriter(directory, model))
            return writer.write(source, version=version)
        for _ in source:  # gathering is collective, so every rank iterates
            pass
        return None

    def open_stream(self, settings: RefitConfig, engines: EngineControl) -> None:
        """Join a channel with the engines, which rank 0 calls; leaves a channel that was open."""
        from slipstream.refit.stream import open_sender

        self.close_stream()
        self._sender = open_sender(
            settings, engines=engines, sources=self._sent_sources(), rank=self._rank, address=node_address()
        )

    def stream(self, *, is_draft: bool) -> str | None:
        """Send the policy, or the draft, to the engines; rank 0 returns the digest of the bytes, if any."""
        assert self._sender is not None, "open_stream comes first"
        return self._sender.send(self._source(DRAFT if is_draft else POLICY), is_draft=is_draft)

    def close_stream(self) -> None:
        """Leave the channel, if one is open."""
        if self._sender is not None:
            self._sender.close()
        self._sender = None

    def weight_fingerprints(
        self, dtypes: Mapping[str, str], turn: Turn, *, is_draft: bool = False
    ) -> dict[WeightPart, int]:
        """Fingerprint this rank's parts of the policy's tensors in `turn`, converted to `dtypes`.

        For the draft, and for a policy that is quantized as a whole, rank 0 alone returns fingerprints; gathering is
        collective.
        """
        if not is_draft and self._sent_as is None:
            held = (weights for weights in self._loaded.held_weights() if turn.takes(weights.parts[0].name))
            return part_fingerprints(held, dtypes)
        whole = iter(self._drafting.weights() if is_draft else self._source(POLICY))
        held = (held_whole(name, tensor) for name, tensor in whole if name in dtypes and turn.takes(name))
        if self._rank == 0:
            return part_fingerprints(held, dtypes)
        for _ in held:  # gathering is collective, so every rank iterates, and keeps no tensor
            pass
        return {}

    def _source(self, model: str) -> WeightSource:
        from slipstream.refit.stream import WeightSource

        if model not in self._sources:
            is_policy = model == POLICY
            weights = self._policy_weights if is_policy else self._drafting.weights
            self._sources[model] = WeightSource(weights, model=model, dtype=None if is_policy else self._draft_dtype)
        return self._sources[model]

    def _policy_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        from slipstream.refit.quantization import quantized

        weights = self._loaded.weights()
        return weights if self._sent_as is None else quantized(weights, self._sent_as)

    def _sent_sources(self) -> list[WeightSource]:
        return [self._source(model) for model in ((POLICY,) if self._draft_dtype is None else (POLICY, DRAFT))]

    def _generator(self, seed: int) -> torch.Generator:
        """Make a random generator on the learner's device, with a seed of its own for each data-parallel rank."""
        import torch

        data_rank = self._config.parallel.data_rank(self._rank)
        own = int(np.random.SeedSequence([seed, data_rank]).generate_state(1)[0]) if data_rank else seed
        return torch.Generator(device=self._loaded.device).manual_seed(own)

    @property
    def _loaded(self) -> MegatronPolicy:
        assert self._policy is not None, "load or create comes first"
        return self._policy

    @property
    def _drafting(self) -> LearnerDraft:
        assert self._draft is not None, "start_draft comes first"
        return self._draft

    def _load(
        self,
        path: Path,
        optimizer: OptimizerConfig | None,
        lora: LoraConfig | None = None,
        computed_as: WeightFormat | None = None,
    ) -> MegatronPolicy:
        with uncollected():
            from slipstream.learner.megatron import MegatronPolicy

        return MegatronPolicy.load(path, learner=self._config, optimizer=optimizer, lora=lora, computed_as=computed_as)


def _without_cuda() -> str:
    import torch

    return "" if torch.cuda.is_available() else "torch sees no CUDA device and would train on the CPU"


def _distribution(sampling: SamplingConfig) -> dict[str, Any]:
    return {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}


def _float32(rows: Sequence[np.ndarray]) -> Ragged:
    return Ragged.of(rows, np.float32)
