"""The policy in Megatron-Core: logprobs, hidden states, updates, weights and checkpoints of one rank.

Legend: `B` sequences of a micro-batch, `T` predicted tokens (inputs are positions 0 .. T-1, labels 1 .. T), `V`
vocabulary size, `H` hidden size, `A` layers whose states a draft reads.

Tensor-, pipeline- and context-parallel ranks are called with the same arguments. Each data-parallel rank passes its own
share of the sequences and returns the results of that share. Statistics of an update cover all ranks and are equal on
all ranks.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from numpy.typing import NDArray
from torch import Tensor

from slipstream.config import require
from slipstream.grpo.config import OptimizerConfig
from slipstream.grpo.correction import corrected
from slipstream.grpo.loss import PolicyLoss, divisor, policy_loss
from slipstream.grpo.update import Trained, Update
from slipstream.learner import parallel
from slipstream.learner.architecture import MIMO, Architecture, require_divisible
from slipstream.learner.batches import (
    Batching,
    ByToken,
    MicroBatch,
    Routes,
    Sequences,
    forward,
    idle_microbatch,
    label_counts,
)
from slipstream.learner.checkpoint.policy import PolicyCheckpoints
from slipstream.learner.config import LearnerConfig, LoraConfig, ScratchConfig
from slipstream.learner.cpu import host
from slipstream.learner.export import gathered_weights, held_weights, open_weights, save_model
from slipstream.learner.judge import round_inputs, rounded_weights
from slipstream.learner.layers import build_model, build_mtp, packs, skips_padding
from slipstream.learner.logprobs import OutputHead
from slipstream.learner.lora import FOLDER, Adapters
from slipstream.learner.mtp_training import MtpLayer, MtpTrainer
from slipstream.learner.numerics import TORCH_DTYPES
from slipstream.learner.optimizer import Training, TrainingMemory
from slipstream.learner.router_replay import forget_routes, replayed
from slipstream.learner.weights import initial_weights, load_exactly, mtp_mappings, shard_from_hf, vocabulary_mappings
from slipstream.records.steps import TrainStats
from slipstream.refit.config import WeightFormat
from slipstream.refit.fingerprint import HeldWeights

_CPU = torch.device("cpu")
_LAST = -1  # layer id of the output layer's input

Result = dict[str, Tensor]
LossOf = Callable[[Tensor, MicroBatch], tuple[Tensor, Result] | None]
"""Function from the hidden states [T, B, H] of a micro-batch to its loss and named scalars; None: it has no loss."""


class Capture:
    """Hidden states of the forward passes of one update, collected for the training of a draft.

    The states are detached, so no gradient of a draft reaches the policy. Labels are the inputs shifted by one, so a
    sequence of T tokens has states for its first T - 1.

    Attributes:
        states: filled after the last forward pass; for each sequence the states of the layers [T, A H] and, after the
            final norm, [T, H].
    """

    def __init__(self, layer_ids: Sequence[int], *, device: torch.device = _CPU) -> None:
        """Keep the states on `device`."""
        self._layer_ids, self._device = layer_ids, device
        self._parts: dict[int, Tensor] = {}
        self.states: list[tuple[Tensor, Tensor]] = []

    @contextlib.contextmanager
    def of(self, gpt: GPTModel, batch: MicroBatch) -> Iterator[None]:
        """Capture the forward pass of `batch` on this pipeline stage inside the block."""
        by_id: dict[int, Tensor] = {}  # [T, B, H]

        def keep(layer_id: int, module: torch.nn.Module, args: Any, output: Any) -> None:
            # A Megatron layer returns (hidden states, cross-attention context), embedding and norm their output alone.
            hidden: Tensor = (output[0] if isinstance(output, tuple) else output).detach()
            if gpt.config.sequence_parallel:  # this rank has computed a part of the tokens
                hidden = torch.cat(parallel.tensor_parallel_shards(hidden))
            by_id[layer_id] = parallel.all_tokens(hidden, 0)

        decoder: Any = gpt.decoder  # declares its layers as modules of any class
        modules: dict[int, Any] = {layer.layer_number: layer for layer in decoder.layers}
        if gpt.pre_process:
            modules[0] = gpt.embedding
        if gpt.post_process:
            modules[_LAST] = decoder.final_layernorm
        with contextlib.ExitStack() as hooks:
            for layer_id in {*self._layer_ids, _LAST} & modules.keys():
                hook = modules[layer_id].register_forward_hook(functools.partial(keep, layer_id))
                hooks.callback(hook.remove)
            yield
        device, config = next(gpt.parameters()).device, gpt.config
        for index, (row, columns) in zip(batch.indices, batch.inputs.places, strict=True):
            # Zeros where another stage has the states.
            none_TH = torch.zeros(columns.stop - columns.start, config.hidden_size, dtype=config.params_dtype)
            found = (by_id.get(layer_id) for layer_id in (*self._layer_ids, _LAST))
            whole = [none_TH.to(device) if each is None else each[columns, row] for each in found]
            part = torch.cat(whole, dim=-1)  # [T, (A + 1) H], those after the final norm last
            is_whole = parallel.current_shard().pipeline_size == 1
            self._parts[index] = part.to(self._device) if is_whole else part

    def finish(self) -> None:
        """Sum the states over the pipeline stages; every stage calls this after the last forward pass."""
        for index in sorted(self._parts):
            states = parallel.sum_over_stages(self._parts.pop(index)).to(self._device)
            size = states.shape[-1] // (len(self._layer_ids) + 1)
            self.states.append((states[:, :-size].contiguous(), states[:, -size:].contiguous()))


FloatArray = NDArray[np.float32]


def _build(
    architecture: Architecture, learner: LearnerConfig, read: Callable[[str], Tensor]
) -> tuple[GPTModel, MtpLayer | None]:
    """Build this rank's part of the model and of its MTP layer from full tensors by their Hugging Face names."""
    shard = parallel.current_shard()
    require_divisible(architecture, learner.parallel)
    with host.cuda_as_cpu():
        model, mtp = build_model(architecture, learner, shard), build_mtp(architecture, learner)
    load_exactly(model, shard_from_hf(read, architecture, shard))
    if mtp is not None:
        load_exactly(mtp, shard_from_hf(read, architecture, shard, mtp_mappings(architecture)))
    return model, mtp


def _policy_loss(update: Update, micro: MicroBatch, logprobs_BT: Tensor) -> PolicyLoss:
    """Compute the loss of a micro-batch's rollouts from the logprobs of their labels."""
    batch, given, ref_logprobs = update.batch, update.trainer_logprobs, update.ref_logprobs
    trainer_logprobs_BT = logprobs_BT.detach() if given is None else micro.spread(given)
    log_ratio_BT = trainer_logprobs_BT - micro.spread(batch.rollout_logprobs)
    return policy_loss(
        logprobs_BT,
        trainer_logprobs_BT=trainer_logprobs_BT,
        weights=corrected(log_ratio_BT, micro.mask_BT, micro.inputs.places, update.loss),
        ref_logprobs_BT=None if ref_logprobs is None else micro.spread(ref_logprobs),
        advantages_BT=micro.repeat(batch.advantages),
        mask_BT=micro.mask_BT if all(batch.counts) else micro.mask_BT & (micro.repeat(batch.counts) > 0),
        places=micro.inputs.places,
        config=update.loss,
    )


class MegatronPolicy:
    """This rank's part of a policy and its optimizer; built by `load` or `from_scratch`.

    Attributes:
        version: number of `train_step`s that the weights have seen.
        mtp_loss: loss of the MTP layer in the last `lm_step` that trained the layer.
    """

    def __init__(
        self,
        read: Callable[[str], Tensor],
        architecture: Architecture,
        learner: LearnerConfig,
        optimizer: OptimizerConfig | None,
        *,
        lora: LoraConfig | None = None,
        base: str = "",
    ) -> None:
        """Build this rank's part, and adapters on it if `lora` is given; `base` names the model below them."""
        self.device = parallel.device()
        self.architecture = architecture
        gpt, mtp = _build(architecture, learner, read)
        self._gpt = gpt.to(self.device)
        self._mtp = None if mtp is None else mtp.to(self.device)
        self._adapters = None if lora is None else Adapters(self._gpt, architecture, lora, base=base)
        self._shard = parallel.current_shard()
        self.version = 0
        self._learner = learner
        self._optimizer_config = optimizer
        self._mtp_trainer: MtpTrainer | None = None
        self.mtp_loss: float | None = None
        training = None if optimizer is None else Training(self._gpt, learner, optimizer)
        self._training = training
        self._memory = TrainingMemory(self._gpt, [], device=self.device) if training is None else training.memory
        self._num_updates = 0
        self._batching = Batching(
            max_tokens=learner.max_tokens_per_microbatch,
            packs=packs(learner),
            shares_prefixes=skips_padding(architecture, learner),
            multiple=learner.parallel.width_multiple,
        )
        if learner.num_threads is not None:
            torch.set_num_threads(learner.num_threads)
        self._head = OutputHead(
            self._gpt,
            chunk_tokens=learner.logprob_chunk_tokens,
            adds_to_main_grad=optimizer is not None and lora is None,
        )
        stepper = None if training is None else training.optimizer
        self._checkpoints = PolicyCheckpoints(self._gpt, stepper, architecture, self._adapters)

    @classmethod
    def load(
        cls,
        hf_path: Path,
        *,
        learner: LearnerConfig,
        optimizer: OptimizerConfig | None,
        lora: LoraConfig | None = None,
        computed_as: WeightFormat | None = None,
    ) -> MegatronPolicy:
        """Load a model directory in Hugging Face format; without `optimizer` the policy cannot be updated.

        Args:
            computed_as: format to which matrices and their inputs are rounded, as engines do; None rounds nothing.
        Raises:
            ConfigError: the architecture is unknown, `learner.parallel` does not split the model evenly, or the model
                cannot have these adapters.
        """
        architecture = Architecture.from_hf(hf_path)
        parallel.initialize(learner.parallel)
        with open_weights(hf_path) as read:
            if computed_as is None:
                return cls(read, architecture, learner, optimizer, lora=lora, base=str(hf_path))
            policy = cls(rounded_weights(read, computed_as), architecture, learner, optimizer, lora=lora)
            round_inputs(policy._gpt, computed_as, num_ranks=learner.parallel.tensor)
            return policy

    @classmethod
    def from_scratch(
        cls,
        scratch: ScratchConfig,
        *,
        vocab_size: int,
        eos_token_id: int,
        learner: LearnerConfig,
        optimizer: OptimizerConfig | None,
    ) -> MegatronPolicy:
        """Build a policy with random weights, which depend on `scratch` alone and not on the layout.

        An MTP layer of the policy is trained in every `lm_step`, by an optimizer of the same config.
        """
        architecture = Architecture.from_scratch(scratch, vocab_size=vocab_size, eos_token_id=eos_token_id)
        parallel.initialize(learner.parallel)
        weights = initial_weights(architecture, std=scratch.shape.init_std, seed=scratch.seed)
        policy = cls(weights.__getitem__, architecture, learner, optimizer)
        if architecture.has_mtp and optimizer is not None:
            policy.start_mtp(optimizer)
        return policy

    def load_mtp(self, path: Path) -> None:
        """Replace the MTP layer by that of another model directory, before the layer's training starts."""
        assert self._mtp is not None and self._mtp_trainer is None, "a policy with an MTP layer that is not trained yet"
        with open_weights(path) as read:
            mine = shard_from_hf(read, self.architecture, self._shard, mtp_mappings(self.architecture))
            load_exactly(self._mtp, mine)

    def start_mtp(self, optimizer: OptimizerConfig) -> MtpTrainer:
        """Build the trainer of the policy's MTP layer, which has its own optimizer and gradient clipping."""
        name, rule = self.architecture.family.name, "mtp needs a policy with an MTP layer"
        require(self._mtp is not None, "draft.method", rule, name, f"such as a {MIMO.name}")
        assert self._mtp is not None and self._mtp_trainer is None, "a trained layer has gradient buffers already"
        self._mtp_trainer = MtpTrainer(
            self._gpt,
            self._mtp,
            architecture=self.architecture,
            learner=self._learner,
            optimizer=optimizer,
            batching=self._batching,
        )
        return self._mtp_trainer

    def logprobs(
        self, token_ids: Sequences, prompt_lengths: Sequence[int], temperature: float, *, routes: Routes = ()
    ) -> list[FloatArray]:
        """Compute each response token's logprob under softmax(logits / temperature), without gradient.

        Args:
            routes: experts of each sequence's tokens but the last; empty leaves the choice to the policy's routers.
        """
        values = ByToken(token_ids, prompt_lengths, self.device)

        def keep(hidden_TBH: Tensor, batch: MicroBatch) -> None:
            values.keep(self._head.scores(hidden_TBH, batch, temperature).logprobs_BT, batch)

        self._run(self._microbatches(token_ids, prompt_lengths, routes), keep, forward_only=True)
        return values.collected()

    def base_logprobs(
        self, token_ids: Sequences, prompt_lengths: Sequence[int], temperature: float
    ) -> list[FloatArray]:
        """Compute `logprobs` under the model below the adapters."""
        assert self._adapters is not None, "this policy was loaded without adapters"
        with self._adapters.switched_off():
            return self.logprobs(token_ids, prompt_lengths, temperature)

    def map_logits(
        self,
        token_ids: Sequences,
        prompt_lengths: Sequence[int],
        function: Callable[[Tensor, Tensor], Tensor],
        *,
        width: int,
    ) -> NDArray[np.float64]:
        """Apply a function to the logits that predict each response token, without gradient.

        Args:
            function: from logits [N, vocabulary] and the actual tokens [N] to values [N, width], called with
                the tokens of one sequence, at most `logprob_chunk_tokens` of them at a time.
        Returns:
            [response tokens of all sequences, width], in the order of `token_ids`.
        """
        offsets = np.cumsum([0, *label_counts(token_ids, prompt_lengths)])
        values_NW = torch.zeros(int(offsets[-1]), width, dtype=torch.float64, device=self.device)

        def keep(hidden_TBH: Tensor, batch: MicroBatch) -> None:
            for number, part, logits_CV, labels_C in self._head.rows(hidden_TBH, batch):
                first = offsets[batch.indices[number]]
                values_NW[first + part.start : first + part.stop] = function(logits_CV, labels_C).double()

        self._run(self._microbatches(token_ids, prompt_lengths), keep, forward_only=True)
        return parallel.sum_over_stages(values_NW).cpu().numpy()

    def train_step(self, update: Update, *, capture: Capture | None = None) -> Trained:
        """Do one optimizer update of the policy.

        Without `trainer_logprobs` the detached logprobs of this forward pass replace them, so that the loss has a ratio
        of exactly 1, and are returned. Routes are replayed.

        Args:
            capture: collects the hidden states of this forward pass; the update does not depend on it.
        Raises:
            FloatingPointError: the gradient is not finite.
        """
        batch = update.batch
        counts = batch.counts or [True] * len(batch.token_ids)
        lengths = label_counts(batch.token_ids, batch.prompt_lengths)
        num_all_tokens = parallel.sum_over_data_ranks(sum(lengths))
        # At least 1, for a step of which every response is left out.
        num_tokens = max(1, parallel.sum_over_data_ranks(sum(itertools.compress(lengths, counts))))
        by = divisor(
            update.loss.kind,
            num_tokens=num_tokens,
            num_responses=max(1, parallel.sum_over_data_ranks(sum(counts))),
            max_response_tokens=update.max_response_tokens,
        )
        takes_own = update.trainer_logprobs is None
        own = ByToken(batch.token_ids, batch.prompt_lengths, self.device) if takes_own else None

        def loss_of(hidden_TBH: Tensor, micro: MicroBatch) -> tuple[Tensor, Result]:
            scores = self._head.scores(hidden_TBH, micro, update.temperature)
            if own is not None:
                own.keep(scores.logprobs_BT.detach(), micro)
            part = _policy_loss(update, micro, scores.logprobs_BT)
            sums = {"clipped": part.num_clipped, "kl": part.kl_sum, "entropy": scores.entropy}
            return part.loss / by, {"loss": part.loss.detach() / by, **sums}

        batches = self._microbatches(batch.token_ids, batch.prompt_lengths, batch.routes)
        learning_rate = self.learning_rate
        sums, grad_norm = self._update(batches, loss_of, ("loss", "clipped", "kl", "entropy"), learning_rate, capture)
        self.version += 1
        stats = TrainStats(
            loss=sums["loss"],
            grad_norm=grad_norm,
            kl=sums["kl"] / num_tokens,
            clip_fraction=sums["clipped"] / num_tokens,
            num_tokens=num_tokens,
            learning_rate=learning_rate,
            entropy=sums["entropy"] / num_all_tokens,
            num_all_tokens=num_all_tokens,
            num_computed_tokens=parallel.sum_over_data_ranks(sum(each.inputs.num_computed_tokens for each in batches)),
        )
        return Trained(stats=stats, own_logprobs=None if own is None else own.collected())

    def lm_step(self, sequences: Sequences, loss_starts: Sequence[int], *, learning_rate: float | None = None) -> float:
        """Do one optimizer update on the next-token loss.

        Args:
            loss_starts: index of each sequence's first token in the loss; 0 learns every token that has a predecessor.
            learning_rate: None follows the optimizer's config.
        Returns:
            Mean loss over the learned tokens, in nats.
        """
        starts = [max(start, 1) for start in loss_starts]
        num_tokens = parallel.sum_over_data_ranks(sum(label_counts(sequences, starts)))

        def loss_of(hidden_TBH: Tensor, micro: MicroBatch) -> tuple[Tensor, Result]:
            logprobs_BT = self._head.scores(hidden_TBH, micro, 1.0).logprobs_BT
            part = -torch.where(micro.mask_BT, logprobs_BT, 0.0).sum() / num_tokens
            return part, {"loss": part.detach()}

        learning_rate = self.learning_rate if learning_rate is None else learning_rate
        capture = None if self._mtp_trainer is None else Capture(self.architecture.mtp_layer_ids)
        sums, _ = self._update(self._microbatches(sequences, starts), loss_of, ("loss",), learning_rate, capture)
        if self._mtp_trainer is not None and capture is not None:
            self.mtp_loss = self._mtp_trainer.step(sequences, starts, capture.states, learning_rate=learning_rate)
        return sums["loss"]

    def hidden_states(self, token_ids: Sequences, layer_ids: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Compute the hidden states that a draft learns from: those of some layers, and the output layer's input.

        Args:
            layer_ids: id i is the residual stream after i layers, before the final norm; id 0 is the embeddings.
        Returns:
            `Capture.states`, in the learner's dtype, on every rank of the model.
        """
        num_bytes = self.hidden_states_bytes(token_ids, layer_ids)
        # The states stay on the rank's device if they fill at most half of the device's free memory.
        fits = self.device.type == "cpu" or 2 * num_bytes <= torch.cuda.mem_get_info(self.device)[0]
        capture = Capture(layer_ids, device=self.device if fits else _CPU)
        self._run(self._microbatches(token_ids, None), lambda *_: None, forward_only=True, capture=capture)
        return capture.states

    def hidden_states_bytes(self, token_ids: Sequences, layer_ids: Sequence[int]) -> int:
        """Estimate the bytes that `hidden_states` returns; the maximum over expert-parallel ranks."""
        num_tokens = parallel.most_over_expert_ranks(sum(map(len, token_ids)))
        itemsize = TORCH_DTYPES[self._learner.dtype].itemsize
        return num_tokens * (len(layer_ids) + 1) * self.architecture.hidden_size * itemsize

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Gather the full parameters under their Hugging Face names; collective over all ranks.

        Tensors may share memory with the model: copy them before the next update.
        """
        return gathered_weights(dict(self._gpt.named_parameters()), self.architecture, self._shard)

    def mtp_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Gather the full parameters of the MTP layer, which `weights` leaves out; empty without such a layer."""
        parameters = {} if self._mtp is None else dict(self._mtp.named_parameters())
        return gathered_weights(parameters, self.architecture, self._shard, table=mtp_mappings)

    def vocabulary_weights(self) -> tuple[Tensor, Tensor]:
        """Gather embeddings and output layer, which may be the same tensor, [V, H] each; collective over all ranks."""
        named = dict(self._gpt.named_parameters())
        table = vocabulary_mappings
        found = [tensor for _, tensor in gathered_weights(named, self.architecture, self._shard, table=table)]
        return found[0], found[-1]

    def held_weights(self) -> Iterator[HeldWeights]:
        """List this rank's shards in place; over all ranks each element occurs once, copies on the first data rank."""
        return held_weights(dict(self._gpt.named_parameters()), self.architecture, self._shard)

    def save_hf(self, path: Path, tokenizer_dir: Path) -> None:
        """Write config, weights and the tokenizer's files to a directory that transformers and vLLM load.

        Adapters are merged into the weights, and are written to the folder `adapter` as well.
        """
        self._write(path, itertools.chain(self.weights(), self.mtp_weights()), tokenizer_dir)
        if self._adapters is not None:
            self._adapters.save(path / FOLDER)

    def save_mtp(self, path: Path, tokenizer_dir: Path) -> None:
        """Write config, the MTP layer's weights and the tokenizer's files to a directory, as a draft."""
        self._write(path, self.mtp_weights(), tokenizer_dir)

    def _write(self, path: Path, weights: Iterator[tuple[str, Tensor]], tokenizer_dir: Path) -> None:
        if parallel.is_main_rank():
            save_model(path, self.architecture.to_hf(self._learner.dtype), weights, tokenizer_dir)
        else:  # gathering is collective: every rank iterates, and keeps no tensor
            collections.deque(weights, maxlen=0)
        parallel.barrier()

    def save_checkpoint(self, path: Path, extra: dict[str, Any], *, beside: Mapping[str, Tensor] | None = None) -> None:
        """Write weights, optimizer, random state and JSON `extra` in the background, for a resumed run.

        Of a policy with adapters, the adapters alone are written, with a fingerprint of the model below them: a resumed
        run loads that first. `beside` are other tensors of the run, equal on all ranks.
        """
        self._memory.onload()
        version, num_updates = self.version, self._num_updates
        self._checkpoints.save(path, version=version, num_updates=num_updates, extra=extra, beside=beside or {})

    def finish_checkpoint(self) -> None:
        """Wait until the checkpoint is written; a failed write raises here, or in the next update."""
        self._checkpoints.wait()

    def load_checkpoint(self, path: Path, *, beside: dict[str, Tensor] | None = None) -> dict[str, Any]:
        """Restore a checkpoint bit for bit, under this or another layout; returns its `extra` and fills `beside`."""
        self._memory.onload()
        state = self._checkpoints.load(path, beside=beside)
        if self._adapters is not None:
            self._adapters.merge()
        self.version, self._num_updates = state["version"], state["num_updates"]
        return state["extra"]

    def _microbatches(
        self, sequences: Sequences, loss_starts: Sequence[int] | None, routes: Routes = ()
    ) -> list[MicroBatch]:
        batches = self._batching.microbatches(sequences, loss_starts, self.device, routes)
        # Expert-parallel ranks compute each layer together, so they need the same number of micro-batches.
        num_idle = parallel.most_over_expert_ranks(len(batches)) - len(batches)
        given = batches[0].inputs.routes_LTBK if batches else None  # an idle token takes those of another
        idle = idle_microbatch(self.device, None if given is None else given[:, :1, :1])
        return batches + [idle] * num_idle

    def _run(
        self, batches: list[MicroBatch], loss_of: LossOf, *, forward_only: bool, capture: Capture | None = None
    ) -> list[Result]:
        """Run the forward pass, and the backward pass unless `forward_only`, by Megatron's schedule for the layout.

        Returns:
            The scalars of `loss_of` for each micro-batch that is not idle; empty except on the last pipeline stage.
        """
        if not batches:
            return []

        def forward_step(data: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Any]:
            batch = next(data)
            captured = capture.of(self._gpt, batch) if capture else contextlib.nullcontext()
            with host.model_arithmetic(), captured, replayed(self._gpt, batch.inputs.routes_LTBK):
                output = forward(model, batch.inputs)

            def loss_func(hidden_TBH: Tensor) -> tuple[Tensor, Tensor, Result]:
                with host.model_arithmetic():
                    # An idle rank needs a backward pass: gradients of other ranks' tokens pass through its experts.
                    found = loss_of(hidden_TBH, batch) if batch.indices else None
                    loss, result = found or (hidden_TBH.sum() * 0.0, {})
                return loss, torch.zeros((), dtype=torch.int), result

            return output, loss_func

        with host.cuda_as_cpu(), torch.set_grad_enabled(not forward_only), contextlib.ExitStack() as afterwards:
            afterwards.callback(forget_routes, self._gpt)
            results = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(batches),
                model=[self._gpt if self._training is None else self._training.module],
                num_microbatches=len(batches),
                seq_length=max(batch.labels_BT.shape[1] for batch in batches),
                micro_batch_size=max(len(batch.labels_BT) for batch in batches),
                forward_only=forward_only,
            )
        if capture is not None:
            capture.finish()
        return [result for result, batch in zip(results, batches, strict=False) if batch.indices]

    def _update(
        self,
        batches: list[MicroBatch],
        loss_of: LossOf,
        names: Sequence[str],
        learning_rate: float,
        capture: Capture | None = None,
    ) -> tuple[dict[str, float], float]:
        """Accumulate gradients over the micro-batches and step the optimizer.

        Returns:
            Sums of the named results over micro-batches and ranks, and the norm of the gradient.
        """
        assert self._training is not None, "this policy was built without an optimizer"
        assert batches, "every data-parallel rank has a sequence of an update"
        self._checkpoints.raise_error()
        self._training.begin(learning_rate=learning_rate)
        results = self._run(batches, loss_of, forward_only=False, capture=capture)
        grad_norm = self._training.step()
        if self._adapters is not None:
            self._adapters.merge()
        self._num_updates += 1
        if not math.isfinite(grad_norm):
            raise FloatingPointError(f"the gradient of update {self._num_updates} is not finite: {grad_norm}")
        return parallel.sum_results(results, names), grad_norm

    def offload(self) -> int:
        """Offload gradients and optimizer state until the next update or checkpoint; returns the freed bytes."""
        return self._memory.offload() + (0 if self._mtp_trainer is None else self._mtp_trainer.memory.offload())

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update."""
        assert self._optimizer_config is not None
        return self._optimizer_config.warmed_rate(self._num_updates)
