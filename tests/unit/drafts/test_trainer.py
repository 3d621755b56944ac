"""Training of a draft; its losses worked by hand, and the same whether logits are held whole or a few at a time."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from scipy.special import softmax
from speculators.losses import resolve_loss_config
from torch.nn.attention.flex_attention import create_mask
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.drafts.config import Loss
from slipstream.drafts.learner_draft import Chats
from slipstream.drafts.passes import ATTENTION, head_inputs, pack_chats, rows_of
from slipstream.drafts.trainer import DISTANCES, DraftOptimizer, DraftTrainer, chunk_losses
from slipstream.grpo.config import OptimizerConfig, OptimizerMethod
from slipstream.learner.checkpoint import CheckpointError
from slipstream.ragged import Ragged
from slipstream.types import Dtype
from tests.small import draft_with
from tests.unit.drafts.small import CHATS, CONFIG, PROMPTS, teach
from tests.unit.learner.policies import flip

LOSSES: tuple[Loss, ...] = get_args(Loss)


def test_chats_are_shifted_within_themselves() -> None:
    def one(offset: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        aux = torch.arange(offset, offset + length).float()[:, None]
        return aux, aux + 100

    packed = pack_chats(Chats([[10, 11, 12, 13], [20, 21, 22]], [1, 1], [one(0, 4), one(50, 3)]))
    assert packed.input_ids.tolist() == [[11, 12, 13, 21, 22]]
    assert packed.hidden_states[0, :, 0].tolist() == [0, 1, 2, 50, 51]
    assert packed.last[0, :, 0].tolist() == [101, 102, 103, 151, 152]
    assert packed.position_ids.tolist() == [[1, 2, 3, 1, 2]]
    assert packed.lengths == [3, 2]
    # The state of a chat's last token predicts a token that was never sampled.
    assert packed.loss_mask.tolist() == [[True, True, False, True, False]]


def test_what_the_draft_learns_from_is_the_policys_own_distribution(policy: Path, chats: Chats) -> None:
    from transformers import Qwen3ForCausalLM

    head = DraftTrainer(policy, CONFIG)._model
    logits = Qwen3ForCausalLM.from_pretrained(policy)(torch.tensor([CHATS[0]])).logits[0]
    torch.testing.assert_close(head.verifier_lm_head(head.verifier_norm(chats.states[0][1])), logits)


def test_training_lowers_the_loss_and_raises_held_out_acceptance(policy: Path, chats: Chats) -> None:
    trainer = DraftTrainer(policy, CONFIG)
    trainer._model.register_forward_pre_hook(lambda *_: pytest.fail("speculators would compile the whole on a GPU"))
    assert len(teach(trainer, chats, 30, falls_to=0.5)) == CONFIG.pretrain.ttt_steps


@pytest.mark.parametrize("broken", ["loss", "gradient"])
def test_a_loss_or_a_gradient_that_is_not_finite_moves_no_weight(policy: Path, chats: Chats, broken: str) -> None:
    trainer = DraftTrainer(policy, CONFIG)
    weight = trainer._trained[-1]
    if broken == "loss":
        weight.data.fill_(math.nan)
    else:
        weight.register_hook(lambda gradient: torch.full_like(gradient, math.inf))
    before = [each.detach().clone() for each in trainer._trained]
    with pytest.raises(FloatingPointError, match=r"step 0 and its gradient must be finite, got .*(nan|inf)"):
        trainer.step(chats)
    torch.testing.assert_close([each.detach() for each in trainer._trained], before, rtol=0, atol=0, equal_nan=True)


def test_rows_do_not_change_the_loss(policy: Path, chats: Chats) -> None:
    together = DraftTrainer(policy, CONFIG).step(chats)
    apart = DraftTrainer(policy, draft_with(CONFIG, eagle3={"tokens_per_row": 12})).step(chats)
    assert apart == pytest.approx(together, rel=0.05)


@pytest.mark.parametrize("method", OptimizerMethod)
def test_a_resumed_draft_training_equals_an_uninterrupted_one_and_a_damaged_checkpoint_is_refused(
    policy: Path, chats: Chats, tmp_path: Path, method: OptimizerMethod
) -> None:
    config = draft_with(CONFIG, pretrain={"optimizer": {"method": method}})
    whole, killed, resumed = (DraftTrainer(policy, config) for _ in range(3))
    losses = [whole.step(chats) for _ in range(6)]
    for _ in range(3):
        killed.step(chats)
    killed.save_checkpoint(tmp_path / "step-3")
    resumed.load_checkpoint(tmp_path / "step-3")
    assert [resumed.step(chats) for _ in range(3)] == losses[3:]
    assert all(torch.equal(tensor, resumed.state()[name]) for name, tensor in whole.state().items())
    flip(tmp_path / "step-3" / "draft.safetensors")
    with pytest.raises(CheckpointError, match=r"step-3 is damaged: draft\.safetensors differs from the digest"):
        resumed.load_checkpoint(tmp_path / "step-3")


def test_products_in_bfloat16_keep_weights_and_moments_in_float32_and_train_as_well(policy: Path, chats: Chats) -> None:
    exact, rounded = DraftTrainer(policy, CONFIG), DraftTrainer(policy, CONFIG, products=Dtype.BFLOAT16)
    with _Watched() as seen:
        losses = [rounded.step(chats) for _ in range(30)]
    assert seen.dtypes == {torch.bfloat16}
    expected = [exact.step(chats) for _ in range(30)]
    assert losses[0] == pytest.approx(expected[0], rel=5e-2)
    assert losses[0] != expected[0]
    assert losses[-1] < 0.5 * losses[0]
    assert {tensor.dtype for tensor in rounded._optimizer.tensors().values()} == {torch.float32}
    with _Watched() as seen:
        rounded.evaluate(chats)
    assert seen.dtypes == {torch.float32}


class _Watched(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation makes, and the types that matrices are multiplied in.

    The angles of positions, which are outer products, aside.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default) and args[0].shape[-1] > 1:
            self.dtypes.add(args[0].dtype)
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, torch.Tensor):
                self.num_elements = max(self.num_elements, each.numel())
        return result


def test_hidden_states_captured_once_train_the_draft_as_those_of_each_step_do(policy: Path) -> None:
    from slipstream.learner.config import LearnerConfig
    from slipstream.workers.learner_process import LearnerProcess

    losses = []
    for gib in (1.0, 0.0):
        config = draft_with(CONFIG, pretrain={"states_cache_gib": gib})
        learner = LearnerProcess(LearnerConfig(max_tokens_per_microbatch=16))
        learner.load(policy, None)
        learner.start_draft(policy, config)
        chats = Ragged.of(CHATS, np.int32)
        assert learner.hold_draft_chats((range(2), chats, PROMPTS), config) is (gib > 0.0)
        losses.append([learner.draft_step(indices, 1.0) for indices in ([0, 1], [1], [0])])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def _stepped(method: OptimizerMethod, gradient: float) -> tuple[list[torch.nn.Parameter], DraftOptimizer]:
    rows = {"fc.weight": 2, "norm.weight": 1, "lm_head.weight": 2}
    named = [(name, torch.nn.Parameter(torch.eye(2)[:num].squeeze(0))) for name, num in rows.items()]
    optimizer = DraftOptimizer(named, OptimizerConfig(learning_rate=0.1, method=method))
    assert list(optimizer.tensors()) == ["0.parameter", "1.parameter", "2.parameter"]
    for _, parameter in named:
        parameter.grad = torch.full_like(parameter, gradient)
    optimizer.step(learning_rate=0.1)
    return [parameter for _, parameter in named], optimizer


def test_muon_takes_the_matrices_but_the_output_head() -> None:
    _, optimizer = _stepped(OptimizerMethod.MUON, 1.0)
    adamw = [f"{index}.{name}" for index in (1, 2) for name in ("parameter", "exp_avg", "exp_avg_sq")]
    assert list(optimizer.tensors()) == ["0.parameter", "0.momentum_buffer", *adamw]
    assert [each.param_groups[0]["lr"] for each in optimizer.steppers] == [0.1, 0.1]


def test_adamw_takes_every_parameter_and_moves_it_by_the_learning_rate_at_first() -> None:
    (matrix, *_), optimizer = _stepped(OptimizerMethod.ADAMW, 3.0)
    assert len(optimizer.tensors()) == 9
    torch.testing.assert_close(matrix.detach(), torch.eye(2) - 0.1)


# The policy says (1/2, 1/4, 1/4), the draft (1/4, 1/2, 1/4): of each token the smaller chances add up to 3/4.
BY_HAND = {
    "kl_div": 0.25 * math.log(2),  # 1/2 log 2 + 1/4 log 1/2
    "tv": 0.25,
    "lk": -math.log(0.75),
    "lk_hybrid": math.exp(-2.25) * 0.25 * math.log(2) + (1 - math.exp(-2.25)) * 0.25,
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_distance_is_its_formula(loss: Loss) -> None:
    policy, draft = (torch.tensor([[row]]).log() for row in ([0.5, 0.25, 0.25], [0.25, 0.5, 0.25]))
    assert DISTANCES[loss](draft, policy).tolist() == [[pytest.approx(BY_HAND[loss], rel=1e-5)]]
    assert DISTANCES[loss](policy, policy).tolist() == [[pytest.approx(0.0, abs=1e-6)]]
    policy, draft = torch.tensor([[[0.0, 90.0]]]), torch.tensor([[[90.0, 0.0]]])  # it is never accepted
    assert DISTANCES["lk"](draft, policy).item() == pytest.approx(-math.log(1e-5))  # and no infinity


def _plain(
    trainer: DraftTrainer, chats: Chats, loss: str, decay: float, temperature: float
) -> tuple[float, list[float], float]:
    """Loss of both chats in one row, acceptance by position and acceptance length, from all logits in numpy."""
    (row,) = rows_of(chats, max_tokens=64)
    model, passes = trainer._model, CONFIG.pretrain.ttt_steps
    with torch.no_grad():
        inputs = head_inputs(model, row, passes)
        drafts = [softmax(model.lm_head(each)[0].double().numpy() / temperature, -1) for each in inputs]
        policy = softmax(model.verifier_lm_head(row.last)[0].double().numpy() / temperature, -1)
    mask, chat = row.loss_mask[0].numpy(), np.repeat([0, 1], row.lengths)
    starts = [
        at for at in range(len(mask) - passes + 1) if mask[at : at + passes].all() and chat[at] == chat[at + passes - 1]
    ]
    total, windows = 0.0, []
    for number, draft in enumerate(drafts):
        p, q = policy[number:], draft[: len(draft) - number]
        accepted = np.minimum(p, q).sum(-1)
        divergence = (p * np.log(p / q)).sum(-1)
        weight = np.exp(-3 * accepted)
        distance = {
            "kl_div": divergence,
            "tv": 1 - accepted,
            "lk": -np.log(accepted),
            "lk_hybrid": weight * divergence + (1 - weight) * (1 - accepted),
        }[loss]
        total += decay**number * distance[mask[number:]].mean()
        windows.append(accepted[starts])
    return total, np.mean(windows, axis=1).tolist(), 1.0 + np.cumprod(windows, axis=0).sum(axis=0).mean()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("decay", "temperature"), [(1.0, 1.0), (0.5, 0.7)])
def test_the_loss_of_a_step_is_the_decayed_sum_over_passes_and_held_out_acceptance_the_overlap(
    policy: Path, chats: Chats, loss: str, decay: float, temperature: float
) -> None:
    trainer = DraftTrainer(policy, draft_with(CONFIG, eagle3={"loss": loss}, pretrain={"ttt_step_loss_decay": decay}))
    expected, rates, length = _plain(trainer, chats, loss, decay, temperature)
    assert trainer.evaluate(chats, temperature=temperature) == (pytest.approx(rates, rel=1e-5), pytest.approx(length))
    assert trainer.step(chats, temperature=temperature) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("loss", "norms"), [("kl_div", ()), ("tv", ()), ("kl_div", ("fc_norm", "norm_output")), ("tv", ("input_norm",))]
)
def test_passes_and_losses_are_speculators(policy: Path, chats: Chats, loss: str, norms: tuple[str, ...]) -> None:
    """Norms of EAGLE-3.1, and the one that drafts of gpt-oss have and none that is made here."""
    own = {norm: True for norm in norms if norm != "input_norm"}
    trainer = DraftTrainer(policy, draft_with(CONFIG, eagle3={"loss": loss, **own}))
    model = trainer._model
    model.input_norm = torch.nn.RMSNorm(3 * model.hidden_size) if "input_norm" in norms else None
    given = [model.input_norm] if model.input_norm is not None else list(model.fc_norm or ())
    assert len(given) == {(): 0, ("input_norm",): 1}.get(norms, 3)
    for norm in given:
        torch.nn.init.uniform_(norm.weight, 0.5, 2.0)  # not the ones that it begins with
    (row,) = rows_of(chats, max_tokens=64)
    settings = model.layers[0].self_attn.config
    settings._attn_implementation, model._create_mask_fn = "sdpa", create_mask  # over the whole row
    _, expected, _ = model(
        hidden_states=row.hidden_states,
        input_ids=row.input_ids,
        document_ids=torch.tensor(np.repeat([[0, 1]], row.lengths, axis=1)),
        loss_mask=row.loss_mask,
        position_ids=row.position_ids,
        verifier_last_hidden_states=row.last,
        ttt_steps=CONFIG.pretrain.ttt_steps,
        loss_config=resolve_loss_config(loss, "eager"),
    )
    expected.backward()
    grads = [parameter.grad.clone() for parameter in trainer._trained]
    model.zero_grad()
    settings._attn_implementation = ATTENTION
    assert float(trainer._backward(row, 1.0, 1.0)) == pytest.approx(expected.item(), rel=1e-6)
    for parameter, grad in zip(trainer._trained, grads, strict=True):
        assert (parameter.grad - grad).norm() <= 1e-5 * grad.norm()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("chunk", [1, 2, 5, 18])
def test_chunks_change_no_loss_gradient_or_acceptance(policy: Path, chats: Chats, loss: str, chunk: int) -> None:
    (row,) = rows_of(chats, max_tokens=64)
    whole, parts = (
        DraftTrainer(policy, draft_with(CONFIG, eagle3={"loss": loss, "loss_chunk_tokens": n})) for n in (1024, chunk)
    )
    losses = [float(trainer._backward(row, 0.7, 1.0)) for trainer in (whole, parts)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    for one, other in zip(whole._trained, parts._trained, strict=True):
        assert (other.grad - one.grad).norm() <= 1e-6 * one.grad.norm()
    (rates, length), found = (trainer.evaluate(chats, temperature=0.7) for trainer in (whole, parts))
    assert found == (pytest.approx(rates, rel=1e-6), pytest.approx(length, rel=1e-6))


@pytest.mark.parametrize("chunk", [2, 4])
def test_logits_of_more_than_a_chunk_are_never_held(policy: Path, chats: Chats, chunk: int) -> None:
    """The policy's chunk is longer by the tokens that later passes read."""
    num_vocabulary = 4096
    (row,) = rows_of(chats, max_tokens=64)
    model = DraftTrainer(policy, CONFIG)._model
    for name in ("lm_head", "verifier_lm_head"):
        setattr(model, name, torch.nn.Linear(2, num_vocabulary, bias=False))
    inputs = [torch.randn(1, 18, 2, requires_grad=True) for _ in range(CONFIG.pretrain.ttt_steps)]
    row = replace(row, last=row.last[..., :2])
    with _Watched() as seen:
        for part in chunk_losses(model, inputs, row, draft_with(CONFIG, eagle3={"loss_chunk_tokens": chunk}), 0.7):
            part.backward()
    assert seen.num_elements == (chunk + CONFIG.pretrain.ttt_steps - 1) * num_vocabulary
