"""What of a policy is saved, who saves it, and which checkpoints it refuses."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.grpo.config import OptimizerConfig, OptimizerMethod
from slipstream.learner.checkpoint import CheckpointError, on_disk
from slipstream.learner.checkpoint.on_disk import LearnerRanks, inspect_checkpoint, open_checkpoint
from slipstream.learner.checkpoint.policy import HeldParameter, Run, owned, runs
from slipstream.learner.config import RopeConfig, RopeType
from slipstream.learner.megatron import MegatronPolicy
from slipstream.learner.optimizer import Stepped
from slipstream.learner.weights import Layout, ParameterMapping, Shard
from slipstream.storage import put_in_place
from slipstream.train.checkpoints import Checkpoints
from slipstream.types import Dtype
from tests.unit.learner import policies
from tests.unit.learner.policies import LEARNER
from tests.unit.train.world import BareLearner

NORM = "decoder.final_layernorm.weight"
FINAL_NORM = ParameterMapping(NORM, ("model.norm.weight",), Layout.REPLICATED)


def _policy(
    method: OptimizerMethod = OptimizerMethod.ADAMW, *, dtype: Dtype = Dtype.FLOAT32, **shape: Any
) -> MegatronPolicy:
    scratch, learner = policies.shaped(**{"num_layers": 2, **shape}), dataclasses.replace(LEARNER, dtype=dtype)
    return policies.new_policy(scratch, learner, OptimizerConfig(method=method, learning_rate=1e-2))


def _saved(policy: MegatronPolicy, path: Path, *, num_updates: int = 1) -> Path:
    for _ in range(num_updates):
        policy.lm_step([[1, 2, 3, 4]], [1])
    policy.save_checkpoint(path, {})
    policy.finish_checkpoint()
    return path


def _scaled() -> MegatronPolicy:
    """The same weights, read at other angles."""
    policy = _policy()
    rope = RopeConfig(type=RopeType.LINEAR, factor=2.0)
    policy._checkpoints._arch = policy.architecture.extended(rope)
    return policy


def _run(name: str, size: int, **held: Any) -> Run:
    is_sharded, layout = held.pop("is_sharded", False), held.pop("layout", Layout.ROW)
    parameter = torch.nn.Parameter(torch.zeros(size))
    mapping = ParameterMapping(name, (name,), layout, **held)
    return Run("weight", HeldParameter(mapping, parameter, stepped=None), parameter.detach(), 0, is_sharded)


def test_ranks_share_out_what_all_of_them_hold() -> None:
    by_data, by_expert = (
        [Shard(data_rank=rank, expert_size=size) for rank in range(num)] for num, size in ((2, 1), (3, 2))
    )
    by_tensor = [Shard(tensor_rank=rank, tensor_size=2) for rank in range(2)]
    a, b, c, d = (_run(name, size) for name, size in zip("abcd", (5, 3, 1, 2), strict=True))
    for found, shards, num_copies, expected in (
        # The rank with fewer bytes takes the next: a to 0 (5, 0), b to 1 (5, 3), c to 1 (5, 4), d to 1 (5, 6).
        ([a, b, c, d], by_data, 2, [["a"], ["b", "c", "d"]]),
        # A tensor rank beyond the first writes no copy.
        ([_run("copy", 9, layout=Layout.REPLICATED), a], by_tensor, 1, [["copy", "a"], ["a"]]),
        # What a distributed optimizer has dealt out stays where it is.
        ([a, _run("mine", 7, is_sharded=True)], by_data, 2, [["a", "mine"], ["mine"]]),
        # The first rank that has an expert writes it. Experts count for nobody when the rest is dealt: ranks hold other
        # ones, and have to agree on the rest.
        ([_run("expert", 9, is_expert=True), a, b, c], by_expert, 3, [["expert", "a"], ["expert", "b"], ["c"]]),
    ):
        dealt = [owned(found, shard, num_copies=num_copies) for shard in shards]
        assert [[run.held.mapping.megatron for run in each] for each in dealt] == expected


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
def test_an_index_names_each_weight_master_and_moment_with_its_shape(dtype: Dtype, tied: bool, tmp_path: Path) -> None:
    policy = _policy(OptimizerMethod.MUON, dtype=dtype, tie_word_embeddings=tied)
    reader, state = open_checkpoint(LearnerRanks(), _saved(policy, tmp_path / "c"))
    got = {name: (slices[0].whole, slices[0].dtype) for name, slices in reader.index.items()}

    expected: dict[str, Any] = {"rng.cpu/00000": (tuple(torch.get_rng_state().shape), "U8")}
    low = dtype is Dtype.BFLOAT16
    for name, weight in policy.weights():
        shape = tuple(weight.shape)
        expected[f"weight/{name}"] = (shape, "BF16" if low else "F32")
        if low:
            expected[f"main/{name}"] = (shape, "F32")
        is_hidden_matrix = len(shape) == 2 and "layers" in name
        for moment in ("momentum_buffer",) if is_hidden_matrix else ("exp_avg", "exp_avg_sq"):
            expected[f"{moment}/{name}"] = (shape, "F32")
    assert got == expected
    layout = dict.fromkeys(("tensor", "pipeline", "context", "data", "expert"), 1)
    rope = {"rope_theta": 10_000.0, "rope_type": "default"}
    assert state == {"version": 0, "num_updates": 1, "layout": layout, "extra": {}, "rope": rope}
    with reader:
        for name, weight in policy.weights():
            assert torch.equal(reader.read_whole(f"weight/{name}"), weight)


def test_before_the_first_update_there_are_no_moments(tmp_path: Path) -> None:
    reader, _ = open_checkpoint(LearnerRanks(), _saved(_policy(), tmp_path / "c", num_updates=0))
    assert {name.partition("/")[0] for name in reader.index} == {"weight", "rng.cpu"}
    learned = _policy()
    learned.lm_step([[1, 2, 3, 4]], [1])
    learned.load_checkpoint(tmp_path / "c")
    fresh = _policy()
    assert learned.lm_step([[5, 6, 7]], [1]) == fresh.lm_step([[5, 6, 7]], [1])
    assert policies.same_weights(learned, fresh)
    judge = policies.new_policy(policies.shaped(num_layers=2), optimizer=None)  # takes the weights alone
    judge.load_checkpoint(_saved(learned, tmp_path / "learned"))
    assert policies.same_weights(judge, learned)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: _policy(OptimizerMethod.MUON), "momentum_buffer/model.layers.0.self_attn.q_proj.weight must be F32"),
        (lambda: _policy(dtype=Dtype.BFLOAT16), "weight/model.embed_tokens.weight must be BF16"),
        (lambda: _policy(num_layers=3), "weight/model.layers.2.input_layernorm.weight must be F32"),
        (lambda: _policy(num_layers=1), "weight/model.layers.1.input_layernorm.weight is in one of the two alone"),
        (
            lambda: _policy(ffn_hidden_size=64),
            r"weight/model\.layers\.0\.mlp\.gate_proj\.weight must be F32 \(64, 32\)",
        ),
        (
            _scaled,
            r"rope_parameters must be {.*'rope_type': 'linear'.*}, got {'rope_theta': 10000.0, 'rope_type': 'default'}",
        ),
    ],
    ids=["other optimizer", "other type", "more layers", "fewer layers", "wider layers", "other angles"],
)
def test_a_checkpoint_of_something_else_is_refused_and_changes_nothing(
    other: Any, message: str, tmp_path: Path
) -> None:
    path, policy = _saved(_policy(), tmp_path / "c"), other()
    before = [weight.clone() for _, weight in policy.weights()]
    with pytest.raises(ValueError, match=message):
        policy.load_checkpoint(path)
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, policy.weights(), strict=True))


class GroupCountingAdam(torch.optim.Optimizer):
    """Keeps its count of steps in the group, as TransformerEngine's fused Adam does."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                self.state[parameter] = {"exp_avg": parameter + group["step"], "exp_avg_sq": parameter * group["step"]}


@torch.no_grad()
def test_a_count_of_steps_in_the_group_is_saved_and_comes_back_there() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    adam = GroupCountingAdam([parameter])
    for _ in range(3):
        adam.step()
    held = HeldParameter(FINAL_NORM, parameter, Stepped(parameter, parameter, 0, 2, adam))
    saved = {run.kind: run.numbers.clone() for run in runs(held, num_updates=3)}
    assert saved["exp_avg"].tolist() == [4.0, 4.0] and saved["exp_avg_sq"].tolist() == [3.0, 3.0]
    with pytest.raises(ValueError, match=rf"{NORM} must have made the policy's 2 updates, got \[3.0\]"):
        list(runs(held, num_updates=2))
    other = GroupCountingAdam([parameter])
    moments = Stepped(parameter, parameter, 0, 2, other).reset(3)
    assert [group["step"] for group in other.param_groups] == [3]
    assert other.state[parameter] == moments and moments.keys() == {"exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            {"step": torch.tensor(1.0), "exp_avg": 0, "exp_avg_sq": 0, "max_exp_avg_sq": 0},
            rf"state of {NORM} must be .* differs in \['max_exp_avg_sq'\]",
        ),
        (
            {"step": torch.tensor(2.0), "exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)},
            rf"{NORM} must have made the policy's 1 updates, got \[2.0\]",
        ),
    ],
)
def test_a_state_that_no_checkpoint_would_keep_or_of_other_updates_is_refused(state: Any, message: str) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    adam = torch.optim.AdamW([parameter])
    adam.state[parameter] = state
    held = HeldParameter(FINAL_NORM, parameter, Stepped(parameter, parameter, 0, 2, adam))
    with pytest.raises(ValueError, match=message):
        list(runs(held, num_updates=1))


class OwnPolicy(BareLearner):
    """A real policy, as an arm's checkpoints need it."""

    def __init__(self) -> None:
        self.policy = _policy()

    def load_checkpoint(self, path: Path) -> dict[str, Any]:
        return self.policy.load_checkpoint(path)

    def inspect_checkpoint(self, path: Path) -> dict[str, Any]:
        return inspect_checkpoint(path)["extra"]

    def save_checkpoint(self, path: Path, extra: dict[str, Any]) -> None:
        self.policy.lm_step([[1, 2, 3, 4]], [1])
        self.policy.save_checkpoint(path, extra)
        self.policy.finish_checkpoint()

    def finish_checkpoint(self, *, timeout_s: float | None = None) -> None:
        """Done."""


RANK = "rank-00000.safetensors"


def test_a_damaged_checkpoint_is_passed_over_and_the_whole_one_is_kept_and_resumed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    message = f"damaged: {RANK} does not have the digest"
    learner, checkpoints = OwnPolicy(), Checkpoints(directory=tmp_path, recipe="a recipe", keep=1)
    path = checkpoints.directory / "step-000000"
    checkpoints.save(learner, [])
    path.rename(tmp_path / "step-000001")
    whole = [weight.clone() for _, weight in learner.policy.weights()]
    learner.save_checkpoint(tmp_path / "step-000002", {"recipe": "a recipe", "steps": []})
    policies.flip(tmp_path / "step-000002" / RANK)
    for look in (learner.inspect_checkpoint, learner.load_checkpoint):
        with pytest.raises(CheckpointError, match=re.escape(message)):
            look(tmp_path / "step-000002")
    checkpoints._drop_oldest(learner)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-000001", "step-000002"]
    caplog.clear()
    assert checkpoints.restore(learner) == ([], None)
    assert message in caplog.messages[0] and caplog.messages[0].endswith("; trying the one before it")
    assert all(torch.equal(weight, kept) for (_, weight), kept in zip(learner.policy.weights(), whole, strict=True))


def test_what_nobody_touched_is_not_read_again_and_a_copy_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = OwnPolicy()
    learner.save_checkpoint(tmp_path / "step-000001", {"a": 1})
    shutil.copytree(tmp_path / "step-000001", tmp_path / "step-000002", copy_function=shutil.copyfile)
    os.utime(tmp_path / "step-000002" / RANK, ns=(1 << 62, 1 << 62))
    read: list[str] = []
    monkeypatch.setattr(on_disk, "sum_of", lambda path, sum_of=on_disk.sum_of: read.append(path.name) or sum_of(path))
    assert learner.inspect_checkpoint(tmp_path / "step-000001") == {"a": 1}
    assert read == []
    assert learner.inspect_checkpoint(tmp_path / "step-000002") == {"a": 1}
    assert RANK in read


NO_CHECKPOINTS = {
    "file": lambda path: path.write_text("a note"),
    "empty": Path.mkdir,
    "full": lambda path: (path.mkdir(), (path / "notes.txt").write_text("not ours")),
    "nothing": lambda path: None,
    "dangling": lambda path: path.symlink_to(path.parent / "nowhere"),
}


@pytest.mark.parametrize("kind", NO_CHECKPOINTS)
def test_where_there_is_no_checkpoint_none_is_damaged(kind: str, tmp_path: Path) -> None:
    path, learner = tmp_path / "step-000009", OwnPolicy()
    NO_CHECKPOINTS[kind](path)
    for look in (learner.inspect_checkpoint, learner.load_checkpoint):
        with pytest.raises(FileNotFoundError, match=f"no checkpoint at {path}"):
            look(path)
    if kind in ("file", "dangling"):  # a save takes its place all the same
        learner.save_checkpoint(path, {"a": 1})
        assert learner.load_checkpoint(path) == {"a": 1}
        learner.save_checkpoint(path, {"a": 2})
        assert learner.inspect_checkpoint(path) == {"a": 2}
        assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_a_process_that_died_between_two_renames_is_resumed_from_what_it_was_to_replace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raising(*_: object) -> None:
        raise OSError("the process dies here")

    learner, checkpoints = OwnPolicy(), Checkpoints(directory=tmp_path, recipe="a recipe", keep=1)
    checkpoints.save(learner, [])
    (tmp_path / "step-000000").rename(tmp_path / "step-000000.old")
    shutil.copytree(tmp_path / "step-000000.old", tmp_path / "step-000000.partial")
    assert checkpoints.restore(learner) == ([], None)
    assert "recipe" in learner.inspect_checkpoint(tmp_path / "step-000000")
    with monkeypatch.context() as dying:  # once more, before the second of the renames
        dying.setattr(Path, "rename", raising)
        with pytest.raises(OSError, match="dies"):
            put_in_place(tmp_path / "step-000000")
    assert "recipe" in learner.inspect_checkpoint(tmp_path / "step-000000")
    learner.save_checkpoint(tmp_path / "step-000001", {"recipe": "a recipe", "steps": []})
    checkpoints._drop_oldest(learner)
    assert [each.name for each in tmp_path.iterdir()] == ["step-000001"]
