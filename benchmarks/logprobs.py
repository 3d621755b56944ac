"""Peak memory and seconds of logprobs with and without chunks, for one forward and backward pass.

The output layer is as wide as Qwen3-8B's on one of 8 tensor-parallel ranks (vocabulary 19,000); the hidden states need
a gradient. Each case runs in its own process, whose peak resident set comes from the kernel, because Python's tools do
not count torch's allocations.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

_KIB, _MIB = 1024, 1024**2
_NUM_REPEATS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One size of the output layer; `chunk_tokens` 0 holds all logits."""

    num_tokens: int
    hidden_size: int
    vocab_size: int
    chunk_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Measurement of one case in its own process."""

    peak_mib: float  # above what the process held before the pass
    seconds: float  # least of some passes
    loss: float


def main() -> None:
    """Run every case and print a table."""
    parser = argparse.ArgumentParser(prog="benchmarks.logprobs")
    parser.add_argument("--num-tokens", type=int, default=4096)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--vocab-size", type=int, default=19_000)
    parser.add_argument("--chunks", type=int, nargs="+", default=[0, 2048, 512, 128], help="0: all tokens at once")
    parser.add_argument("--case", help="one case as JSON: measure it in this process")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(asdict(measure(Case(**json.loads(options.case))))))
        return
    print(
        f"\nlog-probabilities of {options.num_tokens} tokens, hidden {options.hidden_size}, vocabulary "
        f"{options.vocab_size}, float32, forward and backward:"
    )
    print("  tokens a chunk   peak memory    seconds   loss")
    for chunk_tokens in options.chunks:
        case = Case(
            num_tokens=options.num_tokens,
            hidden_size=options.hidden_size,
            vocab_size=options.vocab_size,
            chunk_tokens=chunk_tokens,
        )
        found = _in_own_process(case)
        print(f"  {chunk_tokens or 'all':>14} {found.peak_mib:9.0f} MiB {found.seconds:10.2f}   {found.loss:.6f}")


def measure(case: Case) -> Measured:
    """Measure peak memory and time of the learner's output head on random hidden states."""
    import torch

    from slipstream.learner.batches import Batching, MicroBatch
    from slipstream.learner.config import LearnerConfig, ScratchConfig, ShapeConfig
    from slipstream.learner.logprobs import OutputHead
    from slipstream.learner.megatron import MegatronPolicy

    scratch = ScratchConfig(
        shape=ShapeConfig(
            hidden_size=case.hidden_size, num_layers=1, ffn_hidden_size=8, num_attention_heads=1, num_query_groups=1
        )
    )
    policy = MegatronPolicy.from_scratch(
        scratch, vocab_size=case.vocab_size, eos_token_id=1, learner=LearnerConfig(), optimizer=None
    )
    head = OutputHead(policy._gpt, chunk_tokens=case.chunk_tokens or None, adds_to_main_grad=False)
    torch.manual_seed(0)
    hidden_TBH = torch.randn(case.num_tokens, 1, case.hidden_size, requires_grad=True)
    labels_BT = torch.randint(0, case.vocab_size, (1, case.num_tokens))
    batch = MicroBatch(
        indices=(0,),
        inputs=Batching(max_tokens=case.num_tokens).inputs(labels_BT.tolist(), labels_BT.device),
        labels_BT=labels_BT,
        mask_BT=torch.ones_like(labels_BT, dtype=torch.bool),
    )
    before, seconds, loss = _peak_bytes(), [], torch.zeros(())
    for _ in range(_NUM_REPEATS):
        start = time.perf_counter()
        loss = -head.scores(hidden_TBH, batch, 1.0).logprobs_BT.mean()
        loss.backward()
        seconds.append(time.perf_counter() - start)
    return Measured(peak_mib=(_peak_bytes() - before) / _MIB, seconds=min(seconds), loss=float(loss))


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB


def _in_own_process(case: Case) -> Measured:
    command = [sys.executable, "-m", "benchmarks.logprobs", "--case", json.dumps(asdict(case))]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    main()
