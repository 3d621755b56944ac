"""What `dtype: auto` becomes."""

from __future__ import annotations

import pytest
import torch

from slipstream.learner import numerics
from slipstream.learner.numerics import choose_dtype


@pytest.mark.parametrize(
    ("float32_ms", "bfloat16_ms", "expected"),
    [(0.2, 0.1, "bfloat16"), (0.2, 7.0, "float32"), (0.2, 0.2, "float32")],
    ids=["a processor with bfloat16 units", "one that multiplies bfloat16 in a scalar loop", "a tie"],
)
def test_the_faster_type_is_taken(float32_ms: float, bfloat16_ms: float, expected: str) -> None:
    record = choose_dtype(num_threads=1, product_ms=lambda dtype: float32_ms if dtype is torch.float32 else bfloat16_ms)
    assert record.dtype == expected
    assert (record.float32_ms, record.bfloat16_ms) == (float32_ms, bfloat16_ms)
    assert f"{float32_ms:.3f} ms in float32 and {bfloat16_ms:.3f} ms in bfloat16" in record.reason


def test_what_else_the_machine_does_meanwhile_does_not_decide() -> None:
    """Bfloat16 is the faster one in its best round, though the others were disturbed."""
    times = {torch.float32: iter([2.0, 2.0, 9.0] + [3.0] * 99), torch.bfloat16: iter([50.0, 1.0, 50.0] + [50.0] * 99)}
    record = choose_dtype(num_threads=1, product_ms=lambda dtype: next(times[dtype]))
    assert (record.dtype, record.float32_ms, record.bfloat16_ms) == ("bfloat16", 2.0, 1.0)


def test_the_measurement_uses_the_learners_threads_and_leaves_the_process_as_it_was() -> None:
    before, seen = torch.get_num_threads(), []

    def product_ms(dtype: torch.dtype) -> float:
        seen.append((dtype, torch.get_num_threads()))
        return 1.0

    choose_dtype(num_threads=before + 1, product_ms=product_ms)
    assert set(seen) == {(torch.float32, before + 1), (torch.bfloat16, before + 1)}
    assert torch.get_num_threads() == before


def test_this_machine_is_measured_and_its_capabilities_are_named() -> None:
    record = choose_dtype(num_threads=1)
    assert record.dtype == ("float32" if record.float32_ms <= record.bfloat16_ms else "bfloat16")
    assert min(record.float32_ms, record.bfloat16_ms) > 0
    assert record.capabilities == numerics.capabilities()
    assert record.capabilities[0] == f"torch {torch.backends.cpu.get_cpu_capability()}"
