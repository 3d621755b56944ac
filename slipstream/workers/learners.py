"""Driver's proxy for the learner's ranks; every method runs on all ranks at once.

A batch is divided over the data-parallel ranks, and the answers are put back into the batch's order. A call without a
batch returns rank 0's answer.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import ray

from slipstream.config import require
from slipstream.drafts.config import DraftConfig
from slipstream.drafts.pretrain import DraftProgress
from slipstream.engine.config import SamplingConfig
from slipstream.grpo.config import OptimizerConfig
from slipstream.grpo.update import part_of, part_of_batch
from slipstream.learner.config import LearnerConfig, ParallelConfig, ScratchConfig
from slipstream.learner.packing import plan_shards
from slipstream.ragged import Ragged
from slipstream.refit.channel import EngineControl, Location, Snapshot
from slipstream.refit.fingerprint import Turn, weight_totals
from slipstream.types import Dtype, TrainBatch
from slipstream.workers.calls import Crew, Deadline, Idle, Proxy, Worker, started
from slipstream.workers.learner_process import LearnerProcess
from slipstream.workers.placement.config import Layout
from slipstream.workers.reservation import reserved
from slipstream.workers.session import actor_environment, own_node

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slipstream.grpo.update import Trained, Update
    from slipstream.refit.config import RefitConfig

Sequences = Sequence[Sequence[int]]
T = TypeVar("T")
_GRACE_S = 30.0  # added to a sender's own deadline, whose error names the engine that missed it


@dataclass(frozen=True, slots=True)
class Shards:
    """Division of a batch over data-parallel ranks, balanced by tokens; a rank may get none."""

    indices: tuple[tuple[int, ...], ...]  # of the sequences, by data-parallel rank

    @classmethod
    def of(cls, sequences: Sequence[Any], num_ranks: int) -> Shards:
        """Divide the sequences."""
        return cls(tuple(plan_shards([len(sequence) for sequence in sequences], num_ranks)))

    @classmethod
    def of_update(cls, sequences: Sequence[Any], num_ranks: int) -> Shards:
        """Divide the sequences of an optimizer update, where every rank needs at least one."""
        num, rule = len(sequences), f"must have a sequence for each of {num_ranks} data-parallel ranks"
        require(num >= num_ranks, "an update", rule, num, "lower learner.parallel.data, or take more rollouts a step")
        return cls.of(sequences, num_ranks)

    def in_order(self, answers: Sequence[Sequence[T]]) -> list[T]:
        """Put the ranks' answers, one a sequence, into the batch's order."""
        by_index = {
            index: answer
            for indices, rows in zip(self.indices, answers, strict=True)
            for index, answer in zip(indices, rows, strict=True)
        }
        return [by_index[index] for index in range(len(by_index))]


class RemoteLearner(Proxy):
    """Driver's proxy for the ranks of one learner; `LearnerProcess` documents the methods and their shapes.

    A rank runs its calls in the order in which they are made. A call that was started therefore sees the weights of
    that moment, whatever call follows.
    """

    def __init__(self, ranks: Sequence[Worker], layout: ParallelConfig, deadline: Deadline) -> None:
        super().__init__(ranks, deadline)
        self._layout = layout

    def load(self, path: Path, optimizer: OptimizerConfig | None, **how: Any) -> None:
        """Load the policy, `how` as `LearnerProcess.load` documents."""
        self._on_all("load", lambda rank: rank.load.remote(path, optimizer, **how))

    def create(self, scratch: ScratchConfig, vocab_size: int, eos_token_id: int, optimizer: OptimizerConfig) -> int:
        """Make a policy with random weights; returns the number of parameters."""
        return self._on_all("create", lambda rank: rank.create.remote(scratch, vocab_size, eos_token_id, optimizer))

    def lm_step(self, sequences: Sequences, loss_starts: Sequence[int], *, learning_rate: float | None = None) -> float:
        """Update the policy on the next-token loss; returns the loss."""
        answers = self._on_shards(
            "lm_step",
            Shards.of_update(sequences, self._layout.data),
            partial(_chats, sequences, loss_starts),
            lambda rank, data: rank.lm_step.remote(data, learning_rate=learning_rate),
        )
        return answers[0]

    def mtp_loss(self) -> float | None:
        """Loss of the policy's MTP layer in the last `lm_step`; None for a policy without one."""
        return self._on_all("mtp_loss", lambda rank: rank.mtp_loss.remote())

    def logprobs(self, batch: TrainBatch, temperature: float) -> list[NDArray[np.float32]]:
        """Compute the trainer logprobs of the response tokens."""
        return self._on_batch("logprobs", batch, lambda rank, data: rank.logprobs.remote(data, temperature))

    def ref_logprobs(self, batch: TrainBatch, temperature: float) -> list[NDArray[np.float32]] | None:
        """Compute the response tokens' logprobs under the reference policy; None without a reference."""
        return self._on_batch("ref_logprobs", batch, lambda rank, data: rank.ref_logprobs.remote(data, temperature))

    def token_logprobs(self, sequences: Sequences) -> list[NDArray[np.float32]]:
        """Compute the logprob of each token but the first, at temperature 1."""
        return self._by_sequence(
            "token_logprobs", sequences, partial(_rows, sequences), lambda rank, data: rank.token_logprobs.remote(data)
        )

    def conditionals(
        self, sequences: Sequences, prompt_lengths: Sequence[int], sampling: SamplingConfig, *, seed: int
    ) -> NDArray[np.float64]:
        """Compute the conditionals of each response token."""
        by_sequence = self._by_sequence(
            "conditionals",
            sequences,
            partial(_chats, sequences, prompt_lengths),
            lambda rank, data: rank.conditionals.remote(data, sampling, seed=seed),
        )
        return np.concatenate(by_sequence)

    def next_token_probabilities(self, prefixes: Sequences, sampling: SamplingConfig) -> NDArray[np.float64]:
        """Compute the distribution that is sampled after each prefix."""
        by_prefix = self._by_sequence(
            "next_token_probabilities",
            prefixes,
            partial(_rows, prefixes),
            lambda rank, data: rank.next_token_probabilities.remote(data, sampling),
        )
        return np.stack(by_prefix)

    def train_step(self, update: Update) -> Trained:
        """Update the policy, and the draft where `update` says so."""
        shards = Shards.of_update(update.batch.token_ids, self._layout.data)
        answers: list[Trained] = self._on_shards(
            _of("train_step", update.batch),
            shards,
            partial(part_of, update),
            lambda rank, data: rank.train_step.remote(data),
        )
        own = [answer.own_logprobs for answer in answers if answer.own_logprobs is not None]
        return replace(answers[0], own_logprobs=shards.in_order(own) if own else None)

    def save_hf(self, path: Path, tokenizer_dir: Path) -> None:
        """Write the policy in Hugging Face format."""
        self._require_shared(path)
        self._on_all("save_hf", lambda rank: rank.save_hf.remote(path, tokenizer_dir))

    def save_checkpoint(self, path: Path, extra: dict[str, Any]) -> None:
        """Write a checkpoint in the background; the learner's next checkpoint call raises an error of the write."""
        self._require_shared(path)
        self._on_all("save_checkpoint", lambda rank: rank.save_checkpoint.remote(path, extra))

    def finish_checkpoint(self, *, timeout_s: float | None = None) -> None:
        """Wait until the checkpoint is written."""
        deadline = None if timeout_s is None else Deadline(timeout_s, "fixed")
        self._on_all("finish_checkpoint", lambda rank: rank.finish_checkpoint.remote(), deadline=deadline)

    def load_checkpoint(self, path: Path) -> dict[str, Any]:
        """Restore what `save_checkpoint` wrote; returns its `extra`."""
        return self._on_all("load_checkpoint", lambda rank: rank.load_checkpoint.remote(path))

    def inspect_checkpoint(self, path: Path) -> dict[str, Any]:
        """Return the `extra` of a complete checkpoint without restoring it."""
        return self._of_first("inspect_checkpoint", lambda rank: rank.inspect_checkpoint.remote(path))

    def continue_draft(self, draft: Path, policy: Path, config: DraftConfig, engine_dtype: Dtype) -> None:
        """Continue to train a saved draft beside the policy."""
        self._on_all("continue_draft", lambda rank: rank.continue_draft.remote(draft, policy, config, engine_dtype))

    def start_draft(
        self, policy: Path, config: DraftConfig, given: Path | None = None, token_ids: Sequence[int] | None = None
    ) -> int:
        """Make a fresh draft, or load the `given` draft; returns the number of trained parameters."""
        return self._on_all("start_draft", lambda rank: rank.start_draft.remote(policy, config, given, token_ids))

    def hold_draft_chats(self, sequences: Sequences, prompt_lengths: Sequence[int], config: DraftConfig) -> bool:
        """Hand over the draft's training chats; returns True if their hidden states fit every rank's cache."""
        fits = self._on_shards(
            "hold_draft_chats",
            Shards.of(sequences, self._layout.data),
            lambda indices: (indices, *_chats(sequences, prompt_lengths, indices)),
            lambda rank, data: rank.hold_draft_chats.remote(data, config),
        )
        return all(fits)

    def draft_step(self, indices: Sequence[int], temperature: float) -> float:
        """Update the draft on the chats of these indices; returns the loss."""
        return self._on_all("draft_step", lambda rank: rank.draft_step.remote(indices, temperature))

    def evaluate_draft(self, sequences: Sequences, prompt_lengths: Sequence[int], temperature: float) -> DraftProgress:
        """Compute the held-out acceptance of the draft."""
        answers = self._on_shards(
            "evaluate_draft",
            Shards.of(sequences, self._layout.data),
            partial(_chats, sequences, prompt_lengths),
            lambda rank, data: rank.evaluate_draft.remote(data, temperature),
        )
        return answers[0]

    def save_draft(self, path: Path) -> None:
        """Write the draft in vLLM's format."""
        self._require_shared(path)
        self._on_all("save_draft", lambda rank: rank.save_draft.remote(path))

    def save_draft_checkpoint(self, path: Path) -> None:
        """Write the draft's checkpoint."""
        self._require_shared(path)
        self._on_all("save_draft_checkpoint", lambda rank: rank.save_draft_checkpoint.remote(path))

    def load_draft_checkpoint(self, path: Path) -> None:
        """Restore what `save_draft_checkpoint` wrote."""
        self._on_all("load_draft_checkpoint", lambda rank: rank.load_draft_checkpoint.remote(path))

    def locations(self) -> list[Location]:
        """Return the host and the GPU of each rank."""
        return self._crew.ask("location", lambda rank: rank.location.remote())

    def weight_bytes(self) -> int:
        """Compute the size of all models that are sent to engines."""
        return self._on_all("weight_bytes", lambda rank: rank.weight_bytes.remote())

    def start_publish(self, directory: Path, version: int, *, is_draft: bool = False) -> Callable[[], Snapshot]:
        """Begin to write the present policy, or the draft, as a snapshot; returns a function that waits for it."""
        what = f"publish of {'draft' if is_draft else 'policy'} version {version}"
        wait = self._crew.start(what, lambda rank: rank.publish.remote(directory, version, is_draft=is_draft))
        return lambda: wait()[0]

    def open_stream(self, settings: RefitConfig, engines: EngineControl) -> None:
        """Join a channel with the engines; raises as `Crew.gather` does, as engines may be lost as well as ranks."""
        what, deadline = f"opening the {settings.channel.value} channel", _sending(settings.timeout_s)
        self._on_all(what, lambda rank: rank.open_stream.remote(settings, engines), deadline=deadline)

    def stream(self, *, is_draft: bool, timeout_s: float) -> str | None:
        """Send the policy, or the draft, to the engines that joined; raises as `open_stream` does."""
        what = f"sending the {'draft' if is_draft else 'policy'}"
        return self._on_all(what, lambda rank: rank.stream.remote(is_draft=is_draft), deadline=_sending(timeout_s))

    def close_stream(self) -> None:
        """Leave the channel."""
        self._on_all("close_stream", lambda rank: rank.close_stream.remote())

    def start_fingerprints(
        self, dtypes: Mapping[str, str], turn: Turn, *, is_draft: bool = False
    ) -> Callable[[], dict[str, int]]:
        """Begin to fingerprint the tensors in `turn` as engines with these types must hold them; returns a wait."""
        what = "draft_fingerprints" if is_draft else "weight_fingerprints"
        wait = self._crew.start(what, lambda rank: rank.weight_fingerprints.remote(dtypes, turn, is_draft=is_draft))
        return lambda: weight_totals(wait())

    def offload(self) -> None:
        """Offload gradients and optimizer state; each rank onloads them for its next update."""
        self._on_all("offload", lambda rank: rank.offload.remote())

    def release(self) -> None:
        """Release policy, optimizer and draft; the ranks' processes stay."""
        self._on_all("release", lambda rank: rank.release.remote())

    def _on_all(self, what: str, call: Callable[[Any], Any], *, deadline: Deadline | None = None) -> Any:
        return self._crew.ask(what, call, deadline=deadline)[0]

    def _require_shared(self, path: Path) -> None:
        """Refuse a directory that a rank's host does not see, as driver and ranks read one another's files."""
        if all(rank.node_id == own_node() for rank in self.workers):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".seen-") as mark:
            seen = self._crew.ask("sees", lambda rank: rank.sees.remote(Path(mark.name)))
        blind = [str(rank) for rank, sees in zip(self.workers, seen, strict=True) if not sees]
        rule = "must be on storage that all hosts of the learner share"
        found = f"no such directory for {', '.join(blind)}"
        require(not blind, str(path.parent), rule, found, "give the run another --root")

    def _on_shards(
        self, what: str, shards: Shards, part: Callable[[Sequence[int]], Any], call: Callable[[Any, Any], Any]
    ) -> list[Any]:
        """Call every rank with its data-parallel rank's part of a batch; returns one answer a data-parallel rank."""
        data = [part(indices) for indices in shards.indices]
        if self._layout.world_size > self._layout.data:  # several ranks read each part
            data = [ray.put(each) for each in data]
        calls = [(rank, call(rank.actor, data[self._layout.data_rank(i)])) for i, rank in enumerate(self.workers)]
        answers = self._crew.gather(what, calls)
        copies = self._layout.tensor * self._layout.context  # ranks of a stage that give the same answer
        return answers[: copies * self._layout.data : copies]

    def _on_batch(self, what: str, batch: TrainBatch, call: Callable[[Any, Any], Any]) -> Any:
        return self._by_sequence(_of(what, batch), batch.token_ids, partial(part_of_batch, batch), call)

    def _by_sequence(
        self, what: str, sequences: Sequence[Any], part: Callable[[Sequence[int]], Any], call: Callable[[Any, Any], Any]
    ) -> Any:
        """Call every rank with its part of `sequences`; returns an answer a sequence, in order, or None as ranks do."""
        shards = Shards.of(sequences, self._layout.data)
        answers = self._on_shards(what, shards, part, call)
        return None if answers[0] is None else shards.in_order(answers)


def _sending(timeout_s: float) -> Deadline:
    return Deadline(timeout_s + _GRACE_S, f"refit.timeout_s + {_GRACE_S:g}")


def _of(what: str, batch: TrainBatch) -> str:
    return f"{what} of policy version {batch.policy_version}"


_ANYWHERE = Layout()
idle_learners: Idle[RemoteLearner] = Idle()


@contextmanager
def start_learner(config: LearnerConfig, *, layout: Layout = _ANYWHERE) -> Iterator[RemoteLearner]:
    """Start the learner's ranks on the GPUs of `layout`, without a model.

    The end of the block closes the ranks. If `config.num_kept_idle` > 0, the ranks release their models and stay alive
    for a later block with the same settings. After an exception the ranks are closed.
    """
    capacity = config.num_kept_idle
    with idle_learners.lent(repr((config, layout)), lambda: _new_learner(config, layout), capacity=capacity) as lent:
        learner, _ = lent
        yield learner
        if capacity:
            learner.release()


def _new_learner(config: LearnerConfig, layout: Layout) -> RemoteLearner:
    world_size, reservation = config.parallel.world_size, reserved(layout)
    places = [reservation.learner_place(rank) if reservation else {"num_gpus": 0} for rank in range(world_size)]
    return start_ranks(config, places, logical_gpus=layout.placement.logical_gpus)


def start_ranks(
    config: LearnerConfig, places: Sequence[Mapping[str, Any]], *, logical_gpus: bool = False
) -> RemoteLearner:
    """Start the learner's ranks, and form their process group; `places` has Ray's placement options of each rank."""
    own = {} if config.num_threads is None else {"OMP_NUM_THREADS": str(config.num_threads)}
    # With one hardware queue a GPU starts a collective before the product that Megatron runs beside it.
    own["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    options = {"num_cpus": 0, "runtime_env": {"env_vars": actor_environment(own)}}
    actor = ray.remote(LearnerProcess)
    starting = Deadline(config.start_timeout_s, "learner.start_timeout_s")
    begun = [
        actor.options(**options, **place).remote(config, rank=rank, world_size=len(places), logical_gpus=logical_gpus)
        for rank, place in enumerate(places)
    ]
    ranks = started([Worker(each, f"learner rank {rank}") for rank, each in enumerate(begun)], starting)
    answering = Deadline(config.answer_timeout_s, "learner.answer_timeout_s")
    learner = RemoteLearner(ranks, config.parallel, answering)
    try:
        _join(ranks, starting)
    except BaseException:
        learner.close()
        raise
    return learner


def _join(ranks: Sequence[Worker], deadline: Deadline) -> None:
    """Form one process group: rank 0 listens on its host, and the other ranks connect to that address."""
    if len(ranks) == 1 and ranks[0].host == "127.0.0.1":
        return  # on a cluster gloo needs its interface named, as the host's name may have no address
    host = ranks[0].host
    (port,) = Crew(ranks[:1], deadline).ask("listen", lambda rank: rank.listen.remote(host))
    calls = [(rank, rank.actor.join.remote(host, port, own_address=rank.host)) for rank in ranks]
    Crew(ranks, deadline).gather("join", calls)


def _chats(sequences: Sequences, prompt_lengths: Sequence[int], indices: Sequence[int]) -> tuple[Ragged, list[int]]:
    return _rows(sequences, indices), [prompt_lengths[index] for index in indices]


def _rows(sequences: Sequences, indices: Sequence[int]) -> Ragged:
    return Ragged.of([sequences[index] for index in indices], np.int32)
