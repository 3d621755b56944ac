"""What the plugin gives to engines on CPUs: norms that equal vLLM's own, and memory that is kept."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from slipstream.engine import vllm_eager
from slipstream.engine.vllm_engine import OWN_NORMS

pytestmark = pytest.mark.slow  # vLLM's import takes seconds


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    from slipstream.engine import vllm_plugin  # loads vLLM's kernels too

    vllm_plugin.register()


DTYPES = pytest.mark.parametrize(("dtype", "relative"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])


def takes_kernels(dtype: torch.dtype) -> bool:
    """In bfloat16 only where they round; vLLM's own norm rounds twice."""
    return dtype is torch.float32 or vllm_eager.rounds_bfloat16()


@DTYPES
@pytest.mark.parametrize("shape", [(5, 128), (384, 4, 32), (1, 16)])
def test_rows_are_normed_as_vllms_layers_do(shape: tuple[int, ...], dtype: torch.dtype, relative: float) -> None:
    from vllm import ir

    wide = (torch.randn(*shape[:-1], 3 * shape[-1]) * 5).to(dtype)
    weight = torch.rand(shape[-1]).to(dtype)
    for x in (wide[..., : shape[-1]], wide[..., : shape[-1]].contiguous()):
        exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight
        before = x.clone()
        with ir.ops.rms_norm.set_priority(["slipstream", "native"]):
            provider, within = ("slipstream", relative) if takes_kernels(dtype) else ("native", 2 * relative)
            assert ir.ops.rms_norm.dispatch(x, weight, 1e-6).provider == provider
            assert torch.allclose(ir.ops.rms_norm(x, weight, 1e-6).double(), exact, rtol=within, atol=1e-6)
        assert torch.equal(x, before)


@DTYPES
def test_a_sum_is_normed_and_kept_in_place_of_its_parts(dtype: torch.dtype, relative: float) -> None:
    from vllm import ir

    x, residual, weight = (each.to(dtype) for each in (torch.randn(7, 128), torch.randn(7, 128), torch.rand(128)))
    total = x + residual
    exact = total.double() / (total.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    with ir.ops.fused_add_rms_norm.set_priority(["slipstream", "native"]):
        normed, kept = ir.ops.fused_add_rms_norm.maybe_inplace(x, residual, weight, 1e-6)
    assert torch.equal(kept, total)
    if takes_kernels(dtype):
        assert (normed.data_ptr(), kept.data_ptr()) == (x.data_ptr(), residual.data_ptr())
    within = (2 if takes_kernels(dtype) else 4) * relative  # vLLM's own norms the sum before it is rounded
    assert torch.allclose(normed.double(), exact, rtol=within, atol=1e-6)


@pytest.mark.parametrize(
    ("columns", "dtype", "has_weight", "variance_size"),
    [(24, torch.float32, True, None), (32, torch.float16, True, None), (32, torch.float32, False, None),
     (32, torch.float32, True, 16)],
)  # fmt: skip
def test_norms_that_the_kernels_do_not_fit_stay_vllms_own(
    columns: int, dtype: torch.dtype, has_weight: bool, variance_size: int | None
) -> None:
    from vllm import ir

    x, weight = torch.randn(3, columns).to(dtype), torch.rand(columns).to(dtype) if has_weight else None
    own = ir.ops.rms_norm.impls["native"].impl_fn(x, weight, 1e-6, variance_size)
    for op, inputs in ((ir.ops.rms_norm, (x,)), (ir.ops.fused_add_rms_norm, (x, torch.zeros_like(x)))):
        with op.set_priority(["slipstream", "native"]):
            assert op.dispatch(*inputs, weight, 1e-6, variance_size).provider == "native"
            found = op(*inputs, weight, 1e-6, variance_size)
        assert torch.equal(found if isinstance(found, torch.Tensor) else found[0], own)


def test_engines_name_the_kernels_that_are_offered() -> None:
    from vllm import ir

    for name, providers in OWN_NORMS.items():
        assert providers == [vllm_eager.PROVIDER]
        assert vllm_eager.PROVIDER in getattr(ir.ops, name).impls


def test_an_engines_process_keeps_large_blocks_that_it_frees() -> None:
    """Page faults of 8 blocks of 64 MiB, each of which has 16,384 where its pages come from the system."""
    program = (
        "import resource, torch; from slipstream.engine.vllm_plugin import register; register()\n"
        "def faults(num):\n"
        "    for _ in range(num): torch.ones(2**26, dtype=torch.uint8)\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "before = faults(4); print(faults(8) - before)"
    )
    printed = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert int(printed.split()[-1]) < 2 * 16384  # the heap may grow once more
