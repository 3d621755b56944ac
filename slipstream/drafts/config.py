"""Which draft proposes tokens, and how it is trained."""

from __future__ import annotations

import math
from dataclasses import field
from enum import StrEnum
from typing import Annotated, Literal

from slipstream.config import (
    Checked,
    Defaults,
    Fix,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Rate,
    Seed,
    Switch,
    section,
)
from slipstream.drafts.methods import TRAITS, DraftMethod, DraftSampling, Training, Verification
from slipstream.grpo.config import OptimizerConfig, OptimizerMethod
from slipstream.learner.config import ShapeConfig


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
"""Inits that need no `draft.model`."""


Loss = Literal["kl_div", "tv", "lk", "lk_hybrid"]
"""Losses of an EAGLE-3 draft, which `drafts/trainer.py` defines."""


class DraftLengthRule(StrEnum):
    """Draft length of the speculative arm: the tuned k for all rollouts, or one k for each running batch.

    With `by_batch` a rollout's draws depend on how many others run beside it; its distribution never does.
    """

    FIXED = "fixed"
    BY_BATCH = "by_batch"


class PretrainConfig(Checked, path="draft.pretrain"):
    """Pretraining of a draft on the policy's own responses."""

    num_prompts: PositiveInt = 1024
    """Prompts that the policy answers for the draft's pretraining."""
    samples_per_prompt: PositiveInt = 1
    """Responses to each of these prompts. Set it where prompts are few."""
    num_heldout_prompts: PositiveInt = 64
    """Prompts kept out of pretraining, on which its acceptance length is measured."""
    num_steps: NonNegativeInt = 300
    """Updates of the draft; 0 takes the draft of `init: from_hub` as it is."""
    tokens_per_step: PositiveInt = 2048
    """Tokens of an update."""
    ttt_steps: PositiveInt = 4
    """Draft tokens that training unrolls after every position, or a DFlash draft's block without its first token. Set
    it near the k that tuning finds."""
    ttt_step_loss_decay: Rate = 1.0
    """Factor by which each further draft token counts less in the loss. Set it to favour short drafts."""
    optimizer: Annotated[OptimizerConfig, Defaults(learning_rate=1e-3, warmup_steps=20)] = section()
    """Optimizer of an EAGLE-3 or MTP draft, which has its own; other methods have one in their section."""
    states_cache_gib: NonNegativeFloat = 4.0
    """Memory for the policy's hidden states, in GiB; beyond it each step computes them anew. Set it by host memory."""
    checkpoint_every_steps: PositiveInt = 100
    """Updates between checkpoints. Set it by how much work a crash may cost."""

    def learning_rate_at(self, step: int) -> float:
        """Linear warmup, then a cosine down to a tenth."""
        highest, warmup = self.optimizer.learning_rate, self.optimizer.warmup_steps
        if step < warmup:
            return highest * (step + 1) / warmup
        done = min((step - warmup) / max(self.num_steps - warmup, 1), 1.0)
        return highest * (0.1 + 0.9 * 0.5 * (1.0 + math.cos(math.pi * done)))


class Eagle3Config(Checked, path="draft.eagle3"):
    """Layer of `method: eagle3` on the policy's hidden states, and its loss."""

    aux_hidden_state_layer_ids: tuple[NonNegativeInt, ...] | None = None
    """Three layers of the policy that the draft reads, 0 for its embeddings; null takes vLLM's default, or those of a
    pretrained draft. Set by studies."""
    vocab_size: Annotated[PositiveInt, Fix("null keeps the whole vocabulary")] | None = None
    """Tokens that the draft knows, the policy's most frequent ones; null keeps all. Set it for large vocabularies."""
    fc_norm: Switch = False
    """RMSNorm of each of these layers' states before they are joined, for drafts made here. Set it with `norm_output`
    for EAGLE-3.1."""
    norm_output: Switch = False
    """Output norm of the states that the draft's next pass reads, for drafts made here. Set it with `fc_norm`."""
    loss: Loss = "kl_div"
    """Distance of draft and policy that training lowers. Set by ablations, to compare losses."""
    loss_chunk_tokens: PositiveInt = 1024
    """Tokens whose logits over the vocabulary are held at once. Set it lower where memory is short."""
    tokens_per_row: PositiveInt = 512
    """Tokens of a row of packed chats; the activations of one row are held at once."""

    def _check(self) -> None:
        if (ids := self.aux_hidden_state_layer_ids) is not None:
            rule, fix = "must be three different layers", "duplicates make vLLM fail with a shape error"
            self._require(len(ids) == len(set(ids)) == 3, "aux_hidden_state_layer_ids", rule, fix)
            self._require(list(ids) == sorted(ids), "aux_hidden_state_layer_ids", "must rise")


class DFlashConfig(Checked, path="draft.dflash"):
    """Layers of `method: dflash` on the policy's hidden states, which propose a block of tokens in one pass.

    A block is `draft.pretrain.ttt_steps` tokens long. The layers see the block in both directions, and the loss is the
    divergence from the policy.
    """

    num_layers: PositiveInt = 2
    """Layers of the draft. Set it to trade time for acceptance."""
    vocab_size: Annotated[PositiveInt, Fix("null keeps the whole vocabulary")] | None = None
    """Tokens that the draft knows, the policy's most frequent ones; null keeps all. Set it for large vocabularies."""
    loss_chunk_tokens: PositiveInt = 1024
    """Tokens whose logits over the vocabulary are held at once. Set it lower where memory is short."""
    tokens_per_row: PositiveInt = 512
    """Tokens of a row of packed chats; the activations of a block after each of them are held at once."""
    optimizer: Annotated[OptimizerConfig, Defaults(method="muon", learning_rate=1e-3, warmup_steps=20)] = section()
    """Optimizer of its pretraining."""

    @property
    def loss(self) -> Loss:
        """Loss of its pretraining."""
        return "kl_div"


class DraftModelConfig(Checked, path="draft.draft_model"):
    """A small Qwen3 with random weights that `method: draft_model` trains where `draft.model` is null.

    Vocabulary and positions are the policy's. Shallow by default: it computes all its layers for each token.
    """

    shape: Annotated[
        ShapeConfig,
        Defaults(
            hidden_size=64, num_layers=2, num_attention_heads=2, num_query_groups=1, ffn_hidden_size=192, init_std=0.05
        ),
    ] = section()
    """Sizes of the model."""
    optimizer: Annotated[OptimizerConfig, Defaults(method="muon", learning_rate=1e-3, warmup_steps=20)] = section()
    """Optimizer of its pretraining; a learner in parallel needs `adamw`."""


class NgramConfig(Checked, path="draft.ngram"):
    """Lookup of `method: ngram` in the same sequence."""

    prompt_lookup_min: PositiveInt = 2
    """Shortest match, in tokens. Set it to tune n-gram drafts."""
    prompt_lookup_max: PositiveInt = 5
    """Longest match, in tokens. Set it to tune n-gram drafts."""

    def _check(self) -> None:
        rule = f"must be >= prompt_lookup_min {self.prompt_lookup_min}"
        self._require(self.prompt_lookup_max >= self.prompt_lookup_min, "prompt_lookup_max", rule)


class SuffixConfig(Checked, path="draft.suffix"):
    """Lookup of `method: suffix` in all responses of an engine."""

    max_tree_depth: PositiveInt = 24
    """Longest match and draft together, in tokens. Set it to tune suffix drafts."""
    max_cached_requests: NonNegativeInt = 10_000
    """Responses that an engine remembers; 0 reads the sequence alone. Set it to bound memory."""
    max_spec_factor: PositiveFloat = 1.0
    """Tokens that are drafted for each token matched. Set it to tune suffix drafts."""
    min_token_prob: Probability = 0.1
    """Least frequency of a token that is drafted, by counts. Set it to tune suffix drafts."""


class HistoryConfig(Checked, path="draft.history"):
    """Lookup of `method: history` in an engine's responses to the same prompt."""

    match_min: PositiveInt = 2
    """Shortest match, in tokens. Set it to tune history drafts."""
    match_max: PositiveInt = 16
    """Longest match, in tokens. Set it to tune history drafts."""
    max_tokens: PositiveInt = 10_000_000
    """Tokens of responses that an engine keeps, at 4 bytes; prompts unused for longest go first. Set it by memory."""

    def _check(self) -> None:
        self._require(self.match_max >= self.match_min, "match_max", f"must be >= match_min {self.match_min}")


class OnlineConfig(Checked, path="draft.online"):
    """Training of the draft beside the policy, on rollouts in a random order; its learning rate has no decay."""

    when: DraftOnline = DraftOnline.OFF
    """Steps of RL that train the draft: none, every one, or those in which it is stale. Set by bake-offs."""
    optimizer: Annotated[OptimizerConfig, Defaults(learning_rate=1e-3, warmup_steps=5)] = section()
    """Optimizer of this training; `muon` lets an EAGLE-3 draft learn from fewer tokens. Adam's first updates move every
    weight by almost the whole learning rate, which harms a good draft: hence a warm-up."""
    updates: PositiveInt = 1
    """Updates of the draft beside each update of the policy. Set it where the draft falls behind."""
    tokens_per_update: Annotated[PositiveInt, Fix("null takes draft.pretrain.tokens_per_step")] | None = None
    """Most tokens of an update; null takes `draft.pretrain.tokens_per_step`. Set it to bound the cost of a step."""
    ttt_steps: Annotated[PositiveInt, Fix("null takes draft.pretrain.ttt_steps")] | None = None
    """Draft tokens that are unrolled; null takes `draft.pretrain.ttt_steps`. Set it to bound the cost of a step."""
    horizon_steps: PositiveInt = 8
    """Steps for which `when_stale` expects a trained draft to keep its gain. Set it by how fast the policy moves."""


class DraftConfig(Checked, path="draft"):
    """Drafts and their training; `methods.TRAITS` says which sections a method reads."""

    method: DraftMethod = DraftMethod.EAGLE3
    """Method that proposes tokens. Set by bake-offs and by whoever compares drafters."""
    init: DraftInit = DraftInit.IN_DOMAIN
    """Prompts that the draft is pretrained on, or `from_hub` for a pretrained draft. Set by ablations."""
    model: str | None = None
    """Hub id or path of a pretrained draft; null trains one. Set with `init: from_hub` or `method: draft_model`."""
    length: DraftLengthRule = DraftLengthRule.FIXED
    """One tuned k for all batches, or one k for each running batch. Set `by_batch` where batches shrink a lot."""
    autopilot: Switch = False
    """Drafting stops while its steps cost more than steps without it. Set it where acceptance may collapse in a run."""
    sampling: DraftSampling = DraftSampling.PROBABILISTIC
    """Sampled drafts, the draft's likeliest tokens, or the faster of both. Set `auto` where a longer tuning pays."""
    verification: Verification = Verification.TOKEN
    """Test of each draft token, or of whole drafts, which accepts more of them. Set `block` where a draft has weights
    and a CPU or vLLM's second model runner samples."""
    seed: Seed = 0
    """Seed of the draft's weights and batches. Set by ablations, for another draft."""
    pretrain: PretrainConfig = field(default_factory=PretrainConfig)
    """Pretraining of a draft that is trained."""
    eagle3: Eagle3Config = field(default_factory=Eagle3Config)
    """Settings of `method: eagle3`."""
    dflash: DFlashConfig = field(default_factory=DFlashConfig)
    """Settings of `method: dflash`."""
    draft_model: DraftModelConfig = field(default_factory=DraftModelConfig)
    """Settings of `method: draft_model`."""
    ngram: NgramConfig = field(default_factory=NgramConfig)
    """Settings of `method: ngram`."""
    suffix: SuffixConfig = field(default_factory=SuffixConfig)
    """Settings of `method: suffix`."""
    history: HistoryConfig = field(default_factory=HistoryConfig)
    """Settings of `method: history`."""
    online: OnlineConfig = field(default_factory=OnlineConfig)
    """Training beside the policy."""

    def _check(self) -> None:
        self._check_length()
        self._check_given()
        self._check_online()
        self._check_sampling()

    @property
    def is_given(self) -> bool:
        """True if training, where there is any, begins with a draft that somebody else has trained."""
        return self.init is DraftInit.FROM_HUB

    @property
    def trains(self) -> Training:
        """From what the draft is pretrained: a whole model that is given is not, nor is what gets no steps."""
        is_model = self.method is DraftMethod.DRAFT_MODEL and self.model is not None
        return Training.NONE if is_model or self.pretrain.num_steps == 0 else TRAITS[self.method].training

    @property
    def reader(self) -> Eagle3Config | DFlashConfig:
        """Settings of the draft with layers of its own on the policy's hidden states."""
        return self.dflash if self.method is DraftMethod.DFLASH else self.eagle3

    @property
    def online_passes(self) -> int:
        """Number of tokens drafted after every position where the draft learns beside the policy."""
        return self.online.ttt_steps or self.pretrain.ttt_steps

    @property
    def online_tokens(self) -> int:
        """Largest number of tokens of an update beside the policy's."""
        return self.online.tokens_per_update or self.pretrain.tokens_per_step

    def reads(self, name: str) -> bool:
        """Return True if the method reads this field or section."""
        return name in TRAITS[self.method].fields

    def _check_sampling(self) -> None:
        is_default, is_token = self.sampling is DraftSampling.PROBABILISTIC, self.verification is Verification.TOKEN
        if not TRAITS[self.method].has_weights:
            rule = f"must be left out with draft.method {self.method.value}"
            self._require(is_default, "sampling", rule, "its drafts are looked up, not sampled")
            rule = f"must be token with draft.method {self.method.value}"
            self._require(is_token, "verification", rule, "its drafts have no probabilities")
        rule, fix = f"must be token with draft.sampling {self.sampling.value}", "blocks accept no more of greedy drafts"
        self._require(is_token or is_default, "verification", rule, fix)

    def _check_online(self) -> None:
        is_off = self.online.when is DraftOnline.OFF
        if not TRAITS[self.method].trains_online:
            rule = f"must be off with draft.method {self.method.value}"
            self._require(is_off, "online.when", rule, "nothing of it is trained during RL")
        if self.method is DraftMethod.MTP:
            rule, fix = "must be adamw with draft.method mtp", "Muon is for the layer of an EAGLE-3 draft"
            for name in ("pretrain",) if is_off else ("online", "pretrain"):
                is_adamw = getattr(self, name).optimizer.method is OptimizerMethod.ADAMW
                self._require(is_adamw, f"{name}.optimizer.method", rule, fix)

    def _check_given(self) -> None:
        if self.method is DraftMethod.EAGLE3:
            rule = f"must be given exactly when draft.init is {DraftInit.FROM_HUB.value}"
            self._require((self.model is not None) == self.is_given, "model", rule)
        else:
            rule = f"must be another one with draft.method {self.method.value}"
            self._require(not self.is_given, "init", rule, "only an EAGLE-3 draft is trained from there on")
            rule, fix = f"must be null with draft.method {self.method.value}", "eagle3 and draft_model alone read one"
            self._require(self.model is None or self.reads("model"), "model", rule, fix)
        if self.is_given:
            rule = f"must be null with draft.init {self.init.value}"
            self._require(self.eagle3.vocab_size is None, "eagle3.vocab_size", rule, "a draft brings its own")
        else:
            self._require(self.pretrain.num_steps > 0, "pretrain.num_steps", "must be > 0")

    def _check_length(self) -> None:
        if TRAITS[self.method].has_one_length:
            fix = "it drafts as far as its matches reach, and vLLM cannot tell it to stop earlier"
            is_fixed = self.length is DraftLengthRule.FIXED
            self._require(is_fixed, "length", f"must be fixed with {self.method.value}", fix)
            self._require(not self.autopilot, "autopilot", f"must be false with {self.method.value}", fix)
