"""Throughput of the refit gate's fingerprints: `python -m benchmarks.fingerprint`. Needs no GPU, engine or run.

The tensors are random, with the shapes of a layer of Qwen3-8B; all are cut to the same fraction of their rows.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from slipstream.refit.fingerprint import held_whole, part_fingerprints

_NUM_REPEATS = 5
_SHAPES = {
    "self_attn.q_proj": (4096, 4096),
    "self_attn.k_proj": (1024, 4096),
    "self_attn.v_proj": (1024, 4096),
    "self_attn.o_proj": (4096, 4096),
    "mlp.gate_proj": (12288, 4096),
    "mlp.up_proj": (12288, 4096),
    "mlp.down_proj": (4096, 12288),
    "input_layernorm": (4096,),
    "post_attention_layernorm": (4096,),
    "self_attn.q_norm": (128,),
    "self_attn.k_norm": (128,),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Timing of one method to fingerprint a layer."""

    label: str
    num_bytes: int
    seconds: float

    def line(self) -> str:
        """Format the timing."""
        rate = self.num_bytes / self.seconds / 1e9
        return f"{self.label:44} {rate:8.2f} GB/s"


def main() -> None:
    """Print the fastest repeat of each method."""
    parser = argparse.ArgumentParser(prog="benchmarks.fingerprint")
    parser.add_argument("--gib", type=float, default=0.5, help="size of the tensors in float32")
    options = parser.parse_args()
    torch.set_num_threads(1)
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    tensors = layer(options.gib)
    num_elements = sum(tensor.numel() for tensor in tensors.values())
    print(f"{num_elements / 1e6:.0f} M elements in the shapes of a layer of Qwen3-8B, one thread")
    for device in devices:
        for dtype in (torch.bfloat16, torch.float32):
            for timing in timings({name: tensor.to(device, dtype) for name, tensor in tensors.items()}):
                print(timing.line())


def layer(gib: float) -> dict[str, Tensor]:
    """Sample float32 tensors of a layer, at most `gib` in all, with the same fraction of rows each."""
    whole = sum(4 * torch.Size(shape).numel() for shape in _SHAPES.values())
    part = min(1.0, gib * 2**30 / whole)
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(max(1, int(shape[0] * part)), *shape[1:], generator=generator)
        for name, shape in _SHAPES.items()
    }


def timings(tensors: Mapping[str, Tensor]) -> list[Timing]:
    """Time our fingerprint and, on a CPU, XXH3 over the bytes; a CPU is timed by process time."""
    first = next(iter(tensors.values()))
    kind = f"{str(first.dtype).removeprefix('torch.')} on {first.device.type}"
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    clock = time.process_time if first.device.type == "cpu" else time.perf_counter
    held = [held_whole(name, tensor) for name, tensor in tensors.items()]
    ours = _best_s(lambda: part_fingerprints(held), clock)
    found = [Timing(label=f"additive fingerprint, {kind}", num_bytes=num_bytes, seconds=ours)]
    if first.device.type == "cpu":
        found.append(Timing(label=f"XXH3, {kind}", num_bytes=num_bytes, seconds=_best_s(lambda: _xxh3(tensors), clock)))
    return found


def _xxh3(tensors: Mapping[str, Tensor]) -> list[str]:
    return [xxhash.xxh3_64_hexdigest(tensor.view(torch.uint8).numpy().data) for tensor in tensors.values()]


def _best_s(run: Callable[[], object], clock: Callable[[], float]) -> float:
    seconds = []
    for _ in range(_NUM_REPEATS):
        start = clock()
        run()  # ends with numbers on the host, so that a GPU has finished
        seconds.append(clock() - start)
    return min(seconds)


if __name__ == "__main__":
    main()
