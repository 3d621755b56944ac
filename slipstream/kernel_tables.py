"""NVIDIA's measured kernel latencies as the simulator's tables: the optional extra `kernel-tables`.

The package `aiconfigurator-core` carries them as Parquet files by system, operation, framework and version. A table is
audited before it is used: some of the published ones give larger multiplications less time.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np

from slipstream.config import ConfigError, require
from slipstream.sim.hardware import Precision
from slipstream.sim.kernels import Audit, GemmTable, audit

_PACKAGE = "aiconfigurator_core"
_FRAMEWORK = "vllm"
_SYSTEMS = {"gb200": "gb200", "h200": "h200_sxm", "h100": "h100_sxm"}
_DTYPES = {Precision.BFLOAT16: "bfloat16", Precision.FLOAT8: "fp8"}
_MS = 1e-3
_COLUMNS = ["gemm_dtype", "m", "n", "k", "latency"]


def read_gemms(hardware: str, precision: Precision, *, root: Path | None = None) -> GemmTable:
    """The audited table of `hardware` at `precision`.

    Args:
        root: directory of the systems' data; default: the installed package's.
    Raises:
        ConfigError: the extra is not installed, holds no such table, or the table fails its audit.
    """
    tables = read_all_gemms(hardware, root=root)
    dtype = _DTYPES.get(precision)
    require(dtype in tables, "kernel tables", f"must hold {precision} of {hardware}", sorted(tables))
    assert dtype is not None
    found = audit(tables[dtype])
    if not found.accepted:
        raise ConfigError(f"kernel table {found}; project with the roofline instead: leave out --kernel-tables")
    return tables[dtype]


def audit_gemms(hardware: str, *, root: Path | None = None) -> list[Audit]:
    """The audits of all of its tables, by type of number."""
    return [audit(table) for _, table in sorted(read_all_gemms(hardware, root=root).items())]


def read_all_gemms(hardware: str, *, root: Path | None = None) -> dict[str, GemmTable]:
    """Tables by type of number, not audited; of several kernels for one shape, the fastest."""
    import pyarrow.parquet as parquet

    require(
        hardware in _SYSTEMS, "kernel tables", "must be of a known system", hardware, f"known: {', '.join(_SYSTEMS)}"
    )
    folder = (root or _package_data()) / _SYSTEMS[hardware] / "gemm" / _FRAMEWORK
    files = sorted(folder.glob("*/gemm_perf.parquet"), key=_version)
    require(bool(files), "kernel tables", f"must hold matrix multiplications of {_FRAMEWORK}", str(folder))
    columns = parquet.read_table(files[-1], columns=_COLUMNS)
    dtypes = np.array(columns["gemm_dtype"].to_pylist())
    m, n, k = (columns[name].to_numpy().astype(np.int64) for name in ("m", "n", "k"))
    latency_s = columns["latency"].to_numpy().astype(np.float64) * _MS
    label = f"{hardware} {_FRAMEWORK} {files[-1].parent.name}"
    return {
        str(dtype): _table(f"{label} {dtype}", *(column[dtypes == dtype] for column in (m, n, k, latency_s)))
        for dtype in sorted(set(dtypes.tolist()))
    }


def _table(
    name: str,
    m: np.ndarray[tuple[int], np.dtype[np.int64]],
    n: np.ndarray[tuple[int], np.dtype[np.int64]],
    k: np.ndarray[tuple[int], np.dtype[np.int64]],
    latency_s: np.ndarray[tuple[int], np.dtype[np.float64]],
) -> GemmTable:
    axes = [np.unique(values) for values in (m, n, k)]
    places = tuple(np.searchsorted(axis, values) for axis, values in zip(axes, (m, n, k), strict=True))
    seconds = np.full([len(axis) for axis in axes], np.inf)
    np.minimum.at(seconds, places, latency_s)
    seconds[np.isinf(seconds)] = np.nan
    return GemmTable(
        name=name,
        m=axes[0].astype(np.float64),
        n=axes[1].astype(np.float64),
        k=axes[2].astype(np.float64),
        seconds=seconds,
    )


def _package_data() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise ConfigError(
            "kernel tables need the optional extra: pip install 'slipstream[kernel-tables]' (aiconfigurator-core)"
        )
    return Path(spec.origin).parent / "systems" / "data"


def _version(file: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in file.parent.name.split(".") if part.isdigit())
