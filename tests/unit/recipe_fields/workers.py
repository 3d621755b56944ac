"""Probes of the processes: what engines and learners start with."""

import sys
from types import SimpleNamespace
from typing import Any

from slipstream.engine import vllm_engine
from slipstream.engine.vllm_engine import sampling_params
from slipstream.recipe import Recipe
from slipstream.stages.recipe_engines import recipe_engine
from slipstream.workers import calls, engines, learners
from slipstream.workers.placement.plan import make_plan, parse_cluster, plan_text
from tests.unit.recipe_fields.base import Check, Tools, checks
from tests.unit.recipe_fields.policy import MIXTURE


def engine_arguments(recipe: Recipe, tools: Tools) -> object:
    """What vLLM is started with, and the parameters of its sampling."""
    seen: list[Any] = []

    class LLM:
        def __init__(self, model: str, **arguments: Any) -> None:
            seen.append(arguments)
            core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=None))  # generates nothing here
            loggers = SimpleNamespace(stat_loggers=[])
            told = SimpleNamespace(speculative_config=None)
            self.llm_engine = SimpleNamespace(logger_manager=loggers, engine_core=core, vllm_config=told)

        def collective_rpc(self, method: str) -> list[Any]:
            return []

        def reset_prefix_cache(self) -> None:
            """Nothing is cached."""

    (tools.directory / "config.json").write_text('{"eos_token_id": 3}')
    fake = SimpleNamespace(LLM=LLM, SamplingParams=lambda **arguments: arguments)
    tools.patch.setitem(sys.modules, "vllm", fake)
    transfer = SimpleNamespace(BACKEND="slipstream")
    tools.patch.setitem(sys.modules, "slipstream.engine.weight_transfer", transfer)
    tools.patch.setattr(vllm_engine.os, "environ", {})
    engine = vllm_engine.VllmEngine(tools.directory, config=recipe.engine, speculative_config=None)
    params = sampling_params(recipe.sampling, engine._stop_token_ids)
    return seen, vllm_engine.process_environment(recipe.engine), params


class FakeRay:
    """Notes the actors that are made of a class; they answer nothing, and let go of what they hold."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.options: list[Any] = []

    def remote(self, kind: type) -> Any:
        def options(**values: Any) -> Any:
            self.options.append(values)
            return SimpleNamespace(remote=made)

        def made(*args: Any, **kwargs: Any) -> Any:
            self.made.append((kind.__name__, args, kwargs))
            method = SimpleNamespace(remote=lambda *args, **kwargs: None)
            return SimpleNamespace(listen=method, join=method)

        return SimpleNamespace(options=options)

    def kill(self, actor: Any) -> None:
        """Nothing lives."""


def started_engines(recipe: Recipe, tools: Tools) -> object:
    """How many engines start and how, how many are kept, and how long GPUs, start and answers may take."""
    ray, kept, seen = FakeRay(), [], []
    (tools.directory / "config.json").write_text("{}")
    tools.patch.setattr(engines, "ray", ray)
    tools.patch.setattr(engines, "started", started(seen))
    tools.patch.setattr(engines, "reserved", lambda layout: seen.append(layout.placement.start_timeout_s))
    idle = calls.Idle[Any]()
    tools.patch.setattr(idle, "put", lambda key, engine, capacity: kept.append((capacity, engine._crew.deadline)))
    tools.patch.setattr(engines, "idle_engines", idle)
    with recipe_engine(recipe, tools.directory, tools.directory, 0):
        pass
    found = [(kind, started["can_sleep"], started["returns_routes"]) for kind, _, started in ray.made]
    return found, seen, kept


def started_learner(recipe: Recipe, tools: Tools) -> object:
    """The learner's ranks, their environment and patience, and how many learners are kept afterwards."""
    ray, kept, patience = FakeRay(), [], []
    tools.patch.setattr(learners, "ray", ray)
    tools.patch.setattr(learners, "own_node", lambda: "node")
    tools.patch.setattr(learners, "started", started(patience))
    for module in (learners, calls):
        tools.patch.setattr(module, "Crew", lambda workers, deadline: NotedCrew(patience, deadline))
    idle = calls.Idle[Any]()
    tools.patch.setattr(idle, "put", lambda key, learner, capacity: kept.append(capacity))
    tools.patch.setattr(learners, "idle_learners", idle)
    with learners.start_learner(recipe.learner, layout=recipe.layout):
        ranks = [(made["rank"], made["world_size"]) for _, _, made in ray.made]
    return ranks, ray.options[0]["runtime_env"]["env_vars"].get("OMP_NUM_THREADS"), kept, patience


def started(patience: list[Any]) -> Any:
    """Workers that have started, as soon as they were asked to."""

    def answer(workers: list[Any], deadline: Any) -> list[Any]:
        patience.append(deadline)
        return workers

    return answer


class NotedCrew:
    """Answers whatever it is asked with nothing much, and notes how long it would have waited."""

    def __init__(self, patience: list[Any], deadline: Any) -> None:
        patience.append(deadline)

    def ask(self, what: str, call: Any, *, deadline: Any = None) -> list[Any]:
        return [0]

    def gather(self, what: str, calls: Any) -> list[Any]:
        return []


def plan(recipe: Recipe, _: Tools) -> object:
    """Who lies where on four nodes of four GPUs; without GPUs there is no plan."""
    return plan_text(make_plan(recipe.layout, parse_cluster("4x4"))) if recipe.layout.has_gpus else None


NO_CPU = {"engine.kv_cache_gib": None, "engine.gpu_memory_utilization": 0.45}
ONE_GPU = {"placement.gpus_per_node": 1, **NO_CPU}
SPLIT = {**ONE_GPU, "placement.mode": "split", "placement.nodes": 3, "placement.generation_nodes": 1}
SPLIT |= {"placement.training_nodes": 2, "learner.parallel.data": 2}
ONE_NODE_EACH = {"placement.generation_nodes": 1, "placement.training_nodes": 1}
CHECKS = {
    "placement.gpus_per_node": Check(1, plan, {}, NO_CPU),
    "grpo.router_replay": Check(True, started_engines, ONE_GPU | MIXTURE | {"learner.parallel.data": 1}),
    "placement.nodes": Check(2, plan, ONE_GPU, {"learner.parallel.data": 2, "engine.num_engines": 2}),
    "placement.mode": Check(
        "split",
        plan,
        {**ONE_GPU, "placement.nodes": 2, "learner.parallel.data": 2, "engine.num_engines": 2},
        {**ONE_NODE_EACH, "learner.parallel.data": 1, "engine.num_engines": 1},
    ),
    "placement.generation_nodes": Check(
        2, plan, SPLIT, {"placement.training_nodes": 1, "learner.parallel.data": 1, "engine.num_engines": 2}
    ),
    "placement.training_nodes": Check(3, plan, SPLIT, {"placement.nodes": 4, "learner.parallel.data": 3}),
    "placement.logical_gpus": Check(True, plan, ONE_GPU, {"engine.kv_cache_gib": 0.1}),
    "placement.start_timeout_s": Check(5.0, started_engines),
    **checks("engine", started_engines, backend="sglang", num_engines=2, num_kept_idle=0, start_timeout_s=30.0),
    "engine.answer_timeout_s": Check(30.0, started_engines),
    **checks("engine", engine_arguments, max_model_len=300, max_num_seqs=128, dtype="bfloat16", enforce_eager=False),
    **checks("engine", engine_arguments, kv_cache_gib=0.5, tensor_parallel_size=2, num_threads=1),
    "engine.gpu_memory_utilization": Check(0.4, engine_arguments, ONE_GPU),
    "sampling.max_response_tokens": Check(100, engine_arguments),
    **checks("learner", started_learner, num_threads=1, num_kept_idle=0, start_timeout_s=30.0, answer_timeout_s=30.0),
    "learner.parallel.data": Check(2, started_learner),
}
