"""Nodes and GPUs of a run, and what the planner must know of learner and engines."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from slipstream.config import Checked, NonNegativeInt, PositiveFloat, PositiveInt, Switch, require
from slipstream.learner.config import ParallelConfig


class PlacementMode(StrEnum):
    """Sharing of GPUs between learner and engines."""

    COLOCATED = "colocated"  # rank i of the learner and worker i of the engines share a GPU, in turn
    SPLIT = "split"  # nodes of their own


class MemoryUse(StrEnum):
    """Memory that a learner and engines that share GPUs keep while the others work."""

    SHARED = "shared"  # all of it
    IN_TURN = "in_turn"  # their weights: gradients and optimizer go while engines generate, caches while it trains


class ArmsInTurn(StrEnum):
    """Rule by which the arms of a loop take their steps in turn, both alive at once, or train one after the other."""

    AUTO = "auto"  # on without GPUs: on those there is seldom memory for both arms
    ON = "on"
    OFF = "off"


class PlacementConfig(Checked, path="placement"):
    """Nodes and GPUs of a run; how they are divided stands in `learner.parallel` and in `engine`.

    Without GPUs (`gpus_per_node` 0) every process runs on the one host, as Ray puts it. A cluster may have more nodes,
    and more GPUs on a node, than a run takes.
    """

    nodes: PositiveInt = 1
    """Nodes of the run."""
    gpus_per_node: NonNegativeInt = 0
    """GPUs that the run takes of each node; 0 runs on CPUs of one host."""
    mode: PlacementMode = PlacementMode.COLOCATED
    """Learner and engines share GPUs, or have nodes of their own. Set `split` for an asynchronous loop on GPUs."""
    generation_nodes: NonNegativeInt = 0
    """Nodes of the engines. Set with `mode: split`, and left out otherwise."""
    training_nodes: NonNegativeInt = 0
    """Nodes of the learner. Set with `mode: split`, and left out otherwise."""
    memory: MemoryUse = MemoryUse.SHARED
    """GPU memory that learner and engines keep while the others work. Set `in_turn` where both do not fit at once."""
    start_timeout_s: PositiveFloat = 900.0
    """Seconds for nodes to join and GPUs to be free. Set it higher where nodes start slowly."""
    arms_in_turn: ArmsInTurn = ArmsInTurn.AUTO
    """Steps of both arms alternate; `auto` does so without GPUs alone. Set by launches (`--arms-in-turn`)."""
    logical_gpus: Switch = False
    """GPUs that Ray only counts, while processes compute on CPUs. Set by tests of multi-node placement."""

    def _check(self) -> None:
        has_gpus, is_split = self.gpus_per_node > 0, self.mode is PlacementMode.SPLIT
        is_possible = has_gpus or (self.nodes == 1 and not is_split)
        rule = "must be >= 1 with several nodes or mode 'split'"
        self._require(is_possible, "gpus_per_node", rule, "without GPUs a run lies on one node")
        needs_gpus = "set placement.gpus_per_node, or leave it out"
        is_freed = has_gpus and not self.logical_gpus  # engines on CPUs cannot free their caches
        self._require(is_freed or not self.takes_turns, "memory", "must be 'shared' without GPUs", needs_gpus)
        fix = "learner and engines have GPUs of their own: leave it out, or set mode 'colocated'"
        self._require(not is_split or not self.takes_turns, "memory", "must be 'shared' with mode 'split'", fix)
        is_possible = not has_gpus or self.arms_in_turn is not ArmsInTurn.ON
        rule = "must be auto or off with GPUs"
        self._require(is_possible, "arms_in_turn", rule, "each arm takes all of them: leave it out")
        self._require(has_gpus or not self.logical_gpus, "logical_gpus", "must be false without GPUs", needs_gpus)
        for name, count in (("generation_nodes", self.generation_nodes), ("training_nodes", self.training_nodes)):
            if is_split:
                self._require(count >= 1, name, "must be >= 1 with mode 'split'")
            else:
                self._require(count == 0, name, "must be left out with mode 'colocated'", "or set 'split'")
        both = self.generation_nodes + self.training_nodes
        rule = f"must be generation_nodes {self.generation_nodes} + training_nodes {self.training_nodes}"
        self._require(not is_split or both == self.nodes, "nodes", rule)

    @property
    def has_arms_in_turn(self) -> bool:
        """True if all arms of a loop are alive at once."""
        return self.gpus_per_node == 0 and self.arms_in_turn is not ArmsInTurn.OFF

    @property
    def takes_turns(self) -> bool:
        """True if learner and engines free memory while the others work."""
        return self.memory is MemoryUse.IN_TURN

    @property
    def num_learner_nodes(self) -> int:
        """Nodes that hold ranks of the learner."""
        return self.training_nodes if self.mode is PlacementMode.SPLIT else self.nodes

    @property
    def num_engine_nodes(self) -> int:
        """Nodes that hold engines."""
        return self.generation_nodes if self.mode is PlacementMode.SPLIT else self.nodes


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Everything that decides which process lies on which GPU. A role fills the GPUs of its nodes.

    `num_engine_sets` and `num_learners` may live on the same GPUs at once, only one of each at work: tuning compares
    engines of several draft lengths, and processes are kept warm between stages.
    """

    placement: PlacementConfig = field(default_factory=PlacementConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    engine_tensor: int = 1  # GPUs of one engine
    num_engines: int = 1
    num_engine_sets: int = 1
    num_learners: int = 1

    def __post_init__(self) -> None:
        if not self.has_gpus:
            return
        per_node = self.placement.gpus_per_node
        learner_gpus = self.placement.num_learner_nodes * per_node
        world = self.parallel.world_size
        rule = f"must multiply to the {learner_gpus} GPUs that placement gives the learner"
        fix = "change tensor, pipeline, context or data, or placement.nodes"
        require(world == learner_gpus, "learner.parallel", rule, world, fix)
        tensor, engine_gpus = self.engine_tensor, self.placement.num_engine_nodes * per_node
        rule = f"times engine.tensor_parallel_size {tensor} must be the {engine_gpus} GPUs that "
        rule += "placement gives the engines"
        fix = f"set it to {engine_gpus // tensor}" if engine_gpus % tensor == 0 else ""
        require(self.num_engines * tensor == engine_gpus, "engine.num_engines", rule, self.num_engines, fix)

    @property
    def has_gpus(self) -> bool:
        """True if GPUs are reserved at all."""
        return self.placement.gpus_per_node > 0

    @property
    def num_starting(self) -> int:
        """Engines that start at once: a start works on one core, and on a GPU each measures the free memory."""
        return 1 if self.has_gpus else 2

    @property
    def num_gpus(self) -> int:
        """GPUs of the whole run; without any, each worker of an engine counts as one."""
        workers = self.num_engines * self.engine_tensor
        return self.placement.nodes * self.placement.gpus_per_node if self.has_gpus else workers

    @property
    def learner_unit(self) -> int:
        """Nodes that whole groups of the learner's neighbours fill together; 1: each lies inside a node."""
        return _unit(self.parallel.num_neighbours, self.placement.gpus_per_node)

    @property
    def engine_unit(self) -> int:
        """The same of the engines."""
        return _unit(self.engine_tensor, self.placement.gpus_per_node)


def _unit(group: int, gpus_per_node: int) -> int:
    return math.lcm(group, gpus_per_node) // gpus_per_node
