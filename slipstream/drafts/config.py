"""Which draft proposes tokens, and how it is trained."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from slipstream.config import (
    EVEN,
    Checked,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Rule,
    ge,
    gt,
    require,
    within,
)
from slipstream.drafts.methods import TRAITS, DraftMethod, Training
from slipstream.grpo.config import OptimizerMethod


class DraftOnline(StrEnum):
    """When the draft learns from the policy's own forward pass while RL runs."""

    OFF = "off"
    ALWAYS = "always"  # in every step
    WHEN_STALE = "when_stale"  # in a step in which that is expected to pay: see `slipstream.drafts.controller`


class DraftInit(StrEnum):
    """Which prompts the draft is pretrained on; responses always come from the policy itself."""

    IN_DOMAIN = "in_domain"
    GENERAL = "general"
    FROM_HUB = "from_hub"  # from `draft.model` on, on prompts of the domain


FRESH_INITS = (DraftInit.IN_DOMAIN, DraftInit.GENERAL)
"""Those that need no `draft.model`."""


LOSSES = ("kl_div", "tv", "lk", "lk_hybrid")
"""What each means is in `drafts/trainer.py`."""


_IS_LOSS = Rule(f"must be one of {', '.join(LOSSES)}", LOSSES.__contains__)


class DraftLengthRule(StrEnum):
    """Whether all rollouts of the speculative arm are drafted for with the tuned k, or with one k a running batch.

    With `by_batch` a rollout's draws depend on how many others run beside it; its distribution never does.
    """

    FIXED = "fixed"
    BY_BATCH = "by_batch"


@dataclass(frozen=True, kw_only=True)
class AutopilotConfig(Checked, path="draft.autopilot"):
    """When the speculative arm stops drafting, and how it finds back: see `slipstream.drafts.length`."""

    enabled: bool = False
    patience_steps: Annotated[int, ge(2)] = 3  # that must lose
    probe_every_steps: Annotated[int, ge(1)] = 8  # at first; twice as rarely after each probe, down to an eighth
    margin: NonNegativeFloat = 0.05  # a way loses if it costs so much more, as a fraction


@dataclass(frozen=True, kw_only=True)
class DraftScratchConfig(Checked, path="draft.scratch"):
    """A small Qwen3 with random weights that is to propose tokens; vocabulary and positions are the policy's.

    Shallow by default: it computes all its layers for each token that it proposes.
    """

    hidden_size: PositiveInt = 64
    num_layers: PositiveInt = 2
    num_attention_heads: int = 2
    num_query_groups: PositiveInt = 1
    head_dim: Annotated[int, gt(0), EVEN] = 32
    ffn_hidden_size: PositiveInt = 192
    init_std: PositiveFloat = 0.05  # about 0.5 / sqrt(hidden_size)
    optimizer: OptimizerMethod = OptimizerMethod.MUON

    def _check(self) -> None:
        self._require(
            self.num_attention_heads % self.num_query_groups == 0 < self.num_attention_heads,
            "num_attention_heads",
            f"must be a multiple of num_query_groups {self.num_query_groups}",
        )


@dataclass(frozen=True, kw_only=True)
class DraftConfig(Checked, path="draft"):
    """What proposes tokens, and its pretraining; `methods.TRAITS` says which fields a method reads.

    `aux_hidden_state_layer_ids`: id i is the residual stream after i layers of the policy. They are explicit because
    defaults collapse to duplicates on shallow models.

    `online` training takes its rollouts in a random order, at most `online_tokens_per_update` tokens an
    update, with its own optimizer, whose learning rate stays as it is; the rest is as in pretraining.
    """

    method: DraftMethod = DraftMethod.EAGLE3
    init: DraftInit = DraftInit.IN_DOMAIN
    length: DraftLengthRule = DraftLengthRule.FIXED
    autopilot: AutopilotConfig = field(default_factory=AutopilotConfig)
    aux_hidden_state_layer_ids: tuple[int, ...] = ()
    model: str | None = None  # hub id or path; of `draft_model`, where None trains `scratch`, and of `init: from_hub`
    scratch: DraftScratchConfig = field(default_factory=DraftScratchConfig)
    prompt_lookup_min: Annotated[int, ge(1)] = 2  # of `ngram`: tokens that must have stood before, at least
    prompt_lookup_max: int = 5  # and how many more are matched where they can be
    suffix_max_tree_depth: Annotated[int, ge(1)] = 24  # of `suffix`: tokens of a match and its draft together
    # Responses that an engine remembers; 0: the sequence's own tokens alone.
    suffix_max_cached_requests: NonNegativeInt = 10_000
    suffix_max_spec_factor: PositiveFloat = 1.0  # tokens drafted for each token that matched
    suffix_min_token_prob: Annotated[float, within("[0, 1]")] = 0.1  # by the counts of what followed
    num_prompts: PositiveInt = 1024
    samples_per_prompt: PositiveInt = 1
    num_heldout_prompts: PositiveInt = 64
    num_steps: int = 300  # 0 takes the draft of `init: from_hub` as it is
    # The draft knows so many tokens, the policy's most frequent ones; null keeps all.
    vocab_size: Annotated[int | None, gt(0, "null keeps the whole vocabulary")] = None
    tokens_per_step: PositiveInt = 2048
    # The policy's hidden states are captured once if they fit, else at each step.
    states_cache_gib: NonNegativeFloat = 4.0
    tokens_per_row: PositiveInt = 512  # chats are packed into rows; a row's activations are held at once
    ttt_steps: PositiveInt = 4
    ttt_step_loss_decay: Annotated[float, within("(0, 1]")] = 1.0
    loss: Annotated[str, _IS_LOSS] = "kl_div"  # one of LOSSES, see drafts/trainer.py
    loss_chunk_tokens: PositiveInt = 1024  # tokens whose logits over the vocabulary are held at a time
    online: DraftOnline = DraftOnline.OFF
    online_optimizer: OptimizerMethod = OptimizerMethod.ADAMW  # muon learns from fewer tokens: docs/log.md
    online_learning_rate: Annotated[float, within("(0, 1]")] = 1e-3
    online_updates: PositiveInt = 1  # of the draft, beside each update of the policy
    online_tokens_per_update: Annotated[int | None, gt(0, "null takes draft.tokens_per_step")] = None
    online_ttt_steps: Annotated[int | None, gt(0, "null takes draft.ttt_steps")] = None
    online_horizon_steps: PositiveInt = 8  # for which `when_stale` expects a trained draft to keep what it gained
    learning_rate: Annotated[float, within("(0, 1]")] = 1e-3
    warmup_steps: NonNegativeInt = 20
    clip_grad: PositiveFloat = 1.0
    checkpoint_every_steps: PositiveInt = 100
    seed: int = 0

    def _check(self) -> None:
        if self.reads("aux_hidden_state_layer_ids"):
            self._check_layer_ids()
        shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
        self._require(longest >= shortest, "prompt_lookup_max", f"must be >= prompt_lookup_min {shortest}")
        self._check_length()
        self._check_given()
        self._check_online()

    @property
    def is_given(self) -> bool:
        """Whether training, if there is any, begins with a draft that somebody else has trained."""
        return self.init is DraftInit.FROM_HUB

    @property
    def trains(self) -> Training:
        """From what the draft is pretrained: a whole model that is given is not, nor is what gets no steps."""
        is_model = self.method is DraftMethod.DRAFT_MODEL and self.model is not None
        return Training.NONE if is_model or self.num_steps == 0 else TRAITS[self.method].training

    @property
    def online_passes(self) -> int:
        """How many tokens are drafted after every position where the draft learns beside the policy."""
        return self.ttt_steps if self.online_ttt_steps is None else self.online_ttt_steps

    @property
    def online_tokens(self) -> int:
        """How many tokens an update beside the policy's takes at most."""
        return self.tokens_per_step if self.online_tokens_per_update is None else self.online_tokens_per_update

    def learning_rate_at(self, step: int) -> float:
        """Linear warmup, then a cosine down to a tenth."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        done = min((step - self.warmup_steps) / max(self.num_steps - self.warmup_steps, 1), 1.0)
        return self.learning_rate * (0.1 + 0.9 * 0.5 * (1.0 + math.cos(math.pi * done)))

    def reads(self, name: str) -> bool:
        """Whether the method reads this field."""
        return name in TRAITS[self.method].fields

    def _check_online(self) -> None:
        trains_online = TRAITS[self.method].trains_online
        rule, fix = f"must be off with draft.method {self.method.value}", "nothing of it is trained during RL"
        is_off = self.online is DraftOnline.OFF
        self._require(trains_online or is_off, "online", rule, fix)
        fits = is_off or self.method is DraftMethod.EAGLE3 or self.online_optimizer is OptimizerMethod.ADAMW
        rule, fix = f"must be adamw with draft.method {self.method.value}", "Muon is for the layer of an EAGLE-3 draft"
        self._require(fits, "online_optimizer", rule, fix)

    def _check_given(self) -> None:
        if self.method is DraftMethod.EAGLE3:
            rule = f"must be given exactly when draft.init is {DraftInit.FROM_HUB.value}"
            self._require((self.model is not None) == self.is_given, "model", rule)
        else:
            rule = f"must be another one with draft.method {self.method.value}"
            self._require(not self.is_given, "init", rule, "only an EAGLE-3 draft is trained from there on")
        if self.is_given:
            self._require(self.num_steps >= 0, "num_steps", "must be >= 0")
            rule = f"must be null with draft.init {self.init.value}"
            self._require(self.vocab_size is None, "vocab_size", rule, "a draft brings its own")
        else:
            self._require(self.num_steps > 0, "num_steps", "must be > 0")

    def _check_layer_ids(self) -> None:
        ids = self.aux_hidden_state_layer_ids
        self._require(
            len(ids) == 3 and len(set(ids)) == 3,
            "aux_hidden_state_layer_ids",
            "must be three different layers",
            "duplicates make vLLM fail with a shape error",
        )
        self._require(list(ids) == sorted(ids) and ids[0] >= 0, "aux_hidden_state_layer_ids", "must rise from 0")

    def _check_length(self) -> None:
        fix = "it drafts as far as its matches reach, and vLLM cannot tell it to stop earlier"
        varies = not TRAITS[self.method].has_one_length
        is_fixed = self.length is DraftLengthRule.FIXED
        self._require(varies or is_fixed, "length", f"must be fixed with {self.method.value}", fix)
        is_off = not self.autopilot.enabled
        require(varies or is_off, "draft.autopilot.enabled", f"must be false with {self.method.value}", True, fix)
