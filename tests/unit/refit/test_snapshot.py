"""Snapshots of weights, as an engine reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slipstream.refit.snapshot import SnapshotWriter


def weights(value: float) -> list[tuple[str, torch.Tensor]]:
    return [
        ("embed.weight", torch.full((3, 5), value, dtype=torch.bfloat16)),
        ("head.weight", torch.arange(4, dtype=torch.float32) + value),
        ("d2t", torch.arange(3)),
    ]


def test_a_snapshot_is_a_safetensors_file_of_exactly_the_weights(tmp_path: Path) -> None:
    snapshot = SnapshotWriter(tmp_path, "policy").write(weights(2.0), version=7)

    read = load_file(snapshot.path)

    assert snapshot.version == 7
    assert snapshot.num_bytes == Path(snapshot.path).stat().st_size
    assert set(read) == {name for name, _ in weights(2.0)}
    for name, tensor in weights(2.0):
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


def test_the_next_version_leaves_the_one_before_it_alone(tmp_path: Path) -> None:
    writer = SnapshotWriter(tmp_path, "policy")
    first, second, third = (writer.write(weights(float(version)), version=version) for version in (1, 2, 3))

    assert torch.equal(load_file(second.path)["head.weight"], torch.arange(4.0) + 2.0)
    assert torch.equal(load_file(third.path)["head.weight"], torch.arange(4.0) + 3.0)
    assert first.path == third.path  # no third file: disk use does not grow with the steps


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_never_reach_an_engine(tmp_path: Path, value: float) -> None:
    writer = SnapshotWriter(tmp_path, "policy")

    with pytest.raises(ValueError, match=r"weight embed\.weight of policy version 3 must be finite"):
        writer.write(weights(value), version=3)
