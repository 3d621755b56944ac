"""Saving and restoring a policy: its weights, its optimizer and the random state, under any layout."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from slipstream.learner import parallel
from slipstream.learner.architecture import Architecture
from slipstream.learner.checkpoint.boxes import Box, Patch, patches, pieces
from slipstream.learner.checkpoint.copying import copy_numbers
from slipstream.learner.checkpoint.on_disk import SAFETENSORS_DTYPES
from slipstream.learner.checkpoint.rank_state import (
    MAIN,
    WEIGHT,
    HeldParameter,
    Run,
    held_parameters,
    owned,
    runs,
)
from slipstream.learner.checkpoint.ranks import LearnerRanks
from slipstream.learner.checkpoint.reader import Reader, open_checkpoint
from slipstream.learner.checkpoint.writer import CheckpointWriter, Part
from slipstream.learner.weights import Shard, mappings

logger = logging.getLogger(__name__)

_BESIDE = "beside/"
_RNG_CPU, _RNG_CUDA = "rng.cpu", "rng.cuda"


class PolicyCheckpoints:
    """The checkpoints of one policy; each method is called on all ranks."""

    def __init__(self, model: torch.nn.Module, optimizer: MegatronOptimizer | None, arch: Architecture) -> None:
        self._model, self._optimizer, self._arch = model, optimizer, arch
        self._shard = parallel.current_shard()
        self._writer: CheckpointWriter | None = None
        self._patches: dict[tuple[str, int, int], list[Patch]] = {}

    def save(
        self, path: Path, *, version: int, num_updates: int, extra: dict[str, Any], beside: Mapping[str, Tensor]
    ) -> None:
        """Copy what a resumed run needs, and write it in the background; waits for the checkpoint before it.

        Args:
            beside: tensors that are no part of the policy, the same on all ranks: the main rank writes them.
        Raises:
            CheckpointWriteError: the checkpoint before it could not be written.
        """
        state = {"version": version, "num_updates": num_updates, "layout": _layout(), "extra": extra}
        if self._writer is None:
            self._writer = CheckpointWriter(self._ranks)
        self._writer.save(path, itertools.chain(self._parts(num_updates), _parts_beside(beside)), state)

    def wait(self) -> None:
        """Until nothing is being written.

        Raises:
            CheckpointWriteError: the last checkpoint could not be written.
        """
        if self._writer is not None:
            self._writer.wait()

    def raise_error(self) -> None:
        """Tell of a checkpoint that could not be written, without waiting for one that is being written."""
        if self._writer is not None:
            self._writer.raise_error()

    def load(self, path: Path, *, beside: dict[str, Tensor] | None = None) -> dict[str, Any]:
        """Restore what `save` took, under whatever layout; returns `version`, `num_updates`, `layout` and `extra`.

        Args:
            beside: is filled with the tensors that are no part of the policy.
        Raises:
            CheckpointError: a file is missing, cut short or altered; nothing has been restored.
            CheckpointStorageError: the ranks do not see the same files.
            ValueError: the checkpoint is of another model, type or optimizer; nothing has been restored.
        """
        self.wait()
        reader, state = open_checkpoint(self._ranks, path)
        num_updates = state["num_updates"]
        found = self._held
        self._require_same_model(reader, found, num_updates)
        with reader, torch.no_grad():
            for held in found:
                _restore(held, reader, num_updates)
            self._restore_rng(reader)
            if beside is not None:
                found_beside = [name for name in reader.index if name.startswith(_BESIDE)]
                beside |= {name.removeprefix(_BESIDE): reader.read_whole(name) for name in found_beside}
        if state["layout"] != _layout() and parallel.is_main_rank():
            logger.info("checkpoint %s was written under %s, read under %s", path.name, state["layout"], _layout())
        return state

    @cached_property
    def _ranks(self) -> LearnerRanks:
        # Made by the first `save` or `load`, which all ranks call at the same point.
        return LearnerRanks()

    @cached_property
    def _held(self) -> list[HeldParameter]:
        return held_parameters(self._model, self._optimizer, self._arch, self._shard)

    def _parts(self, num_updates: int) -> Iterator[Part]:
        found = [run for held in self._held for run in runs(held, num_updates=num_updates)]
        mine = owned(
            found,
            data_rank=parallel_state.get_data_parallel_rank(),
            data_size=parallel_state.get_data_parallel_world_size(),
        )
        for run in mine:
            flat = run.numbers.reshape(-1)
            for patch in self._patches_of(run):
                parts = tuple(flat[start:stop] for start, stop in patch.spans)
                yield Part(f"{run.kind}/{patch.name}", patch.whole, patch.box, parts)
        for name, state in _rng_states().items():
            shape = tuple(state.shape)
            yield Part(f"{name}/{self._ranks.rank:05d}", shape, Box((0,), shape), (state,))

    def _patches_of(self, run: Run) -> list[Patch]:
        """Worked out once for a parameter, for training waits meanwhile."""
        key = (run.held.name, run.start, run.stop)
        if key not in self._patches:
            self._patches[key] = patches(run.held.bands, tuple(run.held.parameter.shape), run.start, run.stop)
        return self._patches[key]

    def _require_same_model(self, reader: Reader, found: list[HeldParameter], num_updates: int) -> None:
        expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for held in found:
            kinds = _kinds(held, num_updates)
            expected |= {f"{kind}/{b.name}": (b.whole, dtype) for b in held.bands for kind, dtype in kinds.items()}
        for name, (shape, dtype) in expected.items():
            entry = reader.index.get(name)
            got = None if entry is None else (entry.shape, entry.dtype)
            if got != (shape, SAFETENSORS_DTYPES[dtype]):
                raise ValueError(
                    f"the checkpoint is of another model or optimizer: {name} must be {SAFETENSORS_DTYPES[dtype]} "
                    f"{shape}, got {got}"
                )
        known = {name for mapping in mappings(self._arch, Shard()) for name in mapping.hf}
        weights = {name.removeprefix(f"{WEIGHT}/") for name in reader.index if name.startswith(f"{WEIGHT}/")}
        if weights != known:
            first = min(weights ^ known)
            raise ValueError(f"the checkpoint is of another model: {WEIGHT}/{first} is in one of the two alone")

    def _restore_rng(self, reader: Reader) -> None:
        """A rank's own state; under a layout of more ranks, that of the rank that it comes to when counted round."""
        saved = [name for name in reader.index if name.startswith(f"{_RNG_CPU}/")]
        rank = f"{self._ranks.rank % len(saved):05d}"
        torch.set_rng_state(reader.read_whole(f"{_RNG_CPU}/{rank}"))
        if torch.cuda.is_available() and f"{_RNG_CUDA}/{rank}" in reader.index:
            torch.cuda.set_rng_state(reader.read_whole(f"{_RNG_CUDA}/{rank}"))


def _parts_beside(tensors: Mapping[str, Tensor]) -> Iterator[Part]:
    if parallel.is_main_rank():
        for name, tensor in tensors.items():
            shape = tuple(tensor.shape)
            yield Part(f"{_BESIDE}{name}", shape, Box((0,) * len(shape), shape), (tensor.reshape(-1),))


def _layout() -> dict[str, int]:
    return {
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "data": parallel_state.get_data_parallel_world_size(),
        "expert": parallel_state.get_expert_model_parallel_world_size(),
    }


def _rng_states() -> Mapping[str, Tensor]:
    states = {_RNG_CPU: torch.get_rng_state()}
    return {**states, _RNG_CUDA: torch.cuda.get_rng_state()} if torch.cuda.is_available() else states


def _kinds(held: HeldParameter, num_updates: int) -> dict[str, torch.dtype]:
    kinds = {WEIGHT: held.parameter.dtype}
    if held.stepped is not None and held.has_main:
        kinds[MAIN] = torch.float32
    if held.stepped is not None and num_updates > 0:
        kinds |= dict.fromkeys(held.stepped.moments, torch.float32)
    return kinds


def _restore(held: HeldParameter, reader: Reader, num_updates: int) -> None:
    parameter, stepped = held.parameter, held.stepped
    shape = tuple(parameter.shape)

    def read(kind: str, like: Tensor, start: int, stop: int) -> Tensor:
        numbers = torch.empty(stop - start, dtype=like.dtype)
        for piece in pieces(held.bands, shape, start, stop):
            reader.read(f"{kind}/{piece.name}", piece.box, into=numbers[piece.start : piece.stop].view(piece.box.shape))
        return numbers.view(like.shape)

    copy_numbers(read(WEIGHT, parameter, 0, parameter.numel()), into=parameter)
    if stepped is None:
        return
    main = stepped.main
    if held.has_main:
        copy_numbers(read(MAIN, main, stepped.start, stepped.stop), into=main)
    state = stepped.optimizer.state
    state.pop(main, None)
    if num_updates == 0:
        return
    state[main] = {
        moment: read(moment, main, stepped.start, stepped.stop).to(main.device) for moment in stepped.moments
    }
    if stepped.counts_by_parameter:
        state[main]["step"] = torch.tensor(float(num_updates), device=main.device)
    elif "exp_avg" in stepped.moments:
        for group in stepped.optimizer.param_groups:
            group["step"] = num_updates
