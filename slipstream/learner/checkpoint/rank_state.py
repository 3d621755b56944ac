"""What of a model and its optimizer a rank holds, and which of it this rank writes.

Each parameter has its `weight`, a float32 master `main` where the weight is of lower precision, and the optimizer's
moments: `exp_avg` and `exp_avg_sq` of AdamW, `momentum_buffer` of Muon. All have the parameter's shape, so that what
holds for the weight's layout holds for them. A logical tensor is named `kind/Hugging Face name`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from slipstream.learner.architecture import Architecture
from slipstream.learner.checkpoint.boxes import Band, bands
from slipstream.learner.muon import BatchedMuon
from slipstream.learner.weights import Layout, Mapping, Shard, mappings

WEIGHT, MAIN = "weight", "main"
Table = Callable[[Architecture, Shard], Iterable[Mapping]]
"""The parameters of a model that a rank holds."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """What an optimizer steps for a parameter: a tensor of its shape, or the run [start, stop) of it laid out flat."""

    main: Tensor
    start: int
    stop: int
    optimizer: torch.optim.Optimizer
    is_sharded: bool  # over the data-parallel ranks

    @property
    def moments(self) -> tuple[str, ...]:
        """The state that the optimizer keeps beside its count of steps, once it has stepped."""
        return ("momentum_buffer",) if isinstance(self.optimizer, BatchedMuon) else ("exp_avg", "exp_avg_sq")

    @property
    def counts_by_parameter(self) -> bool:
        """Whether the count of steps is a tensor of each parameter, as torch has it, or a number of the group."""
        return isinstance(self.optimizer, torch.optim.Adam | torch.optim.AdamW)


@dataclass(frozen=True, slots=True)
class HeldParameter:
    """A parameter of this rank."""

    name: str
    parameter: torch.nn.Parameter
    bands: list[Band]
    stepped: Stepped | None  # None without an optimizer, or where other data-parallel ranks step all of it
    is_first_copy: bool  # of those that tensor-parallel ranks and pipeline stages hold
    is_expert: bool = False
    is_data_copy: bool = False  # a data-parallel rank before this one holds it too

    @property
    def has_main(self) -> bool:
        """Whether the optimizer steps a float32 copy."""
        return self.parameter.dtype is not torch.float32


@dataclass(frozen=True, slots=True)
class Run:
    """The numbers [start, stop) of one kind of a parameter laid out flat."""

    kind: str
    held: HeldParameter
    numbers: Tensor
    start: int
    stop: int
    is_sharded: bool


def held_parameters(
    model: torch.nn.Module,
    optimizer: MegatronOptimizer | None,
    arch: Architecture,
    shard: Shard,
    *,
    table: Table = mappings,
) -> list[HeldParameter]:
    """A rank's parameters in model order, which are those that `table` names."""
    parameters = dict(model.named_parameters())
    steppers = None if optimizer is None else _Steppers(optimizer)
    found = [
        HeldParameter(
            name=mapping.megatron,
            parameter=parameters[mapping.megatron],
            bands=bands(mapping, tuple(parameters[mapping.megatron].shape), arch, shard),
            stepped=None if steppers is None else steppers.of(mapping.megatron, parameters[mapping.megatron]),
            is_first_copy=_is_first_copy(mapping, shard),
            is_expert=mapping.is_expert,
            is_data_copy=shard.is_copy(mapping),
        )
        for mapping in table(arch, shard)
    ]
    assert parameters.keys() == {held.name for held in found}
    return found


def runs(held: HeldParameter, *, num_updates: int) -> Iterator[Run]:
    """All that the next update of a parameter depends on.

    Raises:
        ValueError: the optimizer keeps a state that this module does not know, or has counted other updates.
    """
    parameter, stepped = held.parameter, held.stepped
    yield Run(WEIGHT, held, parameter.detach(), 0, parameter.numel(), is_sharded=False)
    if stepped is None:
        return
    if held.has_main:
        yield Run(MAIN, held, stepped.main.detach(), stepped.start, stepped.stop, stepped.is_sharded)
    if num_updates == 0:
        return  # no optimizer has a state before its first update
    state = stepped.optimizer.state[stepped.main]
    if state.keys() - {"step"} != set(stepped.moments):
        unknown = sorted(state.keys() - {"step"} ^ set(stepped.moments))
        raise ValueError(
            f"the optimizer's state of {held.name} must be {sorted(stepped.moments)} to be saved, differs in {unknown}"
        )
    _require_count(stepped, held.name, num_updates)
    for moment in stepped.moments:
        yield Run(moment, held, state[moment], stepped.start, stepped.stop, stepped.is_sharded)


def owned(found: list[Run], *, data_rank: int, data_size: int) -> Iterator[Run]:
    """Those that this rank writes: every number once over all ranks, and equally many bytes on each.

    The data-parallel ranks hold equal runs in equal order, except those that a distributed optimizer has dealt out, and
    experts, which the first that has one writes: the one with the fewest bytes takes the next.
    """
    num_bytes = [0] * data_size
    for run in found:
        if not run.held.is_first_copy:
            continue
        if run.is_sharded:
            yield run
            continue
        if run.held.is_expert:
            if not run.held.is_data_copy:
                yield run
            continue
        owner = num_bytes.index(min(num_bytes))
        num_bytes[owner] += run.numbers.nbytes
        if owner == data_rank:
            yield run


class _Steppers:
    """Which of the chained optimizers steps a parameter."""

    def __init__(self, optimizer: MegatronOptimizer) -> None:
        chained = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
        self._sharded = [each for each in chained if isinstance(each, DistributedOptimizer)]
        self._whole = {
            id(main): each.optimizer
            for each in chained
            if not isinstance(each, DistributedOptimizer)
            for group in each.optimizer.param_groups
            for main in group["params"]
        }

    def of(self, name: str, parameter: torch.nn.Parameter) -> Stepped | None:
        for each in self._sharded:
            if parameter in each.model_param_gbuf_map:
                extent = each._get_model_param_range_map(parameter)["param"]
                group, position = each.model_param_group_index_map[parameter]
                main = each.optimizer.param_groups[group]["params"][position]
                return Stepped(main, extent.start, extent.end, each.optimizer, is_sharded=True)
        main = parameter if parameter.dtype is torch.float32 else parameter.main_param  # type: ignore[attr-defined]
        if id(main) in self._whole:
            return Stepped(main, 0, main.numel(), self._whole[id(main)], is_sharded=False)
        assert self._sharded, f"{name} is stepped by no optimizer"
        return None


def _is_first_copy(mapping: Mapping, shard: Shard) -> bool:
    if mapping.layout is Layout.REPLICATED:
        return shard.tensor_rank == 0
    is_tied_output = mapping.megatron == "output_layer.weight" and mapping.hf == ("model.embed_tokens.weight",)
    return not is_tied_output


def _require_count(stepped: Stepped, name: str, num_updates: int) -> None:
    """A moment is corrected for its age: a count that differs would go on with other updates."""
    if isinstance(stepped.optimizer, BatchedMuon):
        return
    if stepped.counts_by_parameter:
        counts = [float(stepped.optimizer.state[stepped.main]["step"])]
    else:
        counts = [float(group["step"]) for group in stepped.optimizer.param_groups if group["params"]]
    if any(count != num_updates for count in counts):
        raise ValueError(f"the optimizer of {name} must have made the policy's {num_updates} updates, got {counts}")
