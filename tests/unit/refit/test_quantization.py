"""Weights in 8 bits: values and scales, their reference, what is quantized, and what is rounded beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStrategy,
    QuantizationType,
)
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.lifecycle.forward import quantize as reference

from slipstream.learner.judge import rounded_weights
from slipstream.refit.config import WeightFormat
from slipstream.refit.quantization import checkpoint_config, quantize, quantized, restored, rounded_input
from slipstream.refit.stream import WeightSource
from slipstream.types import Quantization
from tests.small import ENGINE

INT8 = WeightFormat(dtype="int8", largest=127, largest_input=127)
FP8 = WeightFormat(dtype="float8_e4m3fn", largest=448, largest_input=448)


def test_values_by_hand() -> None:
    matrix = torch.tensor([[0.5, -1.27, 0.012, 0.0], [0.0, 0.0, 0.0, 0.0], [3.0, 1.5, -6.0, 0.07]])
    values, scale = quantize(matrix, INT8)
    assert values.tolist() == [[50, -127, 1, 0], [0, 0, 0, 0], [64, 32, -127, 1]]  # 63.5 to the even number
    torch.testing.assert_close(scale, torch.tensor([[0.01], [1.0], [6 / 127]]))
    assert values.dtype is torch.int8 and scale.dtype is torch.float32
    assert quantize(matrix, replace(INT8, largest=64))[0][0].tolist() == [25, -64, 1, 0]


@pytest.mark.parametrize("form", [INT8, FP8])
def test_rows_of_the_least_numbers_stay_within_the_format(form: WeightFormat) -> None:
    """A scale of 190 / 127 least numbers is rounded to 1 of them, and one of 1 / 448 to 0."""
    least = 2.0**-149
    values, scale = quantize(torch.tensor([[190 * least, -190 * least], [least, 0.0]]), replace(form, largest=127))
    assert values.float().tolist() == [[127, -127] if form is INT8 else [128, -128], [0, 0]]
    assert scale.tolist() == [[least], [1.0]]


@pytest.mark.parametrize(("form", "kind"), [(INT8, QuantizationType.INT), (FP8, QuantizationType.FLOAT)])
def test_values_are_those_of_compressed_tensors(form: WeightFormat, kind: QuantizationType) -> None:
    """Its own scales differ (127.5 steps in int8); with ours its values, and what they stand for, are equal."""
    matrix = torch.randn(40, 24, generator=torch.Generator().manual_seed(1))
    values, scale = quantize(matrix, form)
    args = QuantizationArgs(num_bits=8, type=kind, symmetric=True, strategy=QuantizationStrategy.CHANNEL)
    zero = torch.zeros_like(scale, dtype=torch.int8)
    theirs = reference(matrix, scale, zero, args, dtype=getattr(torch, form.dtype))
    assert torch.equal(values.float(), theirs.float())
    assert torch.equal(restored(matrix, form), dequantize(theirs, scale, zero, args, dtype=torch.float32))
    assert (restored(matrix, form) - matrix).abs().max() < (0.02 if kind is QuantizationType.INT else 0.15)


@pytest.mark.parametrize("form", [INT8, FP8])
def test_a_judge_reads_from_bfloat16_the_very_weights_that_an_engine_multiplies_with(form: WeightFormat) -> None:
    name, norm = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"
    saved = {name: torch.randn(8, 64).bfloat16(), norm: torch.ones(4).bfloat16()}
    read = rounded_weights(saved.__getitem__, form)
    values, scale = quantize(saved[name], form)
    assert torch.equal(read(name), values.float() * scale)
    assert torch.equal(read(norm), saved[norm])


@pytest.mark.parametrize("form", [INT8, FP8])
def test_the_checkpoints_config_is_one_that_compressed_tensors_reads(form: WeightFormat) -> None:
    config = QuantizationConfig.model_validate(checkpoint_config(form))
    (scheme,) = config.config_groups.values()
    assert isinstance(scheme, QuantizationScheme)
    assert scheme.weights is not None and scheme.input_activations is not None
    assert scheme.weights.pytorch_dtype() is getattr(torch, form.dtype)
    assert (scheme.weights.strategy, scheme.input_activations.strategy) == ("channel", "token")
    assert (scheme.weights.dynamic, scheme.input_activations.dynamic) == (False, True)
    assert scheme.weights.symmetric and scheme.input_activations.symmetric
    assert config.ignore == ["lm_head"]


def test_matrices_of_layers_alone_are_quantized_and_once() -> None:
    of_layer = ("self_attn.k_proj.weight", "self_attn.k_proj.bias", "mlp.down_proj.weight", "input_layernorm.weight")
    others = ("embed_tokens.weight", "mtp_layers.0.mlp.down_proj.weight")
    names = [f"model.{name}" for name in (*(f"layers.3.{name}" for name in of_layer), *others)]
    names += ["lm_head.weight", "layers.0.mlp.down_proj.weight"]
    once = list(quantized([(name, torch.randn(4, 4)) for name in names], INT8))
    added = ["model.layers.3.mlp.down_proj.weight_scale", "model.layers.3.self_attn.k_proj.weight_scale"]
    assert sorted(name for name, tensor in once if name not in names) == added
    assert sum(tensor.dtype is torch.int8 for _, tensor in once) == len(added)
    again = list(quantized(once, INT8))
    assert [name for name, _ in again] == [name for name, _ in once]
    assert all(a is b for (_, a), (_, b) in zip(once, again, strict=True))


def test_inputs_are_rounded_by_token_and_slice() -> None:
    states = torch.tensor([[[1.0, 0.3, 100.0, 7.0], [0.0, 0.0, 0.0, 0.0]]])
    on_cpu = replace(INT8, largest=64)  # of weights
    whole, halves = rounded_input(states, on_cpu), rounded_input(states, on_cpu, num_slices=2)
    step = 100 / 127
    torch.testing.assert_close(whole[0, 0], torch.tensor([step, 0.0, 100.0, 9 * step]))
    torch.testing.assert_close(halves[0, 0], torch.tensor([1.0, 38 / 127, 100.0, 9 * step]))
    assert not whole[0, 1].any()


@pytest.mark.parametrize("form", [INT8, FP8])
def test_a_weight_that_is_no_number_is_refused_by_its_scales(form: WeightFormat) -> None:
    matrix = torch.ones(3, 3)
    matrix[1, 2] = torch.nan
    source = WeightSource(lambda: quantized([("model.layers.0.mlp.up_proj.weight", matrix)], form), model="policy")
    list(source)
    with pytest.raises(ValueError, match=r"up_proj\.weight_scale of the policy must be finite"):
        source.require_finite()


def test_cpus_keep_to_values_that_no_processor_adds_wrongly() -> None:
    on_cpu = replace(ENGINE, quantization=Quantization.INT8)
    on_gpu = replace(on_cpu, kv_cache_gib=None, tensor_parallel_size=2)
    assert ENGINE.weight_format is None
    assert on_cpu.weight_format == replace(INT8, largest=64)
    assert on_gpu.weight_format == replace(INT8, num_ranks=2)
    assert replace(on_gpu, quantization=Quantization.FP8).weight_format == replace(FP8, num_ranks=2)
