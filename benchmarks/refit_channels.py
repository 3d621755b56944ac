"""Seconds and GB/s of a refit by each channel that this machine supports; part of `make bench`.

A random Qwen3 is sent from a real learner to real engines. The time is that of `send`, from the learner's weights to
engines that are ready to generate. The first refit of each channel warms up and is left out.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from slipstream import logs
from slipstream.config import ConfigError, require
from slipstream.engine.config import EngineConfig
from slipstream.learner.config import LearnerConfig
from slipstream.refit.channel import open_channel, send
from slipstream.refit.config import Channel, RefitConfig
from slipstream.types import Dtype
from slipstream.workers.engines import RemoteEngine, start_engine
from slipstream.workers.learners import RemoteLearner, start_learner
from slipstream.workers.session import connect

_HEAD_DIM = 64


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; status 2 for invalid input."""
    parser = argparse.ArgumentParser(prog="benchmarks.refit_channels")
    parser.add_argument("--hidden-size", type=int, default=512, help=f"a multiple of {_HEAD_DIM}")
    parser.add_argument("--num-layers", type=int, default=12)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--dtype", type=Dtype, choices=[Dtype.FLOAT32, Dtype.BFLOAT16], default=Dtype.FLOAT32)
    parser.add_argument("--num-engines", type=int, default=1)
    parser.add_argument("--on-gpu", action="store_true", help="engines on GPUs, with the NCCL or the IPC channel")
    parser.add_argument("--bucket-mib", type=float, default=RefitConfig().bucket_mib)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    try:
        require(
            options.hidden_size % _HEAD_DIM == 0, "--hidden-size", f"must divide by {_HEAD_DIM}", options.hidden_size
        )
        require(options.repeats >= 1, "--repeats", "must be >= 1", options.repeats)
        _measure(options)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _measure(options: argparse.Namespace) -> None:
    logs.configure()
    connect()
    engine = EngineConfig(
        max_model_len=64,
        max_num_seqs=4,
        dtype=options.dtype,
        enforce_eager=True,
        kv_cache_gib=None if options.on_gpu else 0.1,
        num_engines=options.num_engines,
        num_threads=1,
    )
    with tempfile.TemporaryDirectory() as directory:
        policy = _write_policy(Path(directory) / "policy", options)
        with (
            start_engine(policy, config=engine) as engines,
            start_learner(LearnerConfig(dtype=options.dtype, num_threads=1)) as learner,
        ):
            learner.load(policy, None)
            num_bytes = learner.weight_bytes()
            print(f"{num_bytes / 1e6:.1f} MB of {options.dtype.value} weights, {options.num_engines} engines")
            for channel in Channel:
                if channel is not Channel.AUTO:
                    config = RefitConfig(channel=channel, bucket_mib=options.bucket_mib)
                    print(f"  {channel.value:14s} {_seconds(config, learner, engines, options.repeats, num_bytes)}")


def _seconds(config: RefitConfig, learner: RemoteLearner, engines: RemoteEngine, repeats: int, num_bytes: int) -> str:
    """Format median seconds and GB/s of a refit, or the reason why the channel is not available."""
    times = []
    try:
        with open_channel(config, learner, engines) as channel:
            for version in range(1 + repeats):
                start = time.perf_counter()
                send(channel, version)
                times.append(time.perf_counter() - start)
    except ConfigError as error:
        return f"not here: {error}"
    seconds = median(times[1:])
    return (
        f"{seconds:7.3f} s  {num_bytes / seconds / 1e9:6.2f} GB/s into each engine"
        f"  (median of {repeats}, {min(times[1:]):.3f} to {max(times[1:]):.3f} s)"
    )


def _write_policy(path: Path, options: argparse.Namespace) -> Path:
    """Write a random Qwen3 of the requested size."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    num_heads = options.hidden_size // _HEAD_DIM
    config = Qwen3Config(
        vocab_size=options.vocab_size,
        hidden_size=options.hidden_size,
        intermediate_size=3 * options.hidden_size,
        num_hidden_layers=options.num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=max(1, num_heads // 4),
        head_dim=_HEAD_DIM,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        eos_token_id=3,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


if __name__ == "__main__":
    sys.exit(main())
