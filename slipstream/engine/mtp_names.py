"""Which of a policy's tensors a vLLM engine holds as its draft, and what it calls them.

The layer of a MiMo that predicts the token after the next lies in the policy's checkpoint; an engine loads it as a
draft model of its own, which borrows the policy's embeddings and output layer. So the policy never takes the layer's
tensors, and the draft takes no others: an embedding that came with them would overwrite the policy's.
"""

from __future__ import annotations

from torch import nn
from vllm.model_executor.models.mimo_mtp import MiMoMTP

_LAYERS = "model.mtp_layers."
_BLOCK = "mtp_block."  # what vLLM puts around the layer between the norms


def takes(model: nn.Module, name: str) -> bool:
    """Whether a tensor of a checkpoint belongs into this model, policy or draft."""
    return name.startswith(_LAYERS) == isinstance(model, MiMoMTP)


def draft_names(draft: nn.Module) -> tuple[tuple[str, str], ...]:
    """Prefixes of an MTP draft's names in vLLM, and what a checkpoint has instead of each; none of another draft."""
    if not isinstance(draft, MiMoMTP):
        return ()
    pairs = [(f"{_LAYERS}{key}.", f"{_LAYERS}{index}.") for index, key in enumerate(draft.model.mtp_layers)]
    return tuple((held + inside, saved) for held, saved in pairs for inside in (_BLOCK, ""))
