"""A placement says what it means, and a layout fills it exactly."""

from collections.abc import Callable

from slipstream.learner.config import ParallelConfig
from slipstream.workers.placement.config import Layout, MemoryUse, PlacementConfig, PlacementMode
from tests.unit.refusals import refused, rows

SPLIT, IN_TURN = PlacementMode.SPLIT, MemoryUse.IN_TURN


@rows(
    """
placement.nodes=2
    placement.gpus_per_node must be >= 1 with several nodes or mode 'split', got 0; without GPUs a run lies on one node
placement.mode=split
    placement.gpus_per_node must be >= 1 with several nodes or mode 'split', got 0; without GPUs a run lies on one node
placement={generation_nodes: 1, gpus_per_node: 1}
    placement.generation_nodes must be left out with mode 'colocated', got 1; or set 'split'
placement={gpus_per_node: 1, training_nodes: 1}
    placement.training_nodes must be left out with mode 'colocated', got 1; or set 'split'
placement={gpus_per_node: 1, mode: split, nodes: 2, training_nodes: 2}
    placement.generation_nodes must be >= 1 with mode 'split', got 0
placement={generation_nodes: 2, gpus_per_node: 1, mode: split, nodes: 2}
    placement.training_nodes must be >= 1 with mode 'split', got 0
placement={generation_nodes: 2, gpus_per_node: 1, mode: split, nodes: 4, training_nodes: 1}
    placement.nodes must be generation_nodes 2 + training_nodes 1, got 4
placement.memory=in_turn
    placement.memory must be 'shared' without GPUs, got 'in_turn'; set placement.gpus_per_node, or leave it out
placement.logical_gpus=true
    placement.logical_gpus must be false without GPUs, got True; set placement.gpus_per_node, or leave it out
placement={generation_nodes: 1, gpus_per_node: 1, memory: in_turn, mode: split, nodes: 2, training_nodes: 1}
    placement.memory must be 'shared' with mode 'split', got 'in_turn'; learner and engines have GPUs of their own:
    leave it out, or set mode 'colocated'
"""
)
def test_a_placement_that_means_nothing_is_refused(given: str, expected: str) -> None:
    assert refused(given) == expected


def test_the_default_has_no_gpus_and_asks_nothing_of_the_layout() -> None:
    layout = Layout(parallel=ParallelConfig(data=2), num_engines=3)
    assert (layout.has_gpus, layout.num_gpus, layout.placement.nodes) == (False, 3, 1)


def test_a_role_that_does_not_fill_its_gpus_is_refused(refusal: Callable[..., str]) -> None:
    placement = PlacementConfig(nodes=2, gpus_per_node=4)
    assert refusal(Layout, placement=placement, parallel=ParallelConfig(tensor=4), num_engines=8) == (
        "learner.parallel must multiply to the 8 GPUs that placement gives the learner, got 4; "
        "change tensor, pipeline, context or data, or placement.nodes"
    )
    whole = ParallelConfig(tensor=4, data=2)
    assert refusal(Layout, placement=placement, parallel=whole, num_engines=2, engine_tensor=2) == (
        "engine.num_engines times engine.tensor_parallel_size 2 must be the 8 GPUs that placement gives the engines, "
        "got 2; set it to 4"
    )
    assert refusal(Layout, placement=placement, parallel=whole, num_engines=2, engine_tensor=3) == (
        "engine.num_engines times engine.tensor_parallel_size 3 must be the 8 GPUs that placement gives the engines, "
        "got 2"
    )


def test_a_group_larger_than_a_node_needs_neighbours() -> None:
    placement = PlacementConfig(nodes=6, gpus_per_node=4)
    layout = Layout(placement=placement, parallel=ParallelConfig(tensor=3, data=8), num_engines=3, engine_tensor=8)
    assert (layout.learner_unit, layout.engine_unit) == (3, 2)  # 4 groups of 3 fill 3 nodes, a group of 8 fills 2
