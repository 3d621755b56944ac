"""Giving a learner's device memory back while an engine generates on the same device.

Memory is moved by storage: tensors that share one stay views of it, so that nothing that holds them notices.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Offloaded:
    """Tensors without memory on their device, until `restore`."""

    def __init__(self, kept: Iterable[Tensor], dropped: Iterable[Tensor]) -> None:
        """Empty the tensors' storages.

        Args:
            kept: their contents are copied to the host first.
            dropped: come back as zeros, as far as they share no storage with those kept.
        """
        kept_storages = {storage.data_ptr(): storage for storage in (each.untyped_storage() for each in kept)}
        storages = kept_storages | {
            storage.data_ptr(): storage
            for storage in (each.untyped_storage() for each in dropped)
            if storage.data_ptr() not in kept_storages
        }
        storages.pop(0, None)  # holds nothing
        self.num_bytes = sum(storage.nbytes() for storage in storages.values())
        self._emptied: list[tuple[torch.UntypedStorage, int, torch.UntypedStorage | None]] = []
        for at, storage in storages.items():
            copy = _on_host(storage) if at in kept_storages else None
            self._emptied.append((storage, storage.nbytes(), copy))
            storage.resize_(0)

    def restore(self) -> None:
        """Take the memory again and fill it as it was."""
        for storage, num_bytes, copy in self._emptied:
            storage.resize_(num_bytes)
            if copy is None:
                storage.fill_(0)  # type: ignore[attr-defined]  # not declared
            else:
                storage.copy_(copy)
        self._emptied.clear()


def _on_host(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """A copy; pinned where the storage is on a GPU, which copies twice as fast."""
    copy = torch.UntypedStorage(storage.nbytes())
    if storage.is_cuda:
        copy = copy.pin_memory()
    copy.copy_(storage)
    return copy
