"""The floating-point type that this machine multiplies faster: what `dtype: auto` of a recipe stands for.

Without AVX-512 BF16, AMX or their like torch multiplies bfloat16 in a scalar loop, an order of magnitude slower than
float32; with them bfloat16 wins. Capability flags say what a processor has, not what the installed kernels make of it,
so the answer comes from a measurement of some milliseconds, and the flags stand beside it in the record.
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

_ROWS, _INNER, _OUTER = 1024, 128, 384  # a micro-batch through the tiny policy's MLP
_TOKENS = (1000, 1537, 3000, 4096)  # that a weight's gradient sums over
_ODD = 53  # of no register's width a multiple
_NUM_REPEATS = 15
_MS = 1e3
_BFLOAT16_UNITS = frozenset({"avx512_bf16", "amx_bf16"})
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")  # as /proc/cpuinfo spells them
TORCH_DTYPES = {Dtype.FLOAT32: torch.float32, Dtype.BFLOAT16: torch.bfloat16}


def choose_dtype(
    *, num_threads: int | None, product_ms: Callable[[torch.dtype], float] | None = None
) -> NumericsRecord:
    """Measure a matrix product in float32 and in bfloat16 and take the faster type.

    Args:
        num_threads: with which the learner will compute; None leaves torch's own choice.
        product_ms: milliseconds of one product in a type; None measures on this machine.
    """
    timed = product_ms or _product_ms
    ms = dict.fromkeys(TORCH_DTYPES, math.inf)
    with _threads(num_threads):
        for _ in range(_NUM_REPEATS):  # in turn, and the least counts: whatever else the machine does only adds
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
    """Try out whether products of a learner in `dtype` are the same bits on one thread and on two, in this process.

    A weight's gradient sums over thousands of tokens, and libraries differ in whether threads share out such a sum: MKL
    does, in float32, unless MKL_CBWR is AUTO,STRICT in the environment of the process, on a processor with AVX2.
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
    """Try out whether the gradient of a softmax is the same bits on one thread and on two, in this process.

    Unlike the policy's layer for CPUs, a draft that is trained beside the policy computes it with torch's own
    operation. That one depends on its threads on a processor with AVX2, where a row's length is no multiple of 8.
    """
    numbers = torch.Generator().manual_seed(0)
    chances = torch.randn(_ROWS, _ODD, generator=numbers).softmax(-1)
    upstream = torch.randn(_ROWS, _ODD, generator=numbers)
    return _same_on_threads(partial(gradient, upstream, chances, -1, torch.float32))


def engine_keeps_bits(dtype: Dtype) -> bool:
    """Return True if a vLLM engine in `dtype` samples the same bits on one thread and on two, on this machine.

    In bfloat16 it does where the processor multiplies that; elsewhere its kernels share out their work by threads.
    """
    return dtype is Dtype.FLOAT32 or (dtype is Dtype.BFLOAT16 and not _BFLOAT16_UNITS.isdisjoint(processor_flags()))


def capabilities() -> tuple[str, ...]:
    """Capabilities by torch's level, oneDNN's answer and the CPU's own flags."""
    found = [f"torch {torch.backends.cpu.get_cpu_capability()}"]
    if torch.backends.mkldnn.is_available():
        found.append(f"oneDNN bfloat16 {'yes' if torch.ops.mkldnn._is_mkldnn_bf16_supported() else 'no'}")
    return (*found, platform.machine(), *processor_flags())


def processor_flags() -> tuple[str, ...]:
    """The processor's own flags, as Linux gives them, as far as they matter here; none on another system."""
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
    """One product, after another that pays for what is set up on first use."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.ones(_ROWS, _INNER, dtype=dtype, device=device)
    weight = torch.ones(_INNER, _OUTER, dtype=dtype, device=device)
    float((x @ weight)[0, 0])
    start = time.perf_counter()
    product = x @ weight
    float(product[0, 0])  # waits for a device that computes on its own
    return (time.perf_counter() - start) * _MS


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
