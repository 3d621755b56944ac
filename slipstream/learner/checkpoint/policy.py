"""Save and restore a policy under any layout: weights, optimizer state and random state.

Each parameter has its `weight`, a float32 master `main` where the weight is of lower precision, and the optimizer's
moments: `exp_avg` and `exp_avg_sq` of AdamW, `momentum_buffer` of Muon. All of them have the parameter's shape and
layout. A logical tensor is named `kind/Hugging Face name`.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from slipstream.learner import parallel
from slipstream.learner.architecture import Architecture
from slipstream.learner.checkpoint.boxes import Box, bands, patches
from slipstream.learner.checkpoint.on_disk import DTYPES, CheckpointWriter, LearnerRanks, Part, Reader, open_checkpoint
from slipstream.learner.lora import Adapters
from slipstream.learner.optimizer import Stepped, stepped_parameters
from slipstream.learner.weights import ParameterMapping, Shard, mappings

WEIGHT, MAIN = "weight", "main"
logger = logging.getLogger(__name__)
_BESIDE = "beside/"
_RNG_CPU, _RNG_CUDA = "rng.cpu", "rng.cuda"


@dataclass(frozen=True, slots=True)
class HeldParameter:
    """A parameter of this rank."""

    mapping: ParameterMapping
    parameter: torch.nn.Parameter
    stepped: Stepped | None  # None without an optimizer, or where other data-parallel ranks step all of it


@dataclass(frozen=True, slots=True)
class Run:
    """The elements of one kind of a parameter from `start` on, in flat order."""

    kind: str
    held: HeldParameter
    numbers: Tensor
    start: int
    is_sharded: bool


def held_parameters(
    model: torch.nn.Module, optimizer: MegatronOptimizer | None, table: Iterable[ParameterMapping]
) -> list[HeldParameter]:
    """The parameters of a rank in model order; `table` must name all that are not frozen."""
    parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
    stepped = {} if optimizer is None else {each.parameter: each for each in stepped_parameters(optimizer)}
    is_sharded = any(each.is_sharded for each in stepped.values())
    assert optimizer is None or is_sharded or stepped.keys() == set(parameters.values())
    named = {mapping.megatron: mapping for mapping in table}
    assert parameters.keys() == named.keys()
    return [HeldParameter(mapping, parameters[name], stepped.get(parameters[name])) for name, mapping in named.items()]


def runs(held: HeldParameter, *, num_updates: int) -> Iterator[Run]:
    """Yield every tensor that the next update of a parameter depends on.

    Raises:
        ValueError: the optimizer keeps an unknown state, or its count of updates is not `num_updates`.
    """
    stepped, name = held.stepped, held.mapping.megatron
    yield Run(WEIGHT, held, held.parameter.detach(), 0, is_sharded=False)
    if stepped is None:
        return
    state = {MAIN: stepped.main.detach(), **({} if num_updates == 0 else stepped.optimizer.state[stepped.main])}
    kinds = [kind for kind in _kinds(held, num_updates) if kind != WEIGHT]
    if unknown := sorted((state.keys() ^ set(kinds)) - {MAIN, "step"}):
        rule = f"the optimizer's state of {name} must be {sorted(stepped.moments)} to be saved"
        raise ValueError(f"{rule}, differs in {unknown}")
    counts = stepped.counts() if num_updates else []
    if any(count != num_updates for count in counts):  # Adam corrects moments by it: the next updates would differ
        raise ValueError(f"the optimizer of {name} must have made the policy's {num_updates} updates, got {counts}")
    for kind in kinds:
        yield Run(kind, held, state[kind], stepped.start, stepped.is_sharded)


def owned(found: list[Run], shard: Shard, *, num_copies: int) -> Iterator[Run]:
    """Choose the runs that this rank writes: each element once over all ranks, and about equally many bytes a rank.

    The `num_copies` data- and context-parallel ranks hold equal runs in equal order, and the rank with the fewest bytes
    takes the next run. Exempt are the shards of a distributed optimizer, which each rank writes, and experts, which
    their first copy writes.
    """
    num_bytes = [0] * num_copies
    for run in found:
        mapping = run.held.mapping
        if shard.is_model_copy(mapping):
            continue
        if run.is_sharded:
            is_mine = True
        elif mapping.is_expert:
            is_mine = not shard.is_copy(mapping)
        else:
            owner = num_bytes.index(min(num_bytes))
            num_bytes[owner] += run.numbers.nbytes
            is_mine = owner == shard.data_rank
        if is_mine:
            yield run


class PolicyCheckpoints:
    """Checkpoints of one policy; every rank calls each method."""

    def __init__(
        self, model: torch.nn.Module, optimizer: MegatronOptimizer | None, arch: Architecture, adapters: Adapters | None
    ) -> None:
        """Save and restore the model's parameters, or its adapters beside a fingerprint of the frozen parameters."""
        self._model, self._optimizer, self._arch, self._adapters = model, optimizer, arch, adapters
        self._table = mappings if adapters is None else adapters.table
        self._shard = parallel.current_shard()
        self._writer: CheckpointWriter | None = None

    def save(
        self, path: Path, *, version: int, num_updates: int, extra: dict[str, Any], beside: Mapping[str, Tensor]
    ) -> None:
        """Copy what a resumed run needs and write it in the background; waits for the checkpoint before.

        Args:
            beside: tensors outside the policy, the same on all ranks; the main rank writes them.
        """
        layout = parallel.layout()
        state = {"version": version, "num_updates": num_updates, "layout": layout, "extra": extra, "rope": self._rope}
        if self._adapters is not None:
            state["frozen"] = self._all_frozen
        if self._writer is None:
            self._writer = CheckpointWriter(self._ranks)
        mine = owned(self._runs(num_updates), self._shard, num_copies=parallel.copies_group().size())
        parts = (part for run in mine for part in self._parts(run))
        others = self._rng_states()
        if parallel.is_main_rank():
            others |= {f"{_BESIDE}{name}": tensor for name, tensor in beside.items()}
        self._writer.save(path, itertools.chain(parts, itertools.starmap(_whole, others.items())), state)

    def wait(self) -> None:
        """Wait until nothing is being written, and raise the error of the last checkpoint."""
        if self._writer is not None:
            self._writer.wait()

    def raise_error(self) -> None:
        """Raise the error of a checkpoint that failed, without waiting for one that is being written."""
        if self._writer is not None:
            self._writer.raise_error()

    def load(self, path: Path, *, beside: dict[str, Tensor] | None = None) -> dict[str, Any]:
        """Restore a checkpoint of any layout; returns its `version`, `num_updates`, `layout` and `extra`.

        Args:
            beside: filled with the tensors outside the policy.
        Raises:
            CheckpointError: a file is missing, truncated or altered; nothing has been restored.
            CheckpointStorageError: the ranks do not see the same files.
            ValueError: the checkpoint has another model, type or optimizer; nothing has been restored.
        """
        self.wait()
        reader, state = open_checkpoint(self._ranks, path)
        num_updates = state["num_updates"]
        self._require_same_model(reader, num_updates)
        rope = state.get("rope", self._rope)
        if rope != self._rope:
            raise ValueError(f"the checkpoint is of another model: rope_parameters must be {self._rope}, got {rope}")
        if state.get("frozen") != self._all_frozen:
            rule = "the checkpoint is of another model: fingerprint of the frozen weights must be"
            raise ValueError(f"{rule} {self._all_frozen}, got {state.get('frozen')}")
        for held in self._held:
            if held.stepped is not None:
                held.stepped.reset(num_updates)
        with reader, torch.no_grad():
            for run in self._runs(num_updates):
                for part in self._parts(run):
                    reader.read(part.name, part.box, into=part.numbers)
            self._restore_rng(reader)
            if beside is not None:
                found_beside = [name for name in reader.index if name.startswith(_BESIDE)]
                beside |= {name.removeprefix(_BESIDE): reader.read_whole(name) for name in found_beside}
        written, layout = state["layout"], parallel.layout()
        if written != layout and parallel.is_main_rank():
            logger.info("checkpoint %s was written under %s, read under %s", path.name, written, layout)
        return state

    @property
    def _rope(self) -> dict[str, Any]:
        """Parameters of the rotary embedding, which no shape of a weight tells."""
        return self._arch.positions_to_hf()["rope_parameters"]

    @cached_property
    def _ranks(self) -> LearnerRanks:
        # The first `save` or `load` makes the process group, because all ranks call both at the same point.
        return LearnerRanks()

    @cached_property
    def _all_frozen(self) -> str | None:
        """Fingerprint of the frozen weights of all ranks, the same under every layout."""
        if self._adapters is None:
            return None
        return f"{sum(self._ranks.gather(self._adapters.fingerprint)) % 2**64:016x}"

    @cached_property
    def _held(self) -> list[HeldParameter]:
        return held_parameters(self._model, self._optimizer, self._table(self._arch, self._shard))

    def _runs(self, num_updates: int) -> list[Run]:
        return [run for held in self._held for run in runs(held, num_updates=num_updates)]

    def _parts(self, run: Run) -> Iterator[Part]:
        flat, shape = run.numbers.view(-1), tuple(run.held.parameter.shape)
        stop = run.start + len(flat)
        for patch in patches(run.held.mapping, shape, run.start, stop, self._arch, self._shard):
            numbers = flat[patch.start : patch.start + patch.box.numel].view(patch.box.shape)
            yield Part(f"{run.kind}/{patch.name}", patch.whole, patch.box, numbers)

    def _rng_states(self) -> dict[str, Tensor]:
        states = {_RNG_CPU: torch.get_rng_state()}
        if torch.cuda.is_available():
            states[_RNG_CUDA] = torch.cuda.get_rng_state()
        return {f"{name}/{self._ranks.rank:05d}": state for name, state in states.items()}

    def _require_same_model(self, reader: Reader, num_updates: int) -> None:
        expected: dict[str, tuple[tuple[int, ...], str]] = {}
        for held in self._held:
            parts = bands(held.mapping, tuple(held.parameter.shape), self._arch, self._shard)
            kinds = _kinds(held, num_updates).items()
            expected |= {f"{kind}/{part.name}": (part.whole, DTYPES[dtype]) for part in parts for kind, dtype in kinds}
        for name, (shape, dtype) in expected.items():
            slices = reader.index.get(name)
            got = None if slices is None else (slices[0].whole, slices[0].dtype)
            if got != (shape, dtype):
                rule = f"{name} must be {dtype} {shape}"
                raise ValueError(f"the checkpoint is of another model or optimizer: {rule}, got {got}")
        known = {name for mapping in self._table(self._arch, Shard()) for name in mapping.hf}
        weights = {name.removeprefix(f"{WEIGHT}/") for name in reader.index if name.startswith(f"{WEIGHT}/")}
        if weights != known:
            first = min(weights ^ known)
            raise ValueError(f"the checkpoint is of another model: {WEIGHT}/{first} is in one of the two alone")

    def _restore_rng(self, reader: Reader) -> None:
        """Restore this rank's state; ranks beyond the saved ones take the saved states again, from the first on."""
        saved = [name for name in reader.index if name.startswith(f"{_RNG_CPU}/")]
        rank = f"{self._ranks.rank % len(saved):05d}"
        torch.set_rng_state(reader.read_whole(f"{_RNG_CPU}/{rank}"))
        if torch.cuda.is_available() and f"{_RNG_CUDA}/{rank}" in reader.index:
            torch.cuda.set_rng_state(reader.read_whole(f"{_RNG_CUDA}/{rank}"))


def _whole(name: str, tensor: Tensor) -> Part:
    shape = tuple(tensor.shape)
    return Part(name, shape, Box((0,) * len(shape), shape), tensor)


def _kinds(held: HeldParameter, num_updates: int) -> dict[str, torch.dtype]:
    """Kinds of tensors of a parameter, and their types; before its first update an optimizer has no moments."""
    kinds = {WEIGHT: held.parameter.dtype}
    if held.stepped is not None:
        masters = [] if held.parameter.dtype is torch.float32 else [MAIN]
        kinds |= dict.fromkeys([*masters, *(held.stepped.moments if num_updates else ())], torch.float32)
    return kinds
