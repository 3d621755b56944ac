"""What a learner process sends to engines: its policy and its draft, and the fingerprints that engines must have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.refit.channel import choice
from slipstream.refit.channel.choice import Location
from slipstream.refit.fingerprint import Turn, WeightPart, held_whole, part_fingerprints
from slipstream.refit.snapshot import Snapshot, SnapshotWriter
from slipstream.types import Dtype

if TYPE_CHECKING:
    from slipstream.drafts.learner_draft import LearnerDraft
    from slipstream.learner.megatron import MegatronPolicy
    from slipstream.refit.channel.sender import EngineControl, Sender, Sent, StreamSettings
    from slipstream.refit.channel.source import WeightSource

POLICY, DRAFT = "policy", "draft"  # the models whose weights travel


class SendingRank(ABC):
    """One rank of the learner, as far as weights leave it; every method is called on all ranks."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._sources: dict[str, WeightSource] = {}  # by model
        self._draft_dtype: Dtype | None = None  # of the engines; None: they keep the draft that they start with
        self._snapshots: dict[tuple[Path, str], SnapshotWriter] = {}  # by directory and model
        self._sender: Sender | None = None

    @property
    @abstractmethod
    def _loaded(self) -> MegatronPolicy:
        """The policy."""

    @property
    @abstractmethod
    def _drafting(self) -> LearnerDraft:
        """The draft."""

    @abstractmethod
    def _at_work(self) -> AbstractContextManager[None]:
        """In whose block the cores of the host are shared with engines that work too."""

    def is_new(self, model: str, *, draft_dtype: Dtype | None = None) -> None:
        """Another one is loaded: what was known of its tensors is forgotten.

        Args:
            draft_dtype: in which engines compute a draft that is sent to them; None: no draft is.
        """
        self._sources.pop(model, None)
        if model == DRAFT:
            self._draft_dtype = draft_dtype

    def send_nothing(self) -> None:
        """Leave the channel, and forget all that was sent."""
        self.close_stream()
        self._sources, self._snapshots, self._draft_dtype = {}, {}, None

    def location(self) -> Location:
        """Where this rank computes."""
        import torch

        if not torch.cuda.is_available():
            return choice.here()
        return choice.here(str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid))

    def weight_bytes(self) -> int:
        """Size of all models as they are sent to engines; collective."""
        return sum(source.num_bytes() for source in self._sent_sources())

    def publish(self, directory: Path, version: int) -> Snapshot | None:
        """Write the policy for engines on this host; rank 0 alone writes and returns the snapshot."""
        return self._publish(POLICY, directory, version)

    def publish_draft(self, directory: Path, version: int) -> Snapshot | None:
        """The same of the draft."""
        return self._publish(DRAFT, directory, version)

    def open_stream(self, settings: StreamSettings, engines: EngineControl) -> None:
        """Join a channel with the engines, which rank 0 steers; one that was open is left."""
        from slipstream.refit.channel.opening import open_sender
        from slipstream.workers.engine_control import node_address

        self.close_stream()
        self._sender = open_sender(
            settings, engines=engines, sources=self._sent_sources(), rank=self._rank, address=node_address()
        )

    def stream(self, *, is_draft: bool) -> Sent:
        """Send the policy, or the draft, to the engines; what rank 0 returns counts."""
        assert self._sender is not None, "open_stream comes first"
        return self._sender.send(self._source(DRAFT if is_draft else POLICY), is_draft=is_draft)

    def close_stream(self) -> None:
        """Leave the channel, if there is one."""
        if self._sender is not None:
            self._sender.close()
        self._sender = None

    def weight_fingerprints(self, dtypes: Mapping[str, str], turn: Turn) -> dict[WeightPart, int]:
        """Fingerprints, as these types, of the parts of the policy that this rank answers for and whose turn it is."""
        held = (weights for weights in self._loaded.held_weights() if turn.takes(weights.parts[0].name))
        return part_fingerprints(held, dtypes)

    def draft_fingerprints(self, dtypes: Mapping[str, str], turn: Turn) -> dict[WeightPart, int]:
        """The same of the draft, from rank 0 alone; gathering an MTP layer is collective."""
        named = {name: tensor for name, tensor in self._drafting.weights() if name in dtypes and turn.takes(name)}
        if self._rank:
            return {}
        return part_fingerprints((held_whole(name, tensor) for name, tensor in named.items()), dtypes)

    def _source(self, model: str) -> WeightSource:
        from slipstream.refit.channel.source import WeightSource

        if model not in self._sources:
            is_policy = model == POLICY
            weights = self._loaded.weights if is_policy else self._drafting.weights
            self._sources[model] = WeightSource(weights, model=model, dtype=None if is_policy else self._draft_dtype)
        return self._sources[model]

    def _sent_sources(self) -> list[WeightSource]:
        return [self._source(model) for model in ((POLICY,) if self._draft_dtype is None else (POLICY, DRAFT))]

    def _publish(self, model: str, directory: Path, version: int) -> Snapshot | None:
        source = self._source(model)
        with self._at_work():
            if self._rank == 0:
                writer = self._snapshots.setdefault((directory, model), SnapshotWriter(directory, model))
                return writer.write(source, version=version)
            for _ in source:  # gathering is collective: every rank must run through it
                pass
        return None
