"""Choice of the floating-point type that this machine multiplies faster, for `dtype: auto` of a recipe.

Without instructions such as AVX-512 BF16 or AMX, torch multiplies bfloat16 in a scalar loop, ten times slower than
float32; with these instructions bfloat16 is faster. Capability flags do not say which kernels are installed, so the
choice rests on a measurement of some milliseconds.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

from slipstream.records.run import NumericsRecord
from slipstream.types import Dtype

_ROWS, _INNER, _OUTER = 1024, 128, 384  # sizes of a micro-batch in the tiny policy's MLP
_NUM_REPEATS = 15
_MS = 1e3
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")  # names in /proc/cpuinfo
TORCH_DTYPES = {Dtype.FLOAT32: torch.float32, Dtype.BFLOAT16: torch.bfloat16}


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


def choose_dtype(
    *, num_threads: int | None, product_ms: Callable[[torch.dtype], float] = _product_ms
) -> NumericsRecord:
    """Measure a matrix product in float32 and in bfloat16, and choose the faster type.

    Args:
        num_threads: threads of the learner; None keeps torch's own choice.
        product_ms: returns the milliseconds of one product in a type.
    """
    ms = dict.fromkeys(TORCH_DTYPES, math.inf)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(num_threads or threads_before)
    try:
        for _ in range(_NUM_REPEATS):  # interleaved; the minimum counts, because other load only adds time
            ms = {dtype: min(ms[dtype], product_ms(of_torch)) for dtype, of_torch in TORCH_DTYPES.items()}
    finally:
        torch.set_num_threads(threads_before)
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
