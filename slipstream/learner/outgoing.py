"""Weights that leave a policy, under the names of the Hugging Face checkpoint: whole, as shards, and in a directory.

Legend: `V` the vocabulary, `H` hidden size.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator
from pathlib import Path

from megatron.core.models.gpt import GPTModel
from torch import Tensor

from slipstream.learner import held_weights, hf, parallel
from slipstream.learner.architecture import Architecture
from slipstream.learner.mtp_layer import MtpLayer
from slipstream.refit.fingerprint import HeldWeights
from slipstream.types import Dtype

_EMBEDDINGS, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


class OutgoingWeights:
    """A policy on this rank, as far as others want its weights."""

    def __init__(self, gpt: GPTModel, mtp: MtpLayer | None, architecture: Architecture, dtype: Dtype) -> None:
        """Of this rank's part of the model, and of its MTP layer if it has one; `dtype` is the learner's."""
        self.architecture = architecture
        self._gpt = gpt
        self._mtp = mtp
        self._dtype = dtype
        self._shard = parallel.current_shard()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full parameters under their Hugging Face names, in the learner's dtype; collective over all ranks.

        Tensors may share memory with the model: copy before the next update.
        """
        return held_weights.gathered_weights(dict(self._gpt.named_parameters()), self.architecture, self._shard)

    def mtp_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The same of the MTP layer, which are no part of `weights`; none without one."""
        return held_weights.gathered_mtp_weights(self._mtp, self.architecture)

    def vocabulary_weights(self) -> tuple[Tensor, Tensor]:
        """Embeddings and output layer, each [V, H], whole, in the learner's dtype; collective, see `weights`."""
        named = dict(self._gpt.named_parameters())
        found = dict(held_weights.gathered_weights(named, self.architecture, self._shard, only=(_EMBEDDINGS, _OUTPUT)))
        return found[_EMBEDDINGS], found.get(_OUTPUT, found[_EMBEDDINGS])

    def held_weights(self) -> Iterator[HeldWeights]:
        """This rank's shards where they lie; over all ranks each element once, data-parallel copies on the first."""
        return held_weights.held_weights(dict(self._gpt.named_parameters()), self.architecture, self._shard)

    def save_hf(self, path: Path, tokenizer_dir: Path) -> None:
        """Write a directory that transformers and vLLM load: config, weights, and the tokenizer's files copied."""
        self._write(path, itertools.chain(self.weights(), self.mtp_weights()), tokenizer_dir)

    def save_mtp(self, path: Path, tokenizer_dir: Path) -> None:
        """Write the MTP layer as a draft beside the policy: config, its tensors alone, and the tokenizer's files."""
        self._write(path, self.mtp_weights(), tokenizer_dir)

    def _write(self, path: Path, weights: Iterator[tuple[str, Tensor]], tokenizer_dir: Path) -> None:
        if parallel.is_main_rank():
            hf.save_model(path, self.architecture.to_hf(self._dtype), weights, tokenizer_dir)
        else:  # gathering is collective: every rank runs through it, and keeps nothing
            collections.deque(weights, maxlen=0)
        parallel.barrier()
