"""Sequences of different lengths in two arrays, which cross a process boundary as bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray


@dataclass(frozen=True, eq=False)
class Ragged(Sequence[Any]):  # items are arrays, which serve where sequences of numbers are declared
    """Rows of different lengths, concatenated; a row is a view of `values`."""

    values: NDArray[Any]
    ends: NDArray[np.int64]  # end of each row in `values`

    @classmethod
    def of(cls, rows: Iterable[Sequence[Any] | NDArray[Any]], dtype: DTypeLike) -> Ragged:
        """Copy rows into arrays of one type."""
        arrays = [np.asarray(row, dtype=dtype) for row in rows]
        values = np.concatenate(arrays) if arrays else np.empty(0, dtype=dtype)
        return cls(values, np.cumsum([len(array) for array in arrays], dtype=np.int64))

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> NDArray[Any]: ...

    @overload
    def __getitem__(self, index: slice) -> list[NDArray[Any]]: ...

    def __getitem__(self, index: int | slice) -> NDArray[Any] | list[NDArray[Any]]:
        """Return one row, or the rows of a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        return self.values[(self.ends[at - 1] if at else 0) : self.ends[at]]
