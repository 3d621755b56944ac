"""Choice of the floating-point type that this machine multiplies faster, for `dtype: auto` of a recipe.

Without instructions such as AVX-512 BF16 or AMX, torch multiplies bfloat16 in a scalar loop, ten times slower than
float32; with these instructions bfloat16 is faster. Capability flags do not say which kernels are installed, so the
choice rests on a measurement of some milliseconds. The record keeps the flags beside the measurement.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from slipstream.records.run import NumericsRecord
from slipstream.types import Dtype

_ROWS, _INNER, _OUTER = 1024, 128, 384  # sizes of a micro-batch in the tiny policy's MLP
_TOKENS = (1000, 1537, 3000, 4096)  # numbers of tokens over which a weight's gradient is summed
_ODD = 53  # a row length that is no multiple of any register's width
_NUM_REPEATS = 15
_MS = 1e3
_BFLOAT16_UNITS = frozenset({"avx512_bf16", "amx_bf16"})
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")  # names in /proc/cpuinfo
TORCH_DTYPES = {Dtype.FLOAT32: torch.float32, Dtype.BFLOAT16: torch.bfloat16}


def choose_dtype(
    *, num_threads: int | None, product_ms: Callable[[torch.dtype], float] | None = None
) -> NumericsRecord:
    """Measure a matrix product in float32 and in bfloat16, and choose the faster type.

    Args:
        num_threads: number of threads of the learner; None keeps torch's own choice.
        product_ms: function that returns milliseconds of one product in a type; None measures on this machine.
    """
    timed = product_ms or _product_ms
    ms = dict.fromkeys(TORCH_DTYPES, math.inf)
    with _threads(num_threads):
        for _ in range(_NUM_REPEATS):  # interleaved; the minimum counts, because other load only adds time
            ms = {dtype: min(ms[dtype], timed(of_torch)) for dtype, of_torch in TORCH_DTYPES.items()}
    chosen = min(ms, key=lambda dtype: (ms[dtype], dtype is not Dtype.FLOAT32))
    return NumericsRecord(
        dtype=chosen,
        reason=(
            f"a product of [{_ROWS}, {_INNER}] and [{_INNER}, {_OUTER}] takes {ms[Dtype.FLOAT32]:.3f} ms in float32 "
            f"and {ms[Dtype.BFLOAT16]:.3f} ms in bfloat16 on this machine"
        ),
        float32_ms=ms[Dtype.FLOAT32],
        bfloat16_ms=ms[Dtype.BFLOAT16],
        capabilities=capabilities(),
    )


def learner_keeps_bits(
    dtype: Dtype, *, product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.mm
) -> bool:
    """Test in this process that matrix products in `dtype` have the same bits on one thread and on two.

    A weight's gradient is a sum over thousands of tokens, and some libraries split that sum over threads. MKL does so
    in float32 on a processor with AVX2, unless the environment of the process sets MKL_CBWR to AUTO,STRICT.
    """
    of_torch, numbers = TORCH_DTYPES.get(dtype), torch.Generator().manual_seed(0)
    if of_torch is None:
        return False
    for num_tokens in _TOKENS:
        left = torch.randn(_INNER, num_tokens, generator=numbers).to(of_torch)
        right = torch.randn(num_tokens, _OUTER, generator=numbers).to(of_torch)
        if not _same_on_threads(partial(product, left, right)):
            return False
    return True


def draft_keeps_bits(
    *, gradient: Callable[[torch.Tensor, torch.Tensor, int, torch.dtype], torch.Tensor] = torch._softmax_backward_data
) -> bool:
    """Test in this process that the gradient of a softmax has the same bits on one thread and on two.

    Unlike the policy's layer for CPUs, a draft that is trained beside the policy uses torch's own operation. On a
    processor with AVX2 the bits of torch's operation depend on the threads where a row's length is no multiple of 8.
    """
    numbers = torch.Generator().manual_seed(0)
    chances = torch.randn(_ROWS, _ODD, generator=numbers).softmax(-1)
    upstream = torch.randn(_ROWS, _ODD, generator=numbers)
    return _same_on_threads(partial(gradient, upstream, chances, -1, torch.float32))


def engine_keeps_bits(dtype: Dtype) -> bool:
    """Return True if a vLLM engine in `dtype` computes the same bits on one thread and on two, on this machine.

    In bfloat16 the bits are equal on a processor with bfloat16 instructions; elsewhere vLLM's kernels split sums over
    threads.
    """
    return dtype is Dtype.FLOAT32 or (dtype is Dtype.BFLOAT16 and not _BFLOAT16_UNITS.isdisjoint(processor_flags()))


def capabilities() -> tuple[str, ...]:
    """List torch's CPU level, oneDNN's bfloat16 support, the architecture and the processor's flags."""
    found = [f"torch {torch.backends.cpu.get_cpu_capability()}"]
    if torch.backends.mkldnn.is_available():
        found.append(f"oneDNN bfloat16 {'yes' if torch.ops.mkldnn._is_mkldnn_bf16_supported() else 'no'}")
    return (*found, platform.machine(), *processor_flags())


def processor_flags() -> tuple[str, ...]:
    """List the flags of `_FLAGS` that Linux reports for this processor; empty on another system."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = set(cpuinfo.read_text().split()) if cpuinfo.is_file() else set()
    return tuple(flag for flag in _FLAGS if flag in flags)


def _same_on_threads(compute: Callable[[], torch.Tensor]) -> bool:
    found = []
    for num_threads in (1, 2):
        with _threads(num_threads):
            found.append(compute())
    return torch.equal(*found)


def _product_ms(dtype: torch.dtype) -> float:
    """Time one product after a warm-up product."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.ones(_ROWS, _INNER, dtype=dtype, device=device)
    weight = torch.ones(_INNER, _OUTER, dtype=dtype, device=device)
    float((x @ weight)[0, 0])
    start = time.perf_counter()
    product = x @ weight
    float(product[0, 0])  # waits for the device, which computes asynchronously
    return (time.perf_counter() - start) * _MS


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
