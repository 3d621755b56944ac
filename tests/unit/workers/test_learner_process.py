"""A rank of the learner: files for engines on its host, fingerprints by turn, and the drafts that it starts from."""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from slipstream.engine.config import SamplingConfig
from slipstream.learner.config import LearnerConfig
from slipstream.ragged import Ragged
from slipstream.refit.config import WeightFormat
from slipstream.refit.fingerprint import ALL, HeldWeights, Turn, held_whole, part_fingerprints
from slipstream.types import Dtype
from slipstream.workers.learner_process import LearnerProcess
from tests.small import draft_with


@dataclass
class Model:
    """Some tensors; `num_passes` counts how often they were gone through."""

    tensors: dict[str, torch.Tensor]
    num_passes: int = 0
    device = torch.device("cpu")

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.num_passes += 1
        yield from self.tensors.items()

    def held_weights(self) -> Iterator[HeldWeights]:
        return (held_whole(name, tensor) for name, tensor in self.tensors.items())

    def map_logits(self, sequences: Any, prompt_lengths: Any, function: Any, *, width: int) -> Any:
        num_tokens = sum(len(tokens) - start for tokens, start in zip(sequences, prompt_lengths, strict=True))
        return np.arange(num_tokens * width, dtype=np.float64).reshape(num_tokens, width)


class Rank(LearnerProcess):
    """A rank that holds a policy of 10 elements and a draft of 3, and notes when it works."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__(LearnerConfig(), rank=rank)
        self.policy = Model({"layers.0.w": torch.ones(2, 3), "layers.1.w": torch.full((4,), 2.0)})
        self.draft = Model({"fc": torch.zeros(3)})

    @property
    def _loaded(self) -> Any:
        return self.policy

    @property
    def _drafting(self) -> Any:
        return self.draft

    def written(self, directory: Path, version: int, *, is_draft: bool = False) -> dict[str, torch.Tensor]:
        """The tensors of the file that this rank writes."""
        found = self.publish(directory, version, is_draft=is_draft)
        assert found is not None and found.version == version
        return load_file(found.path)


def test_policy_and_draft_are_written_to_files_of_their_own(tmp_path: Path) -> None:
    rank = Rank()
    policy, draft = rank.written(tmp_path, 3), rank.written(tmp_path, 1, is_draft=True)
    held = {"layers.0.w": [[1.0] * 3] * 2, "layers.1.w": [2.0] * 4}
    assert {name: tensor.tolist() for name, tensor in policy.items()} == held
    assert list(draft) == ["fc"]


def test_other_ranks_go_through_the_weights_and_write_nothing(tmp_path: Path) -> None:
    rank = Rank(rank=1)
    assert rank.publish(tmp_path, 3) is None
    assert rank.policy.num_passes == 2  # what there is, and the weights
    assert list(tmp_path.iterdir()) == []


def test_another_policy_may_have_other_tensors_and_what_was_sent_is_forgotten(tmp_path: Path) -> None:
    rank = Rank()
    rank.publish(tmp_path, 3)
    rank.policy = Model({"w": torch.ones(1)})
    rank._sources.clear()  # as a load does
    assert rank.weight_bytes() == 4
    rank.release()
    assert list(rank.written(tmp_path, 4)) == ["w"]


def test_what_is_sent_counts_the_draft_where_it_is_sent_too_in_the_type_of_the_engines() -> None:
    rank = Rank()
    assert rank.weight_bytes() == 10 * 4
    for dtype, num_bytes in ((Dtype.FLOAT32, 12), (Dtype.BFLOAT16, 6), (None, 0)):  # None: it is trained before RL
        rank._draft_dtype, rank._sources = dtype, {}  # as a load does
        assert rank.weight_bytes() == 40 + num_bytes


def test_fingerprints_are_of_the_tensors_whose_turn_it_is_as_the_type_asked_for() -> None:
    rank = Rank()
    dtypes = dict.fromkeys(rank.policy.tensors, "bfloat16")
    first = rank.weight_fingerprints(dtypes, Turn(index=1, count=2))
    assert first == part_fingerprints([held_whole("layers.1.w", torch.full((4,), 2.0, dtype=torch.bfloat16))])
    assert {part.name for part in rank.weight_fingerprints(dtypes, ALL)} == set(dtypes)


def test_a_quantized_policy_is_written_and_fingerprinted_as_engines_hold_it(tmp_path: Path) -> None:
    """Rank 0 alone answers, of the tensors whose turn it is; the first policy after a release has its own format."""
    name, norm = "model.layers.1.mlp.up_proj.weight", "model.layers.1.norm.weight"
    rank, other = Rank(), Rank(rank=1)
    for each in (rank, other):
        each.policy = Model({name: torch.tensor([[2.54, -1.0]]), norm: torch.ones(2)})
        each._sent_as = WeightFormat(dtype="int8", largest=127, largest_input=127)
    assert rank.weight_bytes() == 2 + 4 + 8
    held = rank.written(tmp_path, 1)
    assert held[name].tolist() == [[127, -50]] and held[name + "_scale"].tolist() == [[pytest.approx(0.02)]]
    dtypes = {name: "int8", name + "_scale": "float32", norm: "bfloat16"}
    held[norm] = held[norm].bfloat16()
    assert rank.weight_fingerprints(dtypes, ALL) == part_fingerprints(held_whole(*each) for each in held.items())
    assert rank.weight_fingerprints(dtypes, Turn(index=0, count=2)) == other.weight_fingerprints(dtypes, ALL) == {}
    rank.release()
    assert rank.weight_bytes() == 8 + 8


def test_a_rank_judges_each_of_its_sequences_and_none_where_it_has_none() -> None:
    """The last responses of a certificate may be fewer than the data-parallel ranks."""
    rank, sampling = Rank(), SamplingConfig(max_response_tokens=1)
    for lengths in ([], [3], [2, 1]):
        sequences = [[7] * (1 + length) for length in lengths]
        found = rank.conditionals((Ragged.of(sequences, np.int32), [1] * len(lengths)), sampling, seed=0)
        assert [len(values) for values in found] == lengths


@pytest.mark.parametrize("rank", [0, 1])
def test_fingerprints_of_gathered_weights_hold_one_tensor_at_a_time(rank: int) -> None:
    """Together the tensors of a quantized policy would be a second policy on every rank; each rank gathers them all."""
    alive = weakref.WeakSet[torch.Tensor]()
    most = num_gathered = 0

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most, num_gathered
        for layer in range(4):
            tensor = torch.ones(2, 2)
            alive.add(tensor)
            most = max(most, len(alive))
            num_gathered += 1
            yield f"layers.{layer}.w", tensor
            del tensor

    process = Rank(rank)
    process.draft = cast(Any, SimpleNamespace(weights=gathered))
    process.weight_fingerprints({f"layers.{layer}.w": "float32" for layer in range(4)}, ALL, is_draft=True)
    assert num_gathered == 4
    assert most <= 2  # the one before is there until the next has come


@pytest.mark.parametrize(("rank", "names"), [(0, {"fc"}), (1, set())])
def test_the_first_rank_alone_answers_for_the_draft(rank: int, names: set[str]) -> None:
    found = Rank(rank=rank).weight_fingerprints({"fc": "float32"}, ALL, is_draft=True)
    assert {part.name for part in found} == names


def test_a_draft_that_this_host_does_not_see_is_refused(tmp_path: Path, refusal: Callable[..., str]) -> None:
    rank, absent, config = Rank(), tmp_path / "draft", draft_with(eagle3={"aux_hidden_state_layer_ids": (1, 2, 3)})
    rule = f"{absent} must be on storage that all hosts of the run share"
    assert refusal(rank.start_draft, policy=tmp_path, config=config, given=absent).startswith(rule)
    where = {"draft": absent, "policy": tmp_path}
    assert refusal(rank.continue_draft, **where, config=config, engine_dtype=Dtype.FLOAT32).startswith(rule)
