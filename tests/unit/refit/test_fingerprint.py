"""Equal bits, equal fingerprint, and nothing else is equal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slipstream.refit.fingerprint import (
    WeightPart,
    combined,
    differences,
    directory_fingerprint,
    file_fingerprints,
    fingerprint,
    part_fingerprints,
)

MATRIX = torch.arange(12, dtype=torch.float32).view(3, 4)


def part(name: str = "m", dim: int = 0, start: int = 0, length: int = 3, dtype: str = "float32") -> WeightPart:
    return WeightPart(name=name, dim=dim, start=start, length=length, dtype=dtype)


def test_a_fingerprint_follows_values_shape_and_type() -> None:
    assert fingerprint(MATRIX) == fingerprint(MATRIX.clone())
    assert fingerprint(MATRIX) == fingerprint(MATRIX.T.contiguous().T)  # the layout in memory is nobody's business
    others = [MATRIX + 1, MATRIX.view(4, 3), MATRIX.to(torch.float64), MATRIX.to(torch.int32)]
    assert len({fingerprint(tensor) for tensor in (MATRIX, *others)}) == 5


def test_one_bit_is_seen() -> None:
    changed = MATRIX.clone()
    changed.view(torch.int32)[2, 3] ^= 1
    assert fingerprint(changed) != fingerprint(MATRIX)


def test_values_far_below_1_are_seen() -> None:
    assert fingerprint(torch.tensor([1e-30])) != fingerprint(torch.tensor([0.0]))


def test_minus_zero_counts_as_zero_and_a_gradient_is_no_difference() -> None:
    assert fingerprint(torch.tensor([-0.0])) == fingerprint(torch.tensor([0.0]))
    assert fingerprint(torch.tensor([1.0], requires_grad=True)) == fingerprint(torch.tensor([1.0]))


def test_named_fingerprints_combine_in_any_order() -> None:
    assert combined({"a": "1", "b": "2"}) == combined({"b": "2", "a": "1"})
    assert len({combined(each) for each in ({}, {"a": "1"}, {"a": "2"}, {"b": "1"}, {"a": "1", "b": "2"})}) == 5


def test_a_directorys_fingerprint_is_of_its_tensors_however_they_are_divided(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for directory in (whole, parts):
        directory.mkdir()
    save_file({"m": MATRIX, "v": MATRIX[0].clone()}, whole / "model.safetensors")
    save_file({"m": MATRIX}, parts / "model-1.safetensors")
    save_file({"v": MATRIX[0].clone()}, parts / "model-2.safetensors")
    (whole / "config.json").write_text("{}")
    expected = combined({"m": fingerprint(MATRIX), "v": fingerprint(MATRIX[0])})
    assert directory_fingerprint(whole) == directory_fingerprint(parts) == expected


def test_a_directory_without_tensors_has_no_fingerprint(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        directory_fingerprint(tmp_path)
    assert str(caught.value) == f"{tmp_path} must hold a safetensors file"


def test_differences_are_in_values_and_in_names_on_either_side() -> None:
    assert differences({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "0", "d": "4"}) == ["b", "c", "d"]
    assert differences({"a": "1"}, {"a": "1"}) == []


def test_a_part_is_cut_and_converted_as_the_engine_holds_it() -> None:
    rows, columns, rounded = part(start=1, length=2), part(dim=1, start=3, length=1), part(dtype="bfloat16")
    assert [each.key for each in (rows, columns)] == ["m[0:1+2]", "m[1:3+1]"]
    assert part_fingerprints([("x", MATRIX), ("m", MATRIX)], [rows, columns]) == {
        rows.key: fingerprint(MATRIX[1:3]),
        columns.key: fingerprint(MATRIX[:, 3:]),
    }
    assert part_fingerprints([("m", MATRIX + 0.001)], [rounded]) == {
        rounded.key: fingerprint((MATRIX + 0.001).to(torch.bfloat16))
    }


def test_parts_are_found_in_a_file_and_in_a_directory_of_them(tmp_path: Path) -> None:
    save_file({"m": MATRIX}, tmp_path / "model-1.safetensors")
    save_file({"v": MATRIX[0].clone()}, tmp_path / "model-2.safetensors")
    (tmp_path / "config.json").write_text("{}")
    vector = part(name="v", length=4)
    expected = {part().key: fingerprint(MATRIX), vector.key: fingerprint(MATRIX[0])}
    assert file_fingerprints(tmp_path, [part(), vector]) == expected
    assert file_fingerprints(tmp_path / "model-1.safetensors", [part()]) == {part().key: fingerprint(MATRIX)}
