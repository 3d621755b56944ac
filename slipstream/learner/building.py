"""A rank's part of a policy, made of full tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from megatron.core.models.gpt import GPTModel
from torch import Tensor

from slipstream.learner import parallel
from slipstream.learner.architecture import Architecture
from slipstream.learner.config import LearnerConfig
from slipstream.learner.cpu import host
from slipstream.learner.experts import require_even_experts
from slipstream.learner.layers import build_model, build_mtp
from slipstream.learner.mtp_layer import MtpLayer
from slipstream.learner.shape import require_divisible
from slipstream.learner.weights import load_exactly, mtp_from_hf, shard_from_hf


class Parts(NamedTuple):
    """This rank's part of the model, and of the MTP layer beside it."""

    gpt: GPTModel
    mtp: MtpLayer | None


def built(architecture: Architecture, learner: LearnerConfig, read: Callable[[str], Tensor]) -> Parts:
    """This rank's part, of full tensors that `read` gives by their Hugging Face names."""
    shard = parallel.current_shard()
    require_divisible(architecture, tensor=shard.tensor_size, pipeline=shard.pipeline_size)
    require_even_experts(architecture.experts, learner.parallel)
    with host.cuda_as_cpu():
        model, mtp = build_model(architecture, learner, shard), build_mtp(architecture, learner)
    load_exactly(model, dict(shard_from_hf(read, architecture, shard)))
    if mtp is not None:
        load_exactly(mtp, dict(mtp_from_hf(read, architecture, shard)))
    return Parts(model, mtp)
