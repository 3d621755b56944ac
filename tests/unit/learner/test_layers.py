"""Which kernels the layers are built from."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
from megatron.core.models.common.embeddings import rope_utils
from torch import Tensor

from slipstream.learner import layers
from slipstream.learner.architecture import Architecture
from slipstream.learner.config import LearnerConfig
from slipstream.types import Dtype
from tests.unit.learner.policies import SCRATCH


@pytest.mark.parametrize(("dtype", "asked"), [(Dtype.FLOAT32, []), (Dtype.BFLOAT16, ["transformer_engine"])])
def test_float32_on_a_gpu_is_computed_by_torch_even_where_transformer_engine_is_installed(
    monkeypatch: pytest.MonkeyPatch, dtype: Dtype, asked: list[str]
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(layers.host, "is_cpu_only", lambda: False)
    monkeypatch.setattr(layers, "find_spec", seen.append)
    kernels = layers._kernels(LearnerConfig(dtype=dtype))
    assert seen == asked  # only its absence, here, gives bfloat16 torch's kernels
    assert kernels.column is layers.ColumnParallelLinear


@pytest.mark.parametrize(("has_gpu", "dtype"), [(True, Dtype.BFLOAT16), (True, Dtype.FLOAT32), (False, Dtype.BFLOAT16)])
def test_the_gated_unit_is_compiled_on_a_gpu_in_bfloat16_alone(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool, dtype: Dtype
) -> None:
    monkeypatch.setattr(layers.host, "is_cpu_only", lambda: not has_gpu)
    arch = Architecture.from_scratch(SCRATCH, vocab_size=32, eos_token_id=1)
    fuses = layers._transformer_config(arch, LearnerConfig(dtype=dtype)).bias_activation_fusion
    assert fuses is (has_gpu and dtype is Dtype.BFLOAT16)


def _with_gradient(function: Any, *inputs: Tensor) -> list[Tensor]:
    first, *others = inputs
    leaf = first.clone().requires_grad_()
    found = function(leaf, *others)
    found.square().sum().backward()
    assert leaf.grad is not None
    return [found.detach(), leaf.grad]


def test_a_compiled_rotation_takes_tensors_and_sizes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number among its inputs would be a tensor on the CPU, and need g++ on a host of GPUs."""
    inputs: list[list[Any]] = []

    def noted(graph: torch.fx.GraphModule, examples: list[Any]) -> Any:
        inputs.append([example.dim() for example in examples if isinstance(example, Tensor)])
        return graph.forward

    monkeypatch.setattr(rope_utils, "_apply_rotary_pos_emb_bshd", layers._ROTATE)
    monkeypatch.setattr(torch._dynamo.config, "specialize_float", False)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=noted))
    layers.fuse_rotary_embedding()
    heads, angles = torch.ones(7, 1, 2, 8), torch.ones(7, 1, 1, 8)
    rope_utils._apply_rotary_pos_emb_bshd(heads, angles, mscale=1.5)
    assert inputs == [[4, 4]]


@pytest.mark.slow  # torch compiles them with g++
def test_compiled_gated_unit_and_rotation_are_those_of_single_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope_utils, "_apply_rotary_pos_emb_bshd", layers._ROTATE)
    layers.fuse_rotary_embedding()
    rotate = rope_utils._apply_rotary_pos_emb_bshd
    layers.fuse_rotary_embedding()
    assert rotate is rope_utils._apply_rotary_pos_emb_bshd
    assert rotate is not layers._ROTATE
    numbers = torch.Generator().manual_seed(0)
    for num_tokens in (7, 12):
        both = torch.randn(num_tokens, 1, 16, generator=numbers)
        unit = _with_gradient(lambda x: torch.nn.functional.silu(x[..., :8]) * x[..., 8:], both)
        torch.testing.assert_close(_with_gradient(lambda x: bias_swiglu_impl(x, None), both), unit)
        heads, angles = (torch.randn(num_tokens, 1, n, 8, generator=numbers) for n in (2, 1))
        turned = _with_gradient(layers._ROTATE, heads, angles)
        torch.testing.assert_close(_with_gradient(rotate, heads, angles), turned)
