"""Low-rank adapters of the policy: trained factors beside frozen base weights, merged in place, and PEFT's files.

The model's parameters hold the merged matrices W + (alpha / rank) B A in the learner's dtype, and are merged anew after
each update. Learner and engines therefore compute with the same bits, as they do without adapters, and export,
fingerprints and drafts read the parameters as ever. The price is a copy of the base matrices W, which also serve as the
reference of a KL. A low-rank term that is added to activations would save that copy, but the engines' weights would be
rounded after the merge and the learner's would not: in bfloat16 most of a small update would reach the learner alone.
The low-rank term still carries the gradient (`_Through`), so no gradient of a whole matrix is kept.

The factors have PEFT's names. Megatron fuses matrices: each has factors of its own, and the rows of its B are placed on
its rows of the fused matrix. Tensor-parallel ranks split B with a matrix that is split by rows, and A with one that is
split by columns; the other factor is the same on all ranks.

Legend: `R` rows and `C` columns of this rank's part of a fused matrix, `P` adapters in it, `r` their rank.

Source: LoRA, arXiv:2106.09685; PEFT, `tuners/lora/layer.py` (initial values, scale, names).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
import xxhash
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from safetensors.torch import save_file
from torch import Tensor

from slipstream.learner import parallel
from slipstream.learner.architecture import Architecture, require_adaptable
from slipstream.learner.config import LoraConfig
from slipstream.learner.export import gathered_weights, held_weights
from slipstream.learner.weights import Layout, ParameterMapping, Shard, mappings, rows_of_parts
from slipstream.refit.fingerprint import part_fingerprints
from slipstream.storage import replaced_directory

FOLDER = "adapter"
"""Name of the folder with PEFT's files, in the directory of the merged policy."""
_LORA = "lora"  # child of a fused linear


class Adapters:
    """The adapters of this rank's part of a model, whose other parameters are frozen.

    Attributes:
        fingerprint: sum of the fingerprints of this rank's frozen parameters.
    """

    def __init__(self, gpt: GPTModel, arch: Architecture, lora: LoraConfig, *, base: str) -> None:
        """Freeze the model and add adapters that change nothing yet; `base` is the model's name in PEFT's files."""
        require_adaptable(arch, lora)
        self._gpt, self._arch, self._lora, self._base = gpt, arch, lora, base
        self._shard = parallel.current_shard()
        self._adapters: list[tuple[torch.nn.Module, Adapter]] = []
        gpt.requires_grad_(False)
        held = held_weights(dict(gpt.named_parameters()), arch, self._shard)
        self.fingerprint = sum(part_fingerprints(held).values())
        for mapping in mappings(arch, self._shard):
            if factors_of(mapping, lora):
                linear = gpt.get_submodule(mapping.megatron.removesuffix(".weight"))
                adapter = Adapter(cast(Tensor, linear.weight), mapping, arch, self._shard, lora)
                adapter.mark(sequence_parallel=gpt.config.sequence_parallel)
                linear.add_module(_LORA, adapter)
                linear.register_forward_hook(adapter.through_output)
                self._adapters.append((linear, adapter))
        if self._shard.is_first:  # a layer that is recomputed gets no gradient unless its input has one
            gpt.embedding.register_forward_hook(lambda module, args, out: out.requires_grad_(torch.is_grad_enabled()))

    def table(self, arch: Architecture, shard: Shard) -> Iterator[ParameterMapping]:
        """Trained parameters of a rank in model order."""
        for mapping in mappings(arch, shard):
            yield from factors_of(mapping, self._lora)

    def merge(self) -> None:
        """Write the merged matrices into the model's parameters."""
        for linear, adapter in self._adapters:
            adapter.merge(cast(Tensor, linear.weight))

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Give the model its base weights inside the block."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for linear, adapter in self._adapters:
            weight = cast(Tensor, linear.weight)
            weight.data, adapter.base = adapter.base, weight.data

    def save(self, path: Path) -> None:
        """Write `adapter_config.json` and `adapter_model.safetensors`, as PEFT reads them; collective."""
        named = dict(self._gpt.named_parameters())
        found = gathered_weights(named, self._arch, self._shard, table=self.table)
        weights = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in found}
        if parallel.is_main_rank():
            with replaced_directory(path) as directory:
                config = peft_config(self._lora, self._base)
                (directory / "adapter_config.json").write_text(json.dumps(config, indent=2))
                save_file(weights, directory / "adapter_model.safetensors", metadata={"format": "pt"})
        parallel.barrier()


class Adapter(torch.nn.Module):
    """Adapters of the matrices in one fused linear.

    Attributes:
        base: this rank's part of the frozen matrix [R, C]; no parameter, because the linear has the merged one.
        a: factors [r, C] by target; whole on every rank if the matrix is split by rows.
        b: factors [rows, r] by target; whole on every rank if the matrix is split by columns.
    """

    def __init__(
        self, weight: Tensor, mapping: ParameterMapping, arch: Architecture, shard: Shard, lora: LoraConfig
    ) -> None:
        super().__init__()
        self.base = weight.detach().clone()
        self._by_columns, self._sequence_parallel = mapping.layout is Layout.ROW, False
        self._scale, self._rank = lora.alpha / lora.rank, lora.rank
        self.a, self.b = torch.nn.ParameterDict(), torch.nn.ParameterDict()
        self._rows: list[Tensor] = []  # of each adapter's matrix in the fused one
        columns = weight.shape[1] * (shard.tensor_size if self._by_columns else 1)
        places = rows_of_parts(mapping, torch.arange(len(weight)), arch, shard)
        for name, rows in zip(mapping.hf, places, strict=True):
            if target_of(name) in lora.targets:
                a = initial_a(name, rank=lora.rank, columns=columns)
                own = a.chunk(shard.tensor_size, 1)[shard.tensor_rank] if self._by_columns else a
                self.a[target_of(name)] = torch.nn.Parameter(own.to(self.base).contiguous())
                self.b[target_of(name)] = torch.nn.Parameter(self.base.new_zeros(len(rows), lora.rank))
                self._rows.append(rows.to(self.base.device))

    def mark(self, *, sequence_parallel: bool) -> None:
        """Tag the factors for Megatron.

        A split factor counts in the gradient's norm on every rank. Under sequence parallelism a rank computes the
        gradient of a whole factor from its own tokens, and Megatron sums the gradients over the ranks.
        """
        self._sequence_parallel = sequence_parallel
        split, whole, dim = (self.a, self.b, 1) if self._by_columns else (self.b, self.a, 0)
        for factor in split.values():
            set_tensor_model_parallel_attributes(factor, is_parallel=True, dim=dim, stride=1)
        for factor in whole.values():
            cast(Any, factor).sequence_parallel = sequence_parallel

    def fused(self) -> tuple[Tensor, Tensor]:
        """Place the factors: B [R, P r], zero where a row belongs to another matrix, and A [P r, C]."""
        a = torch.cat(list(self.a.values()))
        b = a.new_zeros(len(self.base), len(a))
        for number, (rows, factor) in enumerate(zip(self._rows, self.b.values(), strict=True)):
            b[rows, number * self._rank : (number + 1) * self._rank] = factor
        return b, a

    @torch.no_grad()
    def merge(self, weight: Tensor) -> None:
        """Write base + (alpha / rank) B A, computed in float32, into `weight`."""
        b, a = self.fused()
        weight.copy_(torch.addmm(self.base.float(), b.float(), a.float(), alpha=self._scale))

    def through_weight(self, weight: Tensor) -> Tensor:
        """Return the merged weight with a gradient to the factors."""
        if not torch.is_grad_enabled():
            return weight
        b, a = self.fused()
        return cast(Tensor, _Through.apply(weight, (b * self._scale) @ a))

    def through_output(self, linear: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Give the output of the merged linear a gradient to the factors; a forward hook."""
        if not torch.is_grad_enabled():
            return output
        x, (value, bias) = args[0].detach(), output  # the merged linear passes the whole gradient on to its input
        b, a = self.fused()
        z = self._over_ranks(F.linear(x, a) * self._scale)
        return _Through.apply(value, F.linear(z, b)), bias

    def _over_ranks(self, z: Tensor) -> Tensor:
        """Sum A x over tensor-parallel ranks where they split the columns; where they split the rows, its gradient.

        Under sequence parallelism its tokens are scattered, or gathered, as the linear's are.
        """
        if self._by_columns:
            sums = reduce_scatter_to_sequence_parallel_region, reduce_from_tensor_model_parallel_region
        else:
            sums = gather_from_sequence_parallel_region, copy_to_tensor_model_parallel_region
        return cast(Tensor, sums[0](z) if self._sequence_parallel else sums[1](z))


class _Through(torch.autograd.Function):
    """Value of the first argument with the gradient of the sum of both."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, term: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0]


def weight_of(linear: Any) -> Tensor:
    """Return a linear's weight, with a gradient to its adapters if it has any."""
    adapter = linear._modules.get(_LORA)
    return cast(Tensor, linear.weight if adapter is None else adapter.through_weight(linear.weight))


def factors_of(mapping: ParameterMapping, lora: LoraConfig) -> list[ParameterMapping]:
    """List the factors of the adapters in one Megatron parameter, every A before every B."""
    if mapping.is_expert or not mapping.megatron.endswith(".weight"):
        return []
    module, is_row = mapping.megatron.removesuffix("weight"), mapping.layout is Layout.ROW
    a, b = (Layout.ROW, Layout.REPLICATED) if is_row else (Layout.REPLICATED, Layout.COLUMN)
    return [
        ParameterMapping(f"{module}{_LORA}.{factor}.{target_of(name)}", (peft_name(name, factor),), layout)
        for factor, layout in (("a", a), ("b", b))
        for name in mapping.hf
        if target_of(name) in lora.targets
    ]


def target_of(name: str) -> str:
    """Return the name of the projection whose weight a Hugging Face tensor is, such as `q_proj`."""
    return name.split(".")[-2]


def peft_name(name: str, factor: str) -> str:
    """Return the name in PEFT's file of the factor `a` or `b` of a Hugging Face tensor."""
    return f"base_model.model.{name.removesuffix('.weight')}.lora_{factor.upper()}.weight"


def initial_a(name: str, *, rank: int, columns: int) -> Tensor:
    """Sample A [rank, columns] as PEFT does, uniformly within 1 / sqrt(columns).

    The seed is the tensor's name, so the values depend neither on the layout nor on the other targets.
    """
    generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(name.encode()) >> 1)
    bound = 1 / math.sqrt(columns)
    return torch.empty(rank, columns).uniform_(-bound, bound, generator=generator)


def peft_config(lora: LoraConfig, base: str) -> dict[str, Any]:
    """Return the content of `adapter_config.json`."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": [target.value for target in lora.targets],
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "modules_to_save": None,
    }
