"""Equal bits in equal places, equal fingerprint, however the tensor is cut; and nothing else is equal."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from slipstream.refit import fingerprint
from slipstream.refit.fingerprint import (
    ALL,
    HeldWeights,
    Turn,
    WeightPart,
    differences,
    directory_fingerprint,
    file_fingerprints,
    held_whole,
    part_fingerprints,
    weight_totals,
)

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.int8, torch.float8_e4m3fn]
MATRIX = torch.arange(12, dtype=torch.float32).view(3, 4)


def part(name: str = "m", dim: int = 0, start: int = 0, length: int = 3, dtype: str = "float32") -> WeightPart:
    return WeightPart(name=name, dim=dim, start=start, length=length, dtype=dtype)


def held(tensor: Tensor, *parts: WeightPart) -> HeldWeights:
    lengths = [each.length for each in parts]
    return HeldWeights(
        tensor=tensor, parts=parts, split=lambda rows: [rows] if parts[0].dim == 1 else rows.split(lengths)
    )


def whole(tensor: Tensor, name: str = "m") -> int:
    (value,) = part_fingerprints([held_whole(name, tensor)]).values()
    return value


def split_mix(seed: int, index: int) -> int:
    """The odd key of a row or column by its definition, in Python's own integers."""
    mask = 2**64 - 1
    x = (index + 1) * 0x9E3779B97F4A7C15 + seed & mask
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    return (x ^ x >> 31) | 1


def by_definition(tensor: Tensor, name: str) -> int:
    """The sum of the module's docstring, element by element, for float32."""
    total = 0
    for r, row in enumerate(tensor.view(torch.int32).tolist()):
        for c, bits in enumerate(row):
            key = split_mix(fingerprint._COLUMN_SEED, c)
            product = bits * key % 2**64
            product -= 2**64 if product >= 2**63 else 0  # shifts repeat the sign
            total += split_mix(fingerprint._ROW_SEED, r) * (key + (product ^ product >> 32))
    dtype = str(tensor.dtype).removeprefix("torch.")
    return total * (xxhash.xxh3_64_intdigest(f"{dtype} {name}".encode()) | 1) % 2**64


def test_a_fingerprint_is_the_sum_that_it_is_defined_as() -> None:
    tensor = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    for name in ("w", "lm_head.weight", *map(str, range(8))):
        assert whole(tensor, name) == by_definition(tensor, name)


def test_a_fingerprint_follows_name_values_shape_and_type_but_not_the_layout_in_memory() -> None:
    assert whole(MATRIX) == whole(MATRIX.clone()) == whole(MATRIX.T.contiguous().T)
    assert whole(MATRIX) == whole(torch.zeros(3, 9)[:, 2:6].copy_(MATRIX))
    others = [MATRIX + 1, MATRIX.view(4, 3), MATRIX.view(12), MATRIX.T, MATRIX.to(torch.float64), MATRIX.int()]
    values = {whole(tensor) for tensor in (MATRIX, *others)} | {whole(MATRIX, "n")}
    assert len(values) == 8
    assert all(0 <= value < 2**64 for value in values)
    zeros = [torch.zeros(shape, dtype=dtype) for shape in ((3,), (4,), (2, 3), (3, 2)) for dtype in (torch.int64, None)]
    assert len({whole(tensor) for tensor in zeros}) == 8


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16, torch.float64])
def test_every_single_bit_of_every_element_is_seen(dtype: torch.dtype) -> None:
    tensor = torch.randn(2, 3, generator=torch.Generator().manual_seed(1)).mul(100).to(dtype)
    bits = tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    seen = {whole(tensor)}
    for row in range(2):
        for column in range(3):
            for bit in range(8 * dtype.itemsize):
                mask = 1 << bit if bit < 8 * dtype.itemsize - 1 else -(1 << bit)
                bits[row, column] ^= mask
                seen.add(whole(tensor))
                bits[row, column] ^= mask
    assert len(seen) == 1 + 6 * 8 * dtype.itemsize


def test_signs_flipped_in_pairs_are_seen() -> None:
    """In a sum without mixing, the highest bits of two elements would carry each other out of 64 bits, or nearly so."""
    tensor = torch.randn(64, 64, generator=torch.Generator().manual_seed(2))
    seen = {whole(tensor)}
    for row in range(64):
        for other in range(row):
            changed = tensor.clone()
            changed[row, row] *= -1
            changed[other, 5] *= -1
            seen.add(whole(changed))
    assert len(seen) == 1 + 64 * 63 // 2


def test_no_two_of_many_small_tensors_share_a_fingerprint_or_half_of_one() -> None:
    """Bytes as two columns of two rows, each value in each place: 2**16 tensors, and 2**32 pairs of them.

    Two random numbers of 64 bits agree in the upper 40 with a probability of 2**-40: among all pairs, once in 512 runs.
    """
    values = torch.arange(2**16)
    tensors = torch.stack([values & 15, values >> 4 & 15, values >> 8 & 15, values >> 12], dim=1).bfloat16()
    found = part_fingerprints(held_whole(f"{i}", tensors[i].view(2, 2)) for i in range(0, 2**16, 8)).values()
    same_name = {whole(tensors[i].view(2, 2)) for i in range(0, 2**16, 16)}
    assert len({value >> 24 for value in found}) == 2**13
    assert len({value >> 24 for value in same_name}) == 2**12


def test_what_may_go_wrong_with_a_refit_is_seen() -> None:
    tensor = torch.randn(6, 6, generator=torch.Generator().manual_seed(3))
    swapped = tensor.clone()
    swapped[1, 2], swapped[4, 0] = tensor[4, 0], tensor[1, 2]
    wrong = {
        "transposed": tensor.T,
        "rows permuted": tensor[[1, 0, 2, 3, 4, 5]],
        "columns permuted": tensor[:, [0, 1, 2, 4, 3, 5]],
        "row shards swapped": torch.cat([tensor[3:], tensor[:3]]),
        "column shards swapped": torch.cat([tensor[:, 3:], tensor[:, :3]], dim=1),
        "a shard twice": torch.cat([tensor[:3], tensor[:3]]),
        "two elements swapped": swapped,
        "rounded": tensor.bfloat16().float(),
        "a row left out": tensor[:5],
    }
    values = {kind: whole(each) for kind, each in wrong.items()}
    assert len({whole(tensor), *values.values()}) == 1 + len(wrong), values


def test_minus_zero_counts_as_zero_and_a_gradient_is_no_difference() -> None:
    assert whole(torch.tensor([-0.0])) == whole(torch.tensor([0.0]))
    tiny = part_fingerprints([held_whole("m", torch.tensor([-1e-30]))], {"m": "float16"})
    assert list(tiny.values()) == [whole(torch.tensor([0.0]).half())]  # -0.0 once it is rounded
    assert whole(torch.tensor([1.0], requires_grad=True)) == whole(torch.tensor([1.0]))
    assert whole(torch.tensor([1e-30])) != whole(torch.tensor([0.0]))


def cuts(size: int, draw: random.Random) -> list[tuple[int, int]]:
    """Starts and lengths of random pieces, some of them empty."""
    bounds = sorted([0, size, *(draw.randint(0, size) for _ in range(draw.randint(0, 4)))])
    return [(start, stop - start) for start, stop in pairwise(bounds)]


@settings(deadline=None, max_examples=60)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    dtype=st.sampled_from([*DTYPES, torch.bool]),
    transposed=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_shards_sum_to_the_whole_however_it_is_cut(
    shape: Sequence[int], dtype: torch.dtype, transposed: bool, seed: int
) -> None:
    draw = random.Random(seed)
    tensor = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    name = str(dtype).removeprefix("torch.")
    dim = draw.randrange(min(2, len(shape))) if len(shape) < 3 else 0
    shards = [part(dim=dim, start=start, length=length, dtype=name) for start, length in cuts(shape[dim], draw)]
    draw.shuffle(shards)
    ranks = []
    for shard in shards:
        cut = tensor.narrow(dim, shard.start, shard.length)
        cut = cut.transpose(0, 1).contiguous().transpose(0, 1) if transposed and cut.dim() > 1 else cut
        ranks.append(part_fingerprints([held(cut, shard)]))
    copies = [ranks[0]]  # what two ranks hold counts once
    assert weight_totals([*ranks, *copies]) == {"m": whole(tensor)}


@pytest.mark.parametrize("shape", [(700, 1000), (2, 300_000), (600_000, 1), (600_000,)])
def test_a_tensor_of_several_chunks_is_the_sum_of_small_pieces(shape: Sequence[int]) -> None:
    tensor = torch.randn(*shape, generator=torch.Generator().manual_seed(4))
    for dim in range(len(shape)):
        pieces = tensor.split(-(-shape[dim] // 7), dim)
        starts = [index * len(pieces[0].transpose(0, dim)) for index in range(len(pieces))]
        ranks = [
            part_fingerprints([held(piece, part(dim=dim, start=start, length=piece.shape[dim]))])
            for start, piece in zip(starts, pieces, strict=True)
        ]
        assert weight_totals(ranks) == {"m": whole(tensor)}
    if len(shape) == 2:
        assert whole(tensor.T.contiguous().T) == whole(tensor)


def test_parts_that_lie_in_one_tensor_are_told_apart() -> None:
    stacked = torch.cat([MATRIX, MATRIX + 1, MATRIX + 2])
    gate, up = part("gate", start=3, length=3), part("up", start=0, length=6)
    found = part_fingerprints([held(stacked, gate, up)])
    assert found == part_fingerprints([held(MATRIX, gate), held(stacked[3:], up)])


@pytest.mark.parametrize("fails", [False, True])
def test_one_thread_computes_and_afterwards_there_are_as_many_as_before(fails: bool) -> None:
    seen, before = [], torch.get_num_threads()

    def weights() -> Iterator[HeldWeights]:
        seen.append(torch.get_num_threads())
        if fails:
            raise LookupError("hidden")
        yield held_whole("m", MATRIX)

    torch.set_num_threads(3)
    try:
        for _ in range(2):
            with pytest.raises(LookupError, match="hidden") if fails else nullcontext():
                part_fingerprints(weights())
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 1]


def test_a_part_is_converted_as_the_engine_holds_it() -> None:
    blurred = MATRIX + 0.001
    found = part_fingerprints([held(blurred, part()), held(MATRIX[0], part("v", length=4))], {"m": "bfloat16"})
    assert found == {part(dtype="bfloat16"): whole(blurred.bfloat16()), part("v", length=4): whole(MATRIX[0], "v")}


def test_ranks_or_layers_that_disagree_on_what_they_share_are_an_error() -> None:
    mine, other = part_fingerprints([held(MATRIX, part())] * 2), {part(): 1}
    assert mine == {part(): whole(MATRIX)}
    assert weight_totals([mine, mine]) == {"m": whole(MATRIX)}
    assert weight_totals([{}, part_fingerprints([])]) == {}
    with pytest.raises(RuntimeError, match=r"^ranks disagree on m and 0 other tensors that they share$"):
        weight_totals([mine, other])
    with pytest.raises(RuntimeError, match=r"^m must be one tensor in all layers that share it, got two$"):
        part_fingerprints([held(MATRIX, part()), held(MATRIX + 1, part())])


def test_a_directorys_fingerprint_is_of_its_tensors_however_they_are_divided(tmp_path: Path) -> None:
    one, parts = tmp_path / "one", tmp_path / "parts"
    for directory in (one, parts):
        directory.mkdir()
    save_file({"m": MATRIX, "v": MATRIX[0].clone()}, one / "model.safetensors")
    save_file({"m": MATRIX}, parts / "model-1.safetensors")
    save_file({"v": MATRIX[0].clone()}, parts / "model-2.safetensors")
    (one / "config.json").write_text("{}")
    expected = (whole(MATRIX) + whole(MATRIX[0], "v")) % 2**64
    assert directory_fingerprint(one) == directory_fingerprint(parts) == f"{expected:016x}"
    save_file({"m.w": MATRIX}, parts / "consolidated.safetensors")  # the same weights once more, as Mistral names them
    weight_map = {"m": "model-1.safetensors", "v": "model-2.safetensors"}
    (parts / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert directory_fingerprint(parts) == f"{expected:016x}"
    with pytest.raises(FileNotFoundError) as caught:
        directory_fingerprint(tmp_path)
    assert str(caught.value) == f"{tmp_path} must hold a safetensors file"


def test_differences_are_in_values_and_in_names_on_either_side() -> None:
    assert differences({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 0, "d": 4}) == ["b", "c", "d"]
    assert differences({"a": 1}, {"a": 1}) == []


def test_tensors_of_a_file_are_read_as_the_engine_holds_them(tmp_path: Path) -> None:
    save_file({"m": MATRIX + 0.001, "left out": MATRIX}, tmp_path / "model-1.safetensors")
    save_file({"v": MATRIX[0].clone()}, tmp_path / "model-2.safetensors")
    (tmp_path / "config.json").write_text("{}")
    dtypes = {"m": "bfloat16", "v": "float32", "nowhere": "float32"}
    expected = {"m": whole((MATRIX + 0.001).bfloat16()), "v": whole(MATRIX[0], "v")}
    assert file_fingerprints(tmp_path, dtypes) == expected
    assert file_fingerprints(tmp_path / "model-1.safetensors", dtypes) == {"m": expected["m"]}


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("model.layers.5.mlp.up_proj.weight", 2),
        ("model.layers.6.mlp.experts.1.weight", 0),
        ("layers.1.weight", 1),
        ("norm.weight", 0),
    ],
)
def test_each_tensor_has_the_turn_of_the_first_number_in_its_name(name: str, index: int) -> None:
    assert [Turn(index=i, count=3).takes(name) for i in range(3)] == [i == index for i in range(3)]
    assert ALL.takes(name)


def test_a_whole_tensor_is_one_part_from_its_first_row_to_its_last() -> None:
    for tensor, length in ((torch.ones(3, 2), 3), (torch.ones(()), 1)):
        assert held_whole("w", tensor).parts == (part("w", length=length),)


def test_columns_of_64_bits_keep_their_places_when_they_are_cut() -> None:
    tensor = torch.arange(1, 31).view(5, 6)
    parts = [part(dim=1, start=start, length=stop - start, dtype="int64") for start, stop in ((0, 1), (1, 4), (4, 6))]
    cut = [part_fingerprints([held(tensor[:, each.start : each.start + each.length], each)]) for each in parts]
    assert weight_totals(cut) == {"m": whole(tensor)}
