"""Tables for users: the place of each process, and the memory of each GPU."""

from slipstream.config import merge
from slipstream.learner.config import ParallelConfig
from slipstream.recipe import Recipe, load_recipe
from slipstream.workers.placement.config import Layout, PlacementConfig, PlacementMode
from slipstream.workers.placement.memory import memory_text
from slipstream.workers.placement.plan import Node, make_plan, parse_cluster, plan_text, table
from tests.unit.workers.placement.test_memory import PLAIN, SPLIT


def _memory_text(recipe: Recipe) -> str:
    found = recipe.memory()
    assert found is not None
    return memory_text(found, recipe.refit_channel)


def test_a_table_is_as_wide_as_its_cells() -> None:
    assert table([["a", "bb"], ["ccc", ""]]) == "a    bb\n---  --\nccc"


def test_a_split_plan_shows_ranks_and_workers() -> None:
    layout = Layout(
        placement=PlacementConfig(
            nodes=3, gpus_per_node=2, mode=PlacementMode.SPLIT, generation_nodes=1, training_nodes=2
        ),
        parallel=ParallelConfig(tensor=2, data=2, sequence_parallel=True),
        engine_tensor=2,
        num_engines=1,
    )
    nodes = tuple(Node(name=f"n{i}", num_gpus=2, nvlink_domain="rack", numa=(0, 1)) for i in range(3))
    assert plan_text(make_plan(layout, nodes)).splitlines() == [
        "3 x 2 GPUs, split",
        "learner: 4 ranks, TP 2 with SP x PP 1 x DP 2",
        "engines: 1 of TP 2, executor mp (processes of one node)",
        "",
        "node  NVLink domain  GPU 0          GPU 1",
        "----  -------------  -------------  -------------",
        "n0    rack           L0 (NUMA 0)    L1 (NUMA 1)",
        "n1    rack           L2 (NUMA 0)    L3 (NUMA 1)",
        "n2    rack           E0.0 (NUMA 0)  E0.1 (NUMA 1)",
    ]


def test_a_plan_of_logical_gpus_says_so() -> None:
    layout = Layout(placement=PlacementConfig(gpus_per_node=1, logical_gpus=True))
    first = plan_text(make_plan(layout, parse_cluster("1x1"))).splitlines()[0]
    assert first == "1 x 1 logical GPUs (processes may compute on CPUs), colocated"


def test_a_colocated_plan_shows_both_on_a_gpu_and_the_executor_over_nodes() -> None:
    layout = Layout(
        placement=PlacementConfig(nodes=2, gpus_per_node=1),
        parallel=ParallelConfig(data=2),
        engine_tensor=2,
        num_engines=1,
    )
    lines = plan_text(make_plan(layout, parse_cluster("2x1", domain_nodes=2))).splitlines()
    assert lines[2] == "engines: 1 of TP 2, executor ray (over several nodes)"
    assert lines[-2:] == ["node0  domain0        L0 E0.0", "node1  domain0        L1 E0.1"]


def test_memory_of_a_shared_gpu_is_one_column() -> None:
    lines = _memory_text(load_recipe("qwen3_8b")).splitlines()
    assert lines[:3] == ["part                GPU, GB", "------------------  -------", "weights             8.2"]
    assert not [line for line in lines if line.startswith("reference")]  # no KL
    assert "together            178.1" in lines  # 107.4 beside 70.7 of what trains alone
    assert lines[-3] == "longest micro-batch that fits: 18,970 tokens"


def test_memory_that_is_had_in_turn_has_a_column_for_each_turn() -> None:
    recipe = load_recipe("qwen3_8b", overrides={"placement": {"memory": "in_turn"}})
    assert _memory_text(recipe).splitlines() == [
        "part                generating, GB  training, GB",
        "------------------  --------------  ------------",
        "weights             8.2             8.2",
        "gradients           -               16.4",
        "optimizer           -               3.1",
        "activations         -               50.1",
        "logits              -               1.1",
        "refit               3.7             3.7",
        "engine weights      16.4            16.4",
        "draft               0.8             0.8",
        "engine activations  3.7             3.7",
        "KV cache            62.8            -",
        "engine refit        2.5             2.5",
        "runtime (assumed)   9.3             9.3",
        "together            107.4           115.3",
        "GB200 has           186.0           186.0",
        "",
        "longest micro-batch that fits: 39,490 tokens",
        "an engine's cache holds 414,283 tokens of context, 33 of the longest sequences",
        "a refit moves 16.4 GB into each of 32 engines, 524.2 GB in all, by ipc",
        "while engines generate, 3.1 GB of each GPU's optimizer wait in host memory: 12.3 GB a node",
    ]


def test_memory_of_split_gpus_has_a_column_for_each_kind() -> None:
    recipe = load_recipe("qwen3_8b", overrides=merge(PLAIN, {**SPLIT, "grpo": {"loss": {"kl_coefficient": 0.1}}}))
    lines = _memory_text(recipe).splitlines()
    assert lines[0] == "part                training GPU, GB  generation GPU, GB"
    assert lines[5] == "reference           4.1               -"
    assert "engine weights      -                 16.4" in lines
    assert "together            98.5              93.0" in lines  # 89.2 and 83.7 beside 9.3
    assert "GB200 has           186.0             186.0" in lines
    assert lines[-1].endswith("by nccl")


def test_an_engine_of_one_gpu_runs_in_one_process_and_has_no_worker_number() -> None:
    layout = Layout(
        placement=PlacementConfig(nodes=1, gpus_per_node=2), parallel=ParallelConfig(tensor=2), num_engines=2
    )
    lines = plan_text(make_plan(layout, parse_cluster("1x2"))).splitlines()
    assert lines[1] == "learner: 2 ranks, TP 2 x PP 1 x DP 1"  # without sequence parallelism
    assert lines[2] == "engines: 2 of TP 1, executor uni (in one process)"
    assert lines[-1] == "node0  -              L0 E0  L1 E1"
