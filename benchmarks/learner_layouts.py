"""Training throughput of the learner in each layout, on the tiny policy, with each rank pinned to its own core.

One rank has one core and two ranks have two, so a layout of two ranks pays if it trains twice as many tokens a second.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import time
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from slipstream.grpo.config import LossConfig, OptimizerConfig
from slipstream.grpo.update import Update, part_of
from slipstream.learner.config import LearnerConfig, ParallelConfig, Recompute, ScratchConfig
from slipstream.learner.packing import plan_shards
from slipstream.types import TrainBatch

_VOCAB, _PROMPT = 64, 20
_LAYOUTS = {
    "TP 1": LearnerConfig(),
    "TP 1, logits of 512 tokens at once": LearnerConfig(logprob_chunk_tokens=512),
    "TP 1, parts recomputed": LearnerConfig(recompute=Recompute.SELECTIVE),
    "TP 1, layers recomputed": LearnerConfig(recompute=Recompute.FULL),
    "TP 2": LearnerConfig(parallel=ParallelConfig(tensor=2)),
    "TP 2, sequence parallel": LearnerConfig(parallel=ParallelConfig(tensor=2, sequence_parallel=True)),
    "PP 2": LearnerConfig(parallel=ParallelConfig(pipeline=2)),
    "DP 2": LearnerConfig(parallel=ParallelConfig(data=2)),
    "DP 2, optimizer split": LearnerConfig(parallel=ParallelConfig(data=2), distributed_optimizer=True),
}


def main() -> None:
    """Train a few steps in each layout and print a table."""
    parser = argparse.ArgumentParser(prog="benchmarks.learner_layouts")
    parser.add_argument("--num-steps", type=int, default=4, help="timed; one more warms up")
    parser.add_argument("--num-rollouts", type=int, default=48)
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    batch = _batch(options.num_rollouts)
    num_tokens = sum(map(len, batch.token_ids))
    print(
        f"\nlearner, tiny policy in float32, {options.num_rollouts} rollouts of {num_tokens} tokens, one core a rank:"
    )
    print("  layout                               tokens/s   s a step")
    for name, config in _LAYOUTS.items():
        if config.parallel.world_size > len(cores):
            print(f"  {name:35} needs {config.parallel.world_size} cores, has {len(cores)}")
            continue
        seconds = _time(config, batch, cores, options.num_steps)
        print(f"  {name:35} {num_tokens / seconds:9.0f} {seconds:10.3f}", flush=True)


def _batch(num_rollouts: int) -> TrainBatch:
    rng = np.random.default_rng(0)
    lengths = rng.integers(60, 180, num_rollouts)
    return TrainBatch(
        token_ids=[rng.integers(0, _VOCAB, length).tolist() for length in lengths],
        prompt_lengths=[_PROMPT] * num_rollouts,
        rollout_logprobs=[[-4.0] * (length - _PROMPT) for length in lengths],
        advantages=rng.normal(size=num_rollouts).tolist(),
        policy_version=0,
    )


def _time(config: LearnerConfig, batch: TrainBatch, cores: list[int], num_steps: int) -> float:
    """Measure the median seconds of an update on the slowest rank."""
    world_size = config.parallel.world_size
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ProcessPoolExecutor(world_size, mp_context=multiprocessing.get_context("spawn")) as pool:
        ranks = [pool.submit(_rank, rank, config, port, batch, cores[rank], num_steps) for rank in range(world_size)]
        return max(statistics.median(rank.result()) for rank in ranks)


def _rank(rank: int, config: LearnerConfig, port: int, batch: TrainBatch, core: int, num_steps: int) -> list[float]:
    os.sched_setaffinity(0, {core})
    import torch
    import torch.distributed as dist

    from slipstream.learner import parallel
    from slipstream.learner.megatron import MegatronPolicy

    torch.set_num_threads(1)
    layout = config.parallel
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=layout.world_size)
    policy = MegatronPolicy.from_scratch(
        ScratchConfig(),
        vocab_size=_VOCAB,
        eos_token_id=1,
        learner=config,
        optimizer=OptimizerConfig(learning_rate=1e-4),
    )
    shards = plan_shards([len(tokens) for tokens in batch.token_ids], layout.data)
    update = Update(batch=batch, trainer_logprobs=None, ref_logprobs=None, loss=LossConfig(), temperature=1.0)
    part = part_of(update, shards[layout.data_rank(rank)])
    seconds = []
    for _ in range(num_steps + 1):
        parallel.barrier()
        start = time.perf_counter()
        policy.train_step(part)
        seconds.append(time.perf_counter() - start)
    parallel.barrier()
    parallel.teardown()
    return seconds[1:]


if __name__ == "__main__":
    main()
