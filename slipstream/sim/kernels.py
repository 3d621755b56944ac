"""Measured matrix multiplications in place of the roofline, and the audit that a table of them must pass.

Legend: `m` rows (tokens), `n` outputs, `k` inputs of one multiplication; `M`, `N`, `K` measured values of each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.config import require

Array = NDArray[np.float64]

_NOISE = 0.15  # by how much a larger multiplication may come out faster: kernels change with the shape
_MAX_FALLS = 0.03  # share of neighbouring shapes that may fall by more than that
_MAX_HALVINGS = 0.001  # and share that may fall to less than half: what no change of kernel explains


@dataclass(frozen=True, kw_only=True, eq=False)
class GemmTable:
    """Seconds of [m, k] x [k, n] on one GPU. Between measured shapes: straight lines in the logarithms.

    Beyond the largest measured shape time grows in proportion; below the smallest it stays.
    """

    name: str
    m: Array  # [M], rising
    n: Array  # [N], rising
    k: Array  # [K], rising
    seconds: Array  # [M, N, K], NaN where nothing was measured

    def __post_init__(self) -> None:
        for axis, values in (("m", self.m), ("n", self.n), ("k", self.k)):
            require(
                len(values) > 0 and bool(np.all(np.diff(values) > 0)),
                f"kernel table {self.name}.{axis}",
                "must rise",
                values.tolist()[:5],
            )

    def seconds_of(self, tokens: Array, *, outputs: int, inputs: int) -> Array:
        """Seconds at each of `tokens`.

        Raises:
            ConfigError: the shapes around this one were not measured.
        """
        (n_low, n_high, n_part), (k_low, k_high, k_part) = _bracket(self.n, outputs), _bracket(self.k, inputs)
        corners = [
            (1 - n_part) * (1 - k_part) * self._log_seconds(tokens, n_low, k_low),
            (1 - n_part) * k_part * self._log_seconds(tokens, n_low, k_high) if k_part else 0.0,
            n_part * (1 - k_part) * self._log_seconds(tokens, n_high, k_low) if n_part else 0.0,
            n_part * k_part * self._log_seconds(tokens, n_high, k_high) if n_part and k_part else 0.0,
        ]
        beyond = max(1.0, outputs / self.n[-1]) * max(1.0, inputs / self.k[-1])
        found = np.exp(np.sum(np.broadcast_arrays(*corners), axis=0)) * beyond
        require(
            bool(np.all(np.isfinite(found))),
            f"kernel table {self.name}",
            f"must hold the shapes around {outputs} outputs x {inputs} inputs",
            "a gap",
        )
        return found

    def _log_seconds(self, tokens: Array, n: int, k: int) -> Array:
        log_m, log_seconds = np.log(self.m), np.log(self.seconds[:, n, k])
        wanted = np.log(np.maximum(tokens, 1.0))
        beyond = np.maximum(0.0, wanted - log_m[-1])
        return np.interp(wanted, log_m, log_seconds) + beyond


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    """Whether more work takes longer in a table, along each axis, from one measured shape to the next."""

    name: str
    num_pairs: int
    falls: float  # share of pairs where the larger one is faster by more than noise
    halvings: float  # share where it takes less than half the time

    @property
    def accepted(self) -> bool:
        """Whether the table may be used."""
        return self.num_pairs > 0 and self.falls <= _MAX_FALLS and self.halvings <= _MAX_HALVINGS

    def __str__(self) -> str:
        """One line."""
        verdict = "accepted" if self.accepted else "rejected"
        return (
            f"{self.name}: {verdict}; of {self.num_pairs} pairs of neighbouring shapes {self.falls:.1%} fall by more "
            f"than {_NOISE:.0%} (at most {_MAX_FALLS:.0%}), "
            f"{self.halvings:.2%} to less than half (at most {_MAX_HALVINGS:.1%})"
        )


def audit(table: GemmTable) -> Audit:
    """Compare every measured shape with its next larger neighbours."""
    ratios = np.concatenate(
        [
            (np.delete(table.seconds, 0, axis) / np.delete(table.seconds, -1, axis)).ravel()
            for axis in range(table.seconds.ndim)
        ]
    )
    ratios = ratios[np.isfinite(ratios)]
    return Audit(
        name=table.name,
        num_pairs=len(ratios),
        falls=float(np.mean(ratios < 1.0 - _NOISE)) if len(ratios) else 0.0,
        halvings=float(np.mean(ratios < 0.5)) if len(ratios) else 0.0,
    )


def _bracket(values: Array, wanted: float) -> tuple[int, int, float]:
    """Indices around `wanted` and how far, in logarithms, it lies towards the second; an end outside the range."""
    if wanted <= values[0]:
        return 0, 0, 0.0
    if wanted >= values[-1]:
        return len(values) - 1, len(values) - 1, 0.0
    high = int(np.searchsorted(values, wanted))
    if values[high] == wanted:
        return high, high, 0.0
    low = high - 1
    return low, high, float(np.log(wanted / values[low]) / np.log(values[high] / values[low]))
