"""Config of GRPO training: the loss, the optimizer, the size of a step, and the loop that takes the steps.

Legend: version `v` of the policy is its weights after `v` steps; step `t` trains version `t` into `t + 1` on batch `t`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from slipstream.config import (
    NUMBER,
    Checked,
    Fix,
    Fraction,
    Int,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Rate,
    Seed,
    Switch,
    rule,
)
from slipstream.types import LoopMode


class OptimizerMethod(StrEnum):
    """AdamW for every parameter, or Muon for the matrices of the layers and AdamW for the rest."""

    ADAMW = "adamw"
    MUON = "muon"


class RecomputeLogprobs(StrEnum):
    """Rule by which the learner computes its log-probabilities of rollouts in a pass of their own, before it trains."""

    AUTO = "auto"  # only where the gradient depends on it
    ALWAYS = "always"


def _surrounds_1(band: Sequence[float]) -> bool:
    return len(band) == 2 and 0 <= band[0] < 1 < band[1]


def _pair(*ranges: Mapping[str, float]) -> dict[str, Any]:
    """Keywords of a JSON schema for a list of two numbers in these ranges."""
    return {"prefixItems": [{"type": "number", **each} for each in ranges], "minItems": 2, "maxItems": 2}


_SHARE = {"minimum": 0, "exclusiveMaximum": 1}
Band = Annotated[
    tuple[Annotated[float, NUMBER], ...],
    rule("must be two ratios around 1", _surrounds_1, **_pair(_SHARE, {"exclusiveMinimum": 1})),
]
Betas = Annotated[
    tuple[Annotated[float, NUMBER], ...],
    rule(
        "must be two numbers in [0, 1)",
        lambda betas: len(betas) == 2 and all(0 <= beta < 1 for beta in betas),
        **_pair(_SHARE, _SHARE),
    ),
]


class Level(StrEnum):
    """Granularity of the ratios of two policies."""

    TOKEN = "token"
    SEQUENCE = "sequence"  # a whole response


class Correction(StrEnum):
    """Weights in the loss of tokens that another policy sampled than the one that is trained."""

    TOKEN = "token"  # by each token's own ratio: little variance, and a bias that grows with the lag
    SEQUENCE = "sequence"  # by the product of the response's ratios: no bias but the cap's, and more variance
    NONE = "none"


class LossKind(StrEnum):
    """Form of the policy loss.

    For each token of a response o: r is its probability under the policy that is trained over that before the step's
    first update, A is its response's advantage, clip(r) = min(max(r, 1 - clip_low), 1 + clip_high), and p is its
    logprob. |o| is the number of the response's tokens. Means and sums are over the whole update.

    `dapo`: mean over tokens of -min(r A, clip(r) A), arXiv:2503.14476.
    `grpo`: mean over responses of the response's mean of the same, arXiv:2402.03300.
    `dr_grpo`: sum over tokens of the same / (responses x sampling.max_response_tokens), so that no token's weight
    depends on its response's length, arXiv:2503.20783.
    `gspo`: mean over responses of -min(s A, clip(s) A), where s is the geometric mean of the response's ratios,
    arXiv:2507.18071.
    `cispo`: mean over tokens of -clip(r) A p, where clip(r) has no gradient, so that every token keeps one,
    arXiv:2506.13585.
    `rloo`: mean over responses of -A times the response's logprob, where A is the reward less the mean reward of the
    group's other responses, arXiv:2402.14740.
    """

    DAPO = "dapo"
    GRPO = "grpo"
    DR_GRPO = "dr_grpo"
    GSPO = "gspo"
    CISPO = "cispo"
    RLOO = "rloo"


_LARGEST_GSPO_CLIP = 0.05


class KlEstimator(StrEnum):
    """Estimator of KL(policy || reference) from a token that the policy sampled.

    With g, the token's logprob under the reference less that under the policy:

    `k1`: -g. Its mean is the KL, but the mean of its gradient is 0: as a loss it adds noise and pulls nowhere.
    `k2`: g^2 / 2, a biased value. The mean of its gradient is the gradient of KL(policy || reference).
    `k3`: exp(g) - g - 1, never negative. Its mean is the KL, and the mean of its gradient is the gradient of
    KL(reference || policy).

    Source: http://joschu.net/blog/kl-approx.html
    """

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"


class LossConfig(Checked, path="grpo.loss"):
    """Policy loss, DAPO's (arXiv:2503.14476) unless `kind` names another, and an optional KL to a reference policy."""

    kind: LossKind = LossKind.DAPO
    """Form of the loss: mean over tokens (`dapo`, `cispo`) or responses, and what is clipped. Set it to reproduce
    another method."""
    clip_low: Fraction = 0.2
    """Distance below 1 at which the ratio of policies is clipped. Set it to tune the loss."""
    clip_high: PositiveFloat = 0.28
    """Distance above 1 at which the ratio of policies is clipped. Set it to tune the loss."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Weight of a KL to the initial policy; 0 keeps no reference. Set it where the policy drifts too far."""
    kl_estimator: KlEstimator = KlEstimator.K3
    """Estimator of this KL; as a loss `k2` and `k3` pull to the reference and `k1` does not. Set it to reproduce
    another method."""
    correction: Correction | None = None
    """Level of the weights trainer probability / rollout probability; null means `token` with a cap, else none."""
    truncated_importance_sampling: PositiveFloat | None = None
    """Cap of these weights, which correct for an engine's numerics and for older policies; null corrects nothing."""
    mask_band: Band | None = None
    """Lowest and highest ratio that counts in the loss; null counts all. Set it where engines and learner differ."""
    mask_level: Level = Level.TOKEN
    """Level of the ratios of `mask_band`: single tokens, or geometric means of responses. Set it with `mask_band`."""
    filter_overlong: Switch = False
    """Leave responses that were cut off at `sampling.max_response_tokens` out of the loss (DAPO); their rewards still
    enter the group's mean. Set it where a response that is cut off says little about its quality."""

    def _check(self) -> None:
        rule = f"must be at most {_LARGEST_GSPO_CLIP} with grpo.loss.kind gspo"
        fix = "a response's mean ratio stays near 1, and would never be clipped: its paper has 0.0003 and 0.0004"
        for name, clip in (("clip_low", self.clip_low), ("clip_high", self.clip_high)):
            self._require(self.kind is not LossKind.GSPO or clip <= _LARGEST_GSPO_CLIP, name, rule, fix)
        said, cap = self.correction, self.truncated_importance_sampling
        is_none = said is Correction.NONE
        rule = f"must be {'null' if is_none else 'a number'} with grpo.loss.correction {said}"
        fix = "drop it" if is_none else "it caps the weights: 2.0 is common"
        self._require(said is None or is_none == (cap is None), "truncated_importance_sampling", rule, fix)
        corrects, rule = self.corrects is not Correction.NONE, "must be null without a correction"
        fix = "set grpo.loss.correction and its cap, grpo.loss.truncated_importance_sampling"
        self._require(self.mask_band is None or corrects, "mask_band", rule, fix)

    @property
    def corrects(self) -> Correction:
        """Correction that the loss makes: `correction`, or where that is null the one that the cap implies."""
        if self.correction is not None:
            return self.correction
        return Correction.NONE if self.truncated_importance_sampling is None else Correction.TOKEN


class OptimizerConfig(Checked, path="optimizer"):
    """Optimizer of a model. Its learning rate rises linearly over `warmup_steps` updates.

    Then it stays in GRPO and beside it, falls to zero in the pretraining of small models, and along a cosine to a
    tenth in that of EAGLE-3 and MTP drafts.
    """

    learning_rate: Rate
    """Learning rate after warm-up."""
    method: OptimizerMethod = OptimizerMethod.ADAMW
    """AdamW for all parameters, or Muon for the matrices of the layers, which it makes orthogonal as wholes under every
    layout of the learner."""
    betas: Betas = (0.9, 0.95)
    """Decay of AdamW's two moments. Set it to tune the optimizer."""
    weight_decay: Probability = 0.0
    """Decay of the matrices, by the learning rate, in each update; norms and biases have none. Set it to tune
    the optimizer."""
    clip_grad: PositiveFloat = 1.0
    """Largest norm of the gradient. Set it where the loss spikes."""
    warmup_steps: NonNegativeInt = 0
    """Updates over which the learning rate rises."""

    def warmed_rate(self, num_updates: int) -> float:
        """Return the learning rate of the next update, for training whose rate stays after its warm-up."""
        return self.learning_rate * min(1.0, (num_updates + 1) / max(self.warmup_steps, 1))


class DynamicSamplingConfig(Checked, path="grpo.dynamic_sampling"):
    """Further prompts in place of groups whose rewards are all equal and teach nothing (DAPO, arXiv:2503.14476)."""

    max_extra_batches: NonNegativeInt = 0
    """Further batches of `grpo.prompts_per_step` prompts that a step may sample until that many groups have signal;
    then groups without signal fill it. Set it where many groups are all right or all wrong."""


class GrpoConfig(Checked, path="grpo"):
    """Training of the policy on groups of rollouts; both arms of an ablation share it."""

    num_steps: PositiveInt
    """Steps of each arm: rollouts, rewards and updates."""
    prompts_per_step: PositiveInt
    """Prompts of a step."""
    group_size: Annotated[
        Int, Field(ge=2), Fix("advantages are centred on the group's mean, and one rollout has no baseline")
    ]
    """Rollouts of each prompt, on whose mean reward advantages are centred."""
    optimizer: OptimizerConfig
    """Optimizer of the policy."""
    loss: LossConfig = field(default_factory=LossConfig)
    """Loss of the policy."""
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    """Replacement of groups without signal."""
    scale_advantages_by_std: Switch = False
    """Division of advantages by the group's standard deviation, as in the first GRPO. Set it to reproduce that."""
    updates_per_step: PositiveInt = 1
    """Updates that the rollouts of a step are split into. Set it to learn more from each rollout."""
    recompute_logprobs: RecomputeLogprobs = RecomputeLogprobs.AUTO
    """Pass for the learner's log-probabilities of rollouts before it trains. Set `always` to time or compare it."""
    checkpoint_every_steps: PositiveInt = 10
    """Steps between checkpoints."""
    router_replay: Switch = False
    """Send each token of a mixture of experts to the experts that the engine's routers chose. Set it for a mixture on
    GPUs."""
    seed: Seed = 0
    """Seed of rollouts and prompt order. Set by launches (`--seed`) and by ablations."""

    def _check(self) -> None:
        num_rollouts, kind = self.prompts_per_step * self.group_size, self.loss.kind
        rule = f"must be at most the {num_rollouts} rollouts of a step"
        self._require(self.updates_per_step <= num_rollouts, "updates_per_step", rule)
        fits = not self.scale_advantages_by_std or kind not in (LossKind.DR_GRPO, LossKind.RLOO)
        fix = "its advantages are not scaled: drop it, or take kind grpo"
        self._require(fits, "scale_advantages_by_std", f"must be false with grpo.loss.kind {kind.value}", fix)
        fits, rule = self.updates_per_step == 1 or kind is not LossKind.RLOO, "must be 1 with grpo.loss.kind rloo"
        fix = "it has no ratio, and from a second update on its gradient would be biased: take another kind"
        self._require(fits, "updates_per_step", rule, fix)

    def is_checkpoint_due(self, step: int) -> bool:
        """Return True if a checkpoint is written after this step."""
        return (step + 1) % self.checkpoint_every_steps == 0

    @property
    def needs_logprob_pass(self) -> bool:
        """True if the stage `logprob` runs.

        With one update a step the policy that trains is the one that the pass would ask: its own log-probabilities,
        detached, are the same bits, and the ratio of the loss is exactly 1. From a second update on the ratio is
        taken to the policy before the first, and a KL needs the reference's pass.
        """
        always = self.recompute_logprobs is RecomputeLogprobs.ALWAYS
        return always or self.updates_per_step > 1 or self.loss.kl_coefficient > 0.0


class KvCache(StrEnum):
    """Treatment of a running sequence's keys and values when new weights enter; for `in_flight`."""

    KEEP = "keep"  # those of the old weights stay: no work, and a small bias in every later token of the sequence
    RECOMPUTE = "recompute"  # they are computed anew: one slow iteration, and tokens exactly of the version they carry


class TooOld(StrEnum):
    """Treatment of a group whose version would fall behind the bound before it is complete; for `in_flight`."""

    FINISH = "finish"  # training waits for it
    RESTART = "restart"  # its unfinished rollouts start anew under the newest weights: shorter ones gain a little


class LoopConfig(Checked, path="loop"):
    """Which loop trains, and by how many steps at most rollouts may lag behind the weights that learn from them."""

    mode: LoopMode = LoopMode.SYNCHRONOUS
    """Generation and training in turn, on batches of older policies at once, or with refits in mid-generation."""
    max_off_policy_steps: NonNegativeInt = 0
    """Steps by which rollouts may lag behind the policy that learns from them; 0 with `synchronous` alone."""
    kv_cache: KvCache = KvCache.RECOMPUTE
    """Use of a running sequence's keys and values when new weights enter. Set it with `mode: in_flight`."""
    too_old: TooOld = TooOld.FINISH
    """Treatment of a group that would fall behind the bound. Set it with `mode: in_flight`."""

    def _check(self) -> None:
        lag, is_in_flight = self.max_off_policy_steps, self.mode is LoopMode.IN_FLIGHT
        rule = f"must be 0 with loop.mode {LoopMode.SYNCHRONOUS.value}"
        fix = f"set loop.mode {LoopMode.ONE_STEP_OFF.value} or {LoopMode.IN_FLIGHT.value}"
        self._require(lag == 0 or not self.is_synchronous, "max_off_policy_steps", rule, fix)
        rule = f"must be >= 1 with loop.mode {LoopMode.IN_FLIGHT.value}"
        fix = "engines that run on while the policy learns are behind it"
        self._require(lag >= 1 or not is_in_flight, "max_off_policy_steps", rule, fix)
        fix = "no weights enter there while a rollout runs: leave it out, or set loop.mode in_flight"
        for name, default in (("kv_cache", KvCache.RECOMPUTE), ("too_old", TooOld.FINISH)):
            rule = f"must be {default.value} with loop.mode {self.mode.value}"
            self._require(getattr(self, name) is default or is_in_flight, name, rule, fix)

    @property
    def in_flight_kv_cache(self) -> KvCache | None:
        """Treatment that an engine refitted in flight is told; None where engines rest while new weights enter."""
        return self.kv_cache if self.mode is LoopMode.IN_FLIGHT else None

    @property
    def is_synchronous(self) -> bool:
        """True if generation and training take turns."""
        return self.mode is LoopMode.SYNCHRONOUS
