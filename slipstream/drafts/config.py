"""Which draft proposes tokens, and how it is trained."""

from __future__ import annotations

import math
from dataclasses import field
from enum import StrEnum
from typing import Annotated, Literal, get_args

from pydantic import Field

from slipstream.config import (
    Checked,
    Fix,
    Int,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Rate,
    Seed,
    Switch,
    require,
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


Loss = Literal["kl_div", "tv", "lk", "lk_hybrid"]
LOSSES: tuple[Loss, ...] = get_args(Loss)
"""What each means is in `drafts/trainer.py`."""


class DraftLengthRule(StrEnum):
    """Whether all rollouts of the speculative arm are drafted for with the tuned k, or with one k a running batch.

    With `by_batch` a rollout's draws depend on how many others run beside it; its distribution never does.
    """

    FIXED = "fixed"
    BY_BATCH = "by_batch"


class AutopilotConfig(Checked, path="draft.autopilot"):
    """When the speculative arm stops drafting, and how it finds back: see `slipstream.drafts.length`."""

    enabled: Switch = False
    """Drafting stops while its steps cost more than steps without it. Set it where acceptance may collapse in a run."""
    patience_steps: Annotated[Int, Field(ge=2)] = 3
    """Successive steps that must lose before drafting is switched. Set it higher where step times are noisy."""
    probe_every_steps: PositiveInt = 8
    """Steps before the first probe of the other way; the interval doubles up to 8 times this. Set it with `enabled`."""
    margin: NonNegativeFloat = 0.05
    """Extra cost of a step, as a fraction, from which a way loses. Set it higher where step times are noisy."""


class DraftScratchConfig(Checked, path="draft.scratch"):
    """A small Qwen3 with random weights that is to propose tokens; vocabulary and positions are the policy's.

    Shallow by default: it computes all its layers for each token that it proposes.
    """

    hidden_size: PositiveInt = 64
    """Width of the residual stream. Set it to size the draft of `method: draft_model` that is trained here."""
    num_layers: PositiveInt = 2
    """Transformer layers. Set it to size the draft of `method: draft_model` that is trained here."""
    num_attention_heads: PositiveInt = 2
    """Query heads of a layer. Set it with `hidden_size`."""
    num_query_groups: PositiveInt = 1
    """Key-value heads of a layer, a divisor of `num_attention_heads`. Set it with `num_attention_heads`."""
    head_dim: Annotated[Int, Field(gt=0, multiple_of=2), Fix("RoPE turns pairs of dimensions")] = 32
    """Dimensions of a head. Set it with `hidden_size`."""
    ffn_hidden_size: PositiveInt = 192
    """Width of the feed-forward layers. Set it with `hidden_size`."""
    init_std: PositiveFloat = 0.05
    """Standard deviation of the initial weights, about 0.5 / sqrt(`hidden_size`). Set it with `hidden_size`."""
    optimizer: OptimizerMethod = OptimizerMethod.MUON
    """Optimizer of the pretraining. Set `adamw` with a learner in parallel, which Muon does not serve."""

    def _check(self) -> None:
        self._require(
            self.num_attention_heads % self.num_query_groups == 0,
            "num_attention_heads",
            f"must be a multiple of num_query_groups {self.num_query_groups}",
        )


class DraftConfig(Checked, path="draft"):
    """What proposes tokens, and its pretraining; `methods.TRAITS` says which fields a method reads.

    `online` training takes its rollouts in a random order, at most `online_tokens_per_update` tokens an
    update, with its own optimizer, whose learning rate stays as it is; the rest is as in pretraining.
    """

    method: DraftMethod = DraftMethod.EAGLE3
    """Method that proposes tokens. Set by bake-offs and by whoever compares drafters."""
    init: DraftInit = DraftInit.IN_DOMAIN
    """Prompts that the draft is pretrained on, or `from_hub` for a pretrained draft. Set by ablations."""
    length: DraftLengthRule = DraftLengthRule.FIXED
    """One tuned k for all batches, or one k for each running batch. Set `by_batch` where batches shrink a lot."""
    autopilot: AutopilotConfig = field(default_factory=AutopilotConfig)
    """Switch that stops drafting where it loses."""
    aux_hidden_state_layer_ids: tuple[NonNegativeInt, ...] = ()
    """Three layers of the policy whose outputs an EAGLE-3 draft reads; id i is the residual stream after i layers."""
    model: str | None = None
    """Hub id or path of a pretrained draft; null trains one. Set with `init: from_hub` or `method: draft_model`."""
    scratch: DraftScratchConfig = field(default_factory=DraftScratchConfig)
    """Sizes of the model that `method: draft_model` trains where `model` is null."""
    prompt_lookup_min: PositiveInt = 2
    """Shortest match of `method: ngram`, in tokens. Set it to tune n-gram drafts."""
    prompt_lookup_max: PositiveInt = 5
    """Longest match of `method: ngram`, in tokens. Set it to tune n-gram drafts."""
    suffix_max_tree_depth: PositiveInt = 24
    """Longest match and draft of `method: suffix` together, in tokens. Set it to tune suffix drafts."""
    suffix_max_cached_requests: NonNegativeInt = 10_000
    """Responses that an engine remembers for `method: suffix`; 0 reads the sequence alone. Set it to bound memory."""
    suffix_max_spec_factor: PositiveFloat = 1.0
    """Tokens that `method: suffix` drafts for each token matched. Set it to tune suffix drafts."""
    suffix_min_token_prob: Probability = 0.1
    """Least frequency of a token that `method: suffix` drafts, by counts. Set it to tune suffix drafts."""
    num_prompts: PositiveInt = 1024
    """Prompts that the policy answers for the draft's pretraining."""
    samples_per_prompt: PositiveInt = 1
    """Responses to each of these prompts. Set it where prompts are few."""
    num_heldout_prompts: PositiveInt = 64
    """Prompts kept out of pretraining, on which its acceptance length is measured."""
    num_steps: NonNegativeInt = 300
    """Updates of the draft's pretraining; 0 takes the draft of `init: from_hub` as it is."""
    vocab_size: Annotated[PositiveInt, Fix("null keeps the whole vocabulary")] | None = None
    """Tokens that the draft knows, the policy's most frequent ones; null keeps all. Set it for large vocabularies."""
    tokens_per_step: PositiveInt = 2048
    """Tokens of an update of the draft's pretraining."""
    states_cache_gib: NonNegativeFloat = 4.0
    """Memory for the policy's hidden states, in GiB; beyond it each step computes them anew. Set it by host memory."""
    tokens_per_row: PositiveInt = 512
    """Tokens of a row of packed chats; the activations of one row are held at once."""
    ttt_steps: PositiveInt = 4
    """Draft tokens that training unrolls after every position. Set it near the k that tuning finds."""
    ttt_step_loss_decay: Rate = 1.0
    """Factor by which each further draft token counts less in the loss. Set it to favour short drafts."""
    loss: Loss = "kl_div"
    """Distance of draft and policy that training lowers. Set by ablations, to compare losses."""
    loss_chunk_tokens: PositiveInt = 1024
    """Tokens whose logits over the vocabulary are held at once. Set it lower where memory is short."""
    online: DraftOnline = DraftOnline.OFF
    """Training of the draft beside the policy: never, in every step, or when it is stale. Set by bake-offs."""
    online_optimizer: OptimizerMethod = OptimizerMethod.ADAMW
    """Optimizer of `online` training. Set `muon` for an EAGLE-3 draft that must learn from fewer tokens."""
    online_learning_rate: Rate = 1e-3
    """Learning rate of `online` training, without a schedule. Set it with `online`."""
    online_updates: PositiveInt = 1
    """Updates of the draft beside each update of the policy. Set it where the draft falls behind."""
    online_tokens_per_update: Annotated[PositiveInt, Fix("null takes draft.tokens_per_step")] | None = None
    """Most tokens of an `online` update; null takes `tokens_per_step`. Set it to bound the cost of a step."""
    online_ttt_steps: Annotated[PositiveInt, Fix("null takes draft.ttt_steps")] | None = None
    """Draft tokens that `online` training unrolls; null takes `ttt_steps`. Set it to bound the cost of a step."""
    online_horizon_steps: PositiveInt = 8
    """Steps for which `when_stale` expects a trained draft to keep its gain. Set it by how fast the policy moves."""
    learning_rate: Rate = 1e-3
    """Highest learning rate of the draft's pretraining, reached after warm-up; a cosine lowers it to a tenth."""
    warmup_steps: NonNegativeInt = 20
    """Updates over which the learning rate rises."""
    clip_grad: PositiveFloat = 1.0
    """Largest norm of the draft's gradient. Set it where its loss spikes."""
    checkpoint_every_steps: PositiveInt = 100
    """Updates between checkpoints of the draft's pretraining. Set it by how much work a crash may cost."""
    seed: Seed = 0
    """Seed of the draft's weights and batches. Set by ablations, for another draft."""

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
        self._require(list(ids) == sorted(ids), "aux_hidden_state_layer_ids", "must rise")

    def _check_length(self) -> None:
        fix = "it drafts as far as its matches reach, and vLLM cannot tell it to stop earlier"
        varies = not TRAITS[self.method].has_one_length
        is_fixed = self.length is DraftLengthRule.FIXED
        self._require(varies or is_fixed, "length", f"must be fixed with {self.method.value}", fix)
        is_off = not self.autopilot.enabled
        require(varies or is_off, "draft.autopilot.enabled", f"must be false with {self.method.value}", True, fix)
