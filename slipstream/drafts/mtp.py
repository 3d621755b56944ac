"""The policy's own MTP layer as a draft: behind the same methods as a draft that stands beside the policy.

The layer stays in the learner's policy, which says what it computes; here is only how long and how fast it learns. What
is saved is a directory of the layer's tensors alone, under the names that they have in the policy's checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open
from safetensors.torch import load_file

from slipstream.config import require
from slipstream.drafts.config import DraftConfig
from slipstream.grpo.config import OptimizerConfig
from slipstream.learner.checkpoint import CheckpointError
from slipstream.learner.checkpoint.on_disk import write_json, write_tensors
from slipstream.storage import sum_of

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.learner.megatron import MegatronPolicy
    from slipstream.learner.mtp_training import States

_PREFIX = "model.mtp_layers."
_FILE = "draft.safetensors"


class MtpDraft:
    """The MTP layer of a learner's policy, and the schedule of its training; every rank calls each method.

    Its loss is the divergence from the policy, whatever `draft.loss` says of drafts that stand beside it.
    """

    is_collective = True  # to save it takes all ranks

    def __init__(
        self,
        policy: MegatronPolicy,
        config: DraftConfig,
        *,
        tokenizer_dir: Path,
        writes: bool = True,
        is_online: bool = False,
    ) -> None:
        """Train the layer that the policy holds.

        Args:
            tokenizer_dir: whose files are copied to where the draft is saved.
            writes: whether this rank writes checkpoints.
            is_online: it learns beside the policy, at `draft.online_learning_rate`.
        Raises:
            ConfigError: the policy has no MTP layer.
        """
        self._policy, self._config, self._tokenizer_dir, self._writes = policy, config, tokenizer_dir, writes
        self._trainer = policy.start_mtp(
            OptimizerConfig(learning_rate=config.learning_rate, clip_grad=config.clip_grad, betas=(0.9, 0.95))
        )
        self._is_online = is_online

    @property
    def num_parameters(self) -> int:
        """Trained parameters."""
        return sum(tensor.numel() for _, tensor in self._policy.mtp_weights())

    def step(
        self,
        sequences: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int],
        states: States,
        *,
        temperature: float = 1.0,
        sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
    ) -> float:
        """One update; returns the loss summed over the passes.

        Args:
            sum_over_ranks: not needed: the layer's gradient is always that of all data-parallel ranks.
        Raises:
            FloatingPointError: the gradient is not finite.
        """
        del sum_over_ranks
        config, num_updates = self._config, self._trainer.num_updates
        return self._trainer.step(
            sequences,
            prompt_lengths,
            states,
            learning_rate=config.online_learning_rate if self._is_online else config.learning_rate_at(num_updates),
            temperature=temperature,
            num_passes=config.online_passes if self._is_online else config.ttt_steps,
            decay=config.ttt_step_loss_decay,
        )

    def learn(
        self,
        sequences: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int],
        states: States,
        *,
        temperature: float,
        num_ranks: int = 1,
        sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
    ) -> float:
        """See `OnlineDraft.learn`."""
        from slipstream.drafts.online import learned

        del sum_over_ranks
        return learned(
            partial(self.step, temperature=temperature),
            (sequences, prompt_lengths, states),
            config=self._config,
            num_updates=self._trainer.num_updates,
            num_ranks=num_ranks,
        )

    def evaluate(
        self,
        sequences: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int],
        states: States,
        *,
        temperature: float = 1.0,
        sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[list[float], float]:
        """Held-out acceptance of `ttt_steps` tokens under rejection sampling: by position, and the mean length."""
        del sum_over_ranks  # the trainer's answer is that of all data-parallel ranks
        num_tokens = self._config.ttt_steps
        return self._trainer.evaluate(sequences, prompt_lengths, states, num_tokens=num_tokens, temperature=temperature)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The layer's tensors under the names that vLLM loads; collective."""
        return self._policy.mtp_weights()

    def save(self, path: Path) -> None:
        """Write the layer as vLLM loads it beside the policy."""
        self._policy.save_mtp(path, self._tokenizer_dir)

    def rest(self) -> int:
        """The layer's gradients and optimizer are given back with those of the policy: nothing here."""
        return 0

    def state(self) -> dict[str, Tensor]:
        """All that its next update depends on, whole on every rank."""
        return self._trainer.state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a `state`, bit for bit."""
        self._trainer.restore(state)

    def save_checkpoint(self, path: Path) -> None:
        """Write a `state`, so that a resumed training goes on bit for bit."""
        state = self.state()
        if self._writes:
            path.mkdir(parents=True, exist_ok=True)
            total = write_tensors(path / _FILE, {name: tensor.cpu().contiguous() for name, tensor in state.items()})
            write_json(path / "draft.json", {"xxh3": total.xxh3})

    def load_checkpoint(self, path: Path) -> None:
        """Restore what `save_checkpoint` wrote.

        Raises:
            CheckpointError: the file of tensors is not the one that was saved.
        """
        if sum_of(path / _FILE).xxh3 != json.loads((path / "draft.json").read_text())["xxh3"]:
            raise CheckpointError(
                f"checkpoint {path} is damaged: {_FILE} does not have the digest it was saved with; remove "
                f"{path.parent} to train the draft anew"
            )
        self.restore(load_file(path / _FILE))


def check_mtp(policy: Path, draft: Path) -> None:
    """Refuse a directory that is not the MTP layer of this policy.

    Raises:
        ConfigError: the policy has no such layer, or the draft's tensors are others or of another shape.
    """
    wanted = _shapes(policy)
    require(bool(wanted), "draft.method", "mtp needs a policy with an MTP layer", str(policy), "such as a MiMo")
    found = _shapes(draft)
    wrong = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    rule = "must hold the MTP layer of the policy: the same tensors of the same shapes"
    require(not wrong, "draft", rule, f"{len(wrong)} others, such as {wrong[:1]}", f"see {draft}")


def _shapes(path: Path) -> dict[str, list[int]]:
    """Of the MTP layer's tensors in a directory, which may hold more."""
    shapes = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            names = [name for name in opened.keys() if name.startswith(_PREFIX)]  # noqa: SIM118 no mapping
            shapes.update({name: list(opened.get_slice(name).get_shape()) for name in names})
    return shapes
