"""How new weights enter a running vLLM engine: a weight-transfer engine of vLLM's own API that reads safetensors.

vLLM's layerwise reload re-runs each layer's own loading and post-processing, so it works for the policy and for the
draft, on CPU and GPU, with sharded and prepacked layouts. Its bookkeeping is Python, a layer at a time: on a CPU, where
a plain policy's layers can be written directly, that takes a third of the time. Source and engine must see one file
system.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from slipstream.refit import engine_weights
from slipstream.refit.snapshot import bytes_digest

BACKEND = "slipstream_safetensors"


@dataclass
class SafetensorsInit(WeightTransferInitInfo):
    """Nothing has to be agreed beforehand."""


@dataclass
class SafetensorsUpdate(WeightTransferUpdateInfo):
    """Tensors under the names of the model's checkpoint format: one safetensors file, or a directory of them."""

    path: str = ""


class SafetensorsTransfer(WeightTransferEngine[SafetensorsInit, SafetensorsUpdate]):
    """Loads a file into whichever model, policy or draft, the running update targets."""

    init_info_cls = SafetensorsInit
    update_info_cls = SafetensorsUpdate
    received_digest = ""  # of the bytes last read

    def init_transfer_engine(self, init_info: SafetensorsInit) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """Nothing: how to load is known when the tensors are."""

    def receive_weights(self, update_info: SafetensorsUpdate) -> None:
        """Load all of them, and rebuild what the layers derive from their weights.

        Raises:
            FileNotFoundError: there is none.
        """
        files = _files(Path(update_info.path))
        sizes = [file.stat().st_size for file in files]
        maps = [
            torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8)
            for file, size in zip(files, sizes, strict=True)
        ]
        self.received_digest = bytes_digest(maps)
        tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
        slots = self._known_slots()
        if engine_weights.can_write(slots, tensors):
            for slot in slots:
                slot.write(tensors)
        else:
            initialize_layerwise_reload(self.model)
            self.model.load_weights(tensors.items())  # type: ignore[operator]  # every vLLM model has it
            finalize_layerwise_reload(self.model, self.model_config)

    def finish_weight_update(self) -> None:
        """Nothing: one update brings all tensors."""

    def _known_slots(self) -> tuple[engine_weights.Slot, ...]:
        """The model's parameters; none if it has some that only vLLM can write."""
        try:
            return engine_weights.slots(self.model)
        except LookupError:
            return ()

    def shutdown(self) -> None:
        """Nothing to release."""


def _files(path: Path) -> list[Path]:
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise FileNotFoundError(f"no weights to refit with: {path} holds no safetensors file")
    return files


def register() -> None:
    """Make the backend known to vLLM in this process; vLLM calls plugins more than once."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, SafetensorsTransfer)
