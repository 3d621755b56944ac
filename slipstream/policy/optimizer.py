"""Megatron's gradient buffers and optimizer around a model."""

from __future__ import annotations

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig

from slipstream.policy import cpu
from slipstream.policy.config import Dtype, LearnerConfig, OptimizerConfig
from slipstream.policy.layers import TORCH_DTYPES


def with_optimizer(
    gpt: GPTModel, learner: LearnerConfig, config: OptimizerConfig
) -> tuple[DistributedDataParallel, MegatronOptimizer]:
    """Wrap a model so that its gradients accumulate in float32 buffers, and give it AdamW over float32 masters."""
    dtype = TORCH_DTYPES[learner.dtype]
    with cpu.cuda_as_cpu():
        module = DistributedDataParallel(
            config=gpt.config,
            ddp_config=DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False),
            module=gpt,
        )
        optimizer = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=config.learning_rate,
                adam_beta1=config.betas[0],
                adam_beta2=config.betas[1],
                adam_eps=config.eps,
                weight_decay=config.weight_decay,
                clip_grad=config.clip_grad,
                bf16=learner.dtype is Dtype.BFLOAT16,
                params_dtype=dtype,
            ),
            [module],
        )
    for group in optimizer.param_groups:
        group["fused"] = True  # torch's AdamW loops over tensors on a CPU unless told; one kernel a tensor is enough
    return module, optimizer
