"""Megatron's gradient buffers and optimizer around a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.transformer.module import MegatronModule

from slipstream.grpo.config import OptimizerConfig, OptimizerMethod
from slipstream.learner.config import LearnerConfig
from slipstream.learner.cpu import host
from slipstream.learner.layers import TORCH_DTYPES
from slipstream.learner.muon import BatchedMuon
from slipstream.types import Dtype

# The defaults are 0.95 and five. A short training wants a shorter memory, and three iterations teach as much as five:
# docs/log.md
_MUON_MOMENTUM = 0.9
_NUM_MUON_ITERATIONS = 3


def with_optimizer(
    model: MegatronModule, learner: LearnerConfig, config: OptimizerConfig
) -> tuple[DistributedDataParallel, MegatronOptimizer]:
    """Wrap a model so that its gradients accumulate in float32 buffers, and give it an optimizer of float32 masters."""
    with host.cuda_as_cpu():
        module = DistributedDataParallel(
            config=model.config,
            ddp_config=DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=False,
                use_distributed_optimizer=learner.distributed_optimizer,
            ),
            module=model,
        )
        settings = MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.learning_rate,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            weight_decay=config.weight_decay,
            clip_grad=config.clip_grad,
            bf16=learner.dtype is Dtype.BFLOAT16,
            params_dtype=TORCH_DTYPES[learner.dtype],
            use_distributed_optimizer=learner.distributed_optimizer,
        )
        matrices = _hidden_matrices(model) if config.method is OptimizerMethod.MUON else []
        with _left_out(matrices):
            optimizer = get_megatron_optimizer(settings, [module])
        for group in optimizer.param_groups:
            # torch's AdamW loops over tensors on a CPU unless told; one kernel a tensor is enough.
            group["fused"] = True
        if matrices:
            assert isinstance(optimizer, ChainedOptimizer)
            optimizer = ChainedOptimizer([*optimizer.chained_optimizers, _muon(matrices, settings)])
    return module, optimizer


def _hidden_matrices(model: MegatronModule) -> list[torch.nn.Parameter]:
    """What Muon is for: every matrix but the embedding and the output layer."""
    return [
        parameter
        for parameter in model.parameters()
        if parameter.dim() == 2 and not getattr(parameter, "is_embedding_or_output_parameter", False)
    ]


@contextmanager
def _left_out(parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """Megatron's optimizer passes over what needs no gradient."""
    for parameter in parameters:
        parameter.requires_grad = False
    yield
    for parameter in parameters:
        parameter.requires_grad = True


def _muon(matrices: Sequence[torch.nn.Parameter], settings: MegatronOptimizerConfig) -> MegatronOptimizer:
    """Muon with Megatron's masters; Megatron's own needs a package that knows no Python 3.11."""
    assert settings.lr is not None
    muon = BatchedMuon(
        matrices,
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        momentum=_MUON_MOMENTUM,
        num_iterations=_NUM_MUON_ITERATIONS,
        dtype=settings.params_dtype,
    )

    def without_state(*_: Any) -> None:
        """Only Megatron's checkpoints ask for it, and this project writes its own."""

    wrapped: Any = (
        Float16OptimizerWithFloat16Params(muon, settings, cast(Any, None), without_state)
        if settings.bf16
        else FP32Optimizer(muon, settings, without_state)
    )
    wrapped.grad_stats_parallel_group = parallel_state.get_model_parallel_group()
    wrapped.tp_group = parallel_state.get_tensor_model_parallel_group()
    return wrapped
