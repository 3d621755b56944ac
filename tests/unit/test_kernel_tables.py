"""Tables of measured multiplications: reading, interpolation, and the audit that rejects the impossible ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from slipstream.cli import main
from slipstream.config import ConfigError
from slipstream.kernel_tables import audit_gemms, read_all_gemms, read_gemms
from slipstream.sim.hardware import Precision, load_hardware
from slipstream.sim.iteration import Engine, iteration_cost
from slipstream.sim.kernels import GemmTable, audit
from slipstream.sim.models import load_model
from slipstream.sim.parameters import IDEAL, Regime

M, N, K = np.array([1.0, 4.0, 16.0]), np.array([128.0, 512.0, 65536.0]), np.array([256.0, 1024.0, 16384.0])


def table(seconds: np.ndarray | None = None) -> GemmTable:
    """By default 1 us plus a nanosecond a row, output and input: rises along every axis."""
    grid = 1e-6 + 1e-9 * (M[:, None, None] + N[None, :, None] + K[None, None, :])
    return GemmTable(name="made up", m=M, n=N, k=K, seconds=grid if seconds is None else seconds)


def write(root: Path, rows: list[tuple[str, str, int, int, int, float]], *, version: str = "0.24.0") -> Path:
    """A file of the package's own columns."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    folder = root / "gb200" / "gemm" / "vllm" / version
    folder.mkdir(parents=True)
    names = ("kernel_source", "gemm_dtype", "m", "n", "k", "latency")
    columns = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
    parquet.write_table(pa.table({"framework": ["VLLM"] * len(rows), **columns}), folder / "gemm_perf.parquet")
    return root


def rising(dtype: str, factor: float = 1.0) -> list[tuple[str, str, int, int, int, float]]:
    return [("one", dtype, m, n, k, factor * m * n * k) for m in (1, 2, 4) for n in (32, 64) for k in (32, 64)]


def test_measured_shapes_are_met_exactly() -> None:
    found = table().seconds_of(np.array([1.0, 16.0]), outputs=512, inputs=1024)
    assert found.tolist() == pytest.approx([1e-6 + 1.537e-6, 1e-6 + 1.552e-6])


def test_between_shapes_logarithms_are_interpolated() -> None:
    product = table(M[:, None, None] * N[None, :, None] * K[None, None, :] * 1e-9)
    found = product.seconds_of(np.array([2.0, 8.0]), outputs=256, inputs=512)
    assert found.tolist() == pytest.approx([2 * 256 * 512e-9, 8 * 256 * 512e-9])


def test_beyond_the_largest_shape_time_grows_in_proportion() -> None:
    largest = table().seconds_of(np.array([16.0]), outputs=65536, inputs=16384)[0]
    found = table().seconds_of(np.array([32.0]), outputs=2 * 65536, inputs=16384)
    assert found[0] == pytest.approx(4 * largest)


def test_a_gap_around_the_shape_is_an_error() -> None:
    seconds = table().seconds.copy()
    seconds[1, 1, 1] = np.nan
    with pytest.raises(
        ConfigError, match=r"kernel table made up must hold the shapes around 512 outputs x 1024 inputs"
    ):
        table(seconds).seconds_of(np.array([4.0]), outputs=512, inputs=1024)


def test_a_rising_table_is_accepted_and_a_fall_is_not() -> None:
    assert audit(table()).accepted
    assert audit(table()).num_pairs == 3 * 2 * 9
    seconds = table().seconds.copy()
    seconds[2, 2, 2] = 0.3 * seconds[2, 2, 1]  # less than half of those with fewer rows and fewer inputs
    found = audit(table(seconds))
    assert not found.accepted
    assert found.falls == found.halvings == pytest.approx(2 / 54)
    assert "rejected" in str(found)


def test_noise_does_not_reject_a_table() -> None:
    seconds = table().seconds * (1 + 0.05 * np.random.default_rng(0).standard_normal((3, 3, 3)))
    assert audit(table(seconds)).falls <= 0.02


def test_tables_are_read_by_type_of_number_with_the_fastest_kernel_of_the_newest_version(tmp_path: Path) -> None:
    slower = [("two", dtype, m, n, k, 2 * ms) for _, dtype, m, n, k, ms in rising("bfloat16")]
    write(tmp_path, rising("bfloat16", 9.0), version="0.9.0")
    write(tmp_path, rising("bfloat16") + slower + rising("fp8"))
    tables = read_all_gemms("gb200", root=tmp_path)
    assert sorted(tables) == ["bfloat16", "fp8"]
    assert tables["bfloat16"].seconds[0, 0, 0] == pytest.approx(32 * 32 * 1e-3)
    assert read_gemms("gb200", Precision.BFLOAT16, root=tmp_path).name == "gb200 vllm 0.24.0 bfloat16"


def test_a_table_that_fails_its_audit_is_refused(tmp_path: Path) -> None:
    bad = [(*row[:5], 1.0 / row[5]) for row in rising("fp8")]
    write(tmp_path, rising("bfloat16") + bad)
    assert [found.accepted for found in audit_gemms("gb200", root=tmp_path)] == [True, False]
    with pytest.raises(ConfigError, match=r"kernel table gb200 vllm 0.24.0 fp8: rejected.*roofline instead"):
        read_gemms("gb200", Precision.FLOAT8, root=tmp_path)


def test_an_iteration_takes_its_multiplications_from_the_table() -> None:
    model, hardware = load_model("qwen3-8b"), load_hardware("gb200")

    def weights_s(gemms: GemmTable | None) -> float:
        cost = iteration_cost(
            Engine(model=model, hardware=hardware, gemms=gemms),
            IDEAL,
            batch_S=np.array([16.0]),
            context_S=np.array([0.0]),
            k=0,
            regime=Regime.SMOOTH,
        )
        return float(cost.weights_s[0])

    constant = table(
        np.full((3, 3, 3), 2e-6)
    )  # seconds of any shape; the head lies beyond the largest by 151,936 / 65,536
    assert weights_s(constant) == pytest.approx(2e-6 * (4 * 36 + 151936 / 65536))
    assert weights_s(None) != weights_s(constant)


def test_without_the_extra_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["simulate", "audit", "--hardware", "gb200"]) == 2
    assert "pip install 'slipstream[kernel-tables]'" in capsys.readouterr().err
