"""A checkpoint's files: what is written is what safetensors reads, and its digest that of the bytes on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file

from slipstream.learner.checkpoint.boxes import Box, Slice, index_from_json, index_to_json, indexed
from slipstream.learner.checkpoint.on_disk import DTYPES, Sum, sum_of, write_json, write_tensors


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_each_type_are_read_back_by_safetensors(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {
        "a[0,0]": torch.arange(6).to(dtype).view(2, 3),
        "b": torch.arange(5).to(dtype),
        "none": torch.empty(0, 2),
    }
    total = write_tensors(tmp_path / "f", tensors)
    read = load_file(tmp_path / "f")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in tensors.items())
    data = (tmp_path / "f").read_bytes()
    assert total == Sum(len(data), xxhash.xxh3_128(data).hexdigest()) == sum_of(tmp_path / "f")


def test_a_part_of_a_tensor_is_read_alone(tmp_path: Path) -> None:
    write_tensors(tmp_path / "f", {"m": torch.arange(12.0).view(3, 4)})
    with safe_open(tmp_path / "f", framework="pt") as file:
        assert torch.equal(file.get_slice("m")[1:3, 2:3], torch.tensor([[6.0], [10.0]]))


def test_json_without_numbers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "f", {"loss": float("nan")})


def _slice(offset: tuple[int, ...], shape: tuple[int, ...], *, dtype: str = "F32", file: str = "f") -> Slice:
    return Slice("w", dtype, (2, 4), Box(offset, shape), file)


def test_an_index_comes_back_from_its_json() -> None:
    index = indexed([_slice((0, 0), (2, 3)), _slice((0, 3), (2, 1), file="g")])
    assert index["w"].shape == (2, 4)
    assert [each.key for each in index["w"].slices] == ["w[0,0]", "w[0,3]"]
    assert index_from_json(index_to_json(index)) == index


@pytest.mark.parametrize(
    "slices",
    [
        [_slice((0, 0), (2, 3))],
        [_slice((0, 0), (2, 3)), _slice((0, 2), (2, 2))],
        [_slice((0, 0), (2, 4)), _slice((0, 0), (2, 4), file="g")],
        [_slice((0, 0), (2, 3)), _slice((0, 3), (2, 2))],
        [_slice((0, 0), (2, 3)), _slice((1, 0), (1, 2))],
    ],
    ids=["hole", "overlap", "replica", "beyond", "right number of elements, wrong places"],
)
def test_slices_that_do_not_cover_a_tensor_once_are_refused(slices: list[Slice]) -> None:
    with pytest.raises(ValueError, match="slices of w must cover its shape"):
        indexed(slices)


def test_slices_of_two_types_are_refused() -> None:
    with pytest.raises(ValueError, match="slices of w must agree"):
        indexed([_slice((0, 0), (2, 3)), _slice((0, 3), (2, 1), dtype="BF16")])
