"""Train the draft on the policy's own responses, or take it as it is."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from slipstream.config import require
from slipstream.data.prompts import read_prompt_sets
from slipstream.drafts import pretrain
from slipstream.drafts.config import DraftConfig, DraftInit
from slipstream.drafts.learner_draft import Chats
from slipstream.drafts.methods import TRAITS, DraftMethod, Training, require_package
from slipstream.drafts.pretrain import DraftProgress
from slipstream.learner.architecture import Architecture
from slipstream.logs import progress
from slipstream.recipe import Recipe
from slipstream.records.files import write_record
from slipstream.records.stages import DraftRecord
from slipstream.stages.context import RunContext
from slipstream.stages.runs import tracked
from slipstream.stages.store import data_identity, draft_key, kept, policy_identity, publish
from slipstream.stages.support import draft_init, settled
from slipstream.types import Prompt, TrainBatch
from slipstream.workers.engines import start_engine
from slipstream.workers.learners import RemoteLearner, start_learner
from slipstream.workers.session import connect

logger = logging.getLogger(__name__)

_NODE = "pretrain_draft"
_GIVEN, _CHECKPOINT, _DRAFT = "given", "checkpoint", "draft"  # _GIVEN: the draft that training starts from

OnStep = Callable[[int, float], None]
"""Function that is told the loss of each step."""


def pretrain_draft(context: RunContext, recipe: Recipe, *, policy: Path, data: Path) -> Path:
    """Train the draft; return a directory with draft.json and, if the draft has weights, `draft/` as vLLM loads it."""
    recipe = settled(context, recipe)
    if recipe.draft.trains is Training.NONE:  # only links to existing files, or nothing
        return _take(context, recipe, policy)
    key = draft_key(recipe, policy=policy_identity(policy), data=data_identity(data))
    if done := kept(context, recipe, _NODE, key):
        return done
    directory = context.directory(_NODE)
    sets = read_prompt_sets(data)
    prompts = sets.draft_in_domain if recipe.draft.init is not DraftInit.GENERAL else sets.draft_general
    connect()
    with tracked(context, recipe, _NODE, {"draft.init": recipe.draft.init.value}) as tracker:
        record = train_on(
            prompts,
            recipe,
            policy=policy,
            directory=directory,
            on_step=lambda step, loss: tracker.log({"draft/loss": loss}, step),
        )
        write_record(record, directory / "draft.json")
        assert record.heldout_mean_acceptance_length is not None, "what was trained is measured"
        tracker.log({"draft/heldout_acceptance_length": record.heldout_mean_acceptance_length})
        tracker.log({f"draft/heldout_rate_pos_{i + 1}": r for i, r in enumerate(record.heldout_rate_by_position)})
    found = record.heldout_mean_acceptance_length, recipe.draft.pretrain.ttt_steps, record.elapsed_s
    logger.info("pretrain_draft: held-out acceptance length %.2f at k=%d, %.0f s", *found)
    for name in (_CHECKPOINT, _GIVEN):  # as large as the draft, and of no more use
        shutil.rmtree(directory / name, ignore_errors=True)
    return publish(context, _NODE, key)


def _take(context: RunContext, recipe: Recipe, policy: Path) -> Path:
    """Record a draft that is not trained, and link its weights if it has any."""
    start, config = time.perf_counter(), recipe.draft
    directory, num = context.directory(_NODE), 0
    with tracked(context, recipe, _NODE, {"draft.init": draft_init(config)}):
        require_package(config.method)
        if TRAITS[config.method].has_weights:
            num = _take_weights(config, policy, directory / _DRAFT, max_model_len=recipe.engine.max_model_len)
        record = DraftRecord(
            method=config.method.value,
            init=draft_init(config),
            num_parameters=num,
            elapsed_s=time.perf_counter() - start,
        )
        write_record(record, directory / "draft.json")
    logger.info("pretrain_draft: %s is not trained%s", config.method.value, f": {config.model}" if config.model else "")
    return directory


def _take_weights(config: DraftConfig, policy: Path, directory: Path, *, max_model_len: int) -> int:
    """Link or convert weights that are used as they are; return the number of parameters."""
    if config.method is DraftMethod.DRAFT_MODEL:
        return pretrain.link_draft_model(config, policy, directory, max_model_len=max_model_len)
    from slipstream.drafts.eagle3 import bring_draft

    bring_draft(config, policy, directory, max_model_len=max_model_len)
    return pretrain.num_parameters(directory)


def train_on(
    prompts: Sequence[Prompt], recipe: Recipe, *, policy: Path, directory: Path, on_step: OnStep
) -> DraftRecord:
    """Sample responses to `prompts`, train a draft on them into `directory/draft`, and measure its held-out acceptance.

    Raises:
        ConfigError: fewer prompts than `num_prompts` + `num_heldout_prompts` of `draft.pretrain`; a given draft that
            does not fit; a `vocab_size` of the draft that leaves no token out; or held-out responses that are too short
            for `ttt_steps`.
    """
    config = recipe.draft
    start = time.perf_counter()
    if config.is_given:  # whatever training starts from is checked before an engine starts
        from slipstream.drafts.eagle3 import bring_draft

        bring_draft(config, policy, directory / _GIVEN, max_model_len=recipe.engine.max_model_len)
        logger.info("pretrain_draft: training starts from %s", config.model)
    if (num := _num_known(config)) is not None:
        field = f"draft.{config.method.value}.vocab_size"
        pretrain.require_cut(num, Architecture.from_hf(policy).vocab_size, field=field)
    responses = _responses(prompts, recipe, policy, directory / "responses.json")
    num_heldout = config.pretrain.num_heldout_prompts * config.pretrain.samples_per_prompt
    train = responses.select(range(num_heldout, len(responses.token_ids)))
    heldout = responses.select(range(num_heldout))
    pretrain.require_windows(heldout, num_tokens=config.pretrain.ttt_steps)
    teach = _teach_states if config.trains is Training.HIDDEN_STATES else _teach_responses
    done = len(pretrain.completed_losses(directory / _CHECKPOINT))
    with (
        start_learner(recipe.learner, layout=recipe.layout) as learner,
        progress(_NODE, total=config.pretrain.num_steps, unit="step", done=done) as bar,
    ):

        def on_each_step(step: int, loss: float) -> None:
            on_step(step, loss)
            bar.advance(text=f"loss {loss:.3f}")

        num, losses, found = teach(
            learner, recipe, policy, train=train, heldout=heldout, into=directory, log=on_each_step
        )
    return DraftRecord(
        method=config.method.value,
        init=config.init.value,
        num_parameters=num,
        num_training_tokens=sum(map(len, train.token_ids)),
        num_steps=config.pretrain.num_steps,
        losses=tuple(losses),
        heldout_rate_by_position=found.rate_by_position,
        heldout_mean_acceptance_length=found.mean_acceptance_length,
        elapsed_s=time.perf_counter() - start,
    )


def _responses(prompts: Sequence[Prompt], recipe: Recipe, policy: Path, path: Path) -> Chats:
    """Sample the policy's responses to the draft prompts, held-out ones first; a resumed attempt reads `path`."""
    if path.is_file():
        return pretrain.read_responses(path)
    config = recipe.draft.pretrain
    needed = config.num_prompts + config.num_heldout_prompts
    fields, fix = "draft.pretrain.num_prompts + num_heldout_prompts", "lower them or give data.draft_* more rows"
    require(len(prompts) >= needed, fields, f"must be <= {len(prompts)}", needed, fix)
    longest = recipe.sampling.max_response_tokens
    sizes = f"{needed} prompts, {config.samples_per_prompt} times each and up to {longest} tokens long"
    logger.info("pretrain_draft: the policy samples %s, in one call", sizes)
    asked = prompts[:needed]
    with start_engine(policy, config=recipe.engine, layout=recipe.layout) as engine:
        responses, generation_s = pretrain.regenerate(engine, asked, config=recipe.draft, sampling=recipe.sampling)
    logger.info("pretrain_draft: the policy sampled %d responses in %.0f s", len(responses.token_ids), generation_s)
    pretrain.write_responses(responses, path)
    return responses


def _teach_states(
    learner: RemoteLearner,
    recipe: Recipe,
    policy: Path,
    *,
    train: Chats,
    heldout: Chats,
    into: Path,
    log: OnStep,
) -> tuple[int, list[float], DraftProgress]:
    """Train a one-layer draft on the policy's hidden states; return parameters, losses and held-out acceptance."""
    config, temperature = recipe.draft, recipe.sampling.temperature
    logger.info("pretrain_draft: training on %d responses, after their hidden states", len(train.token_ids))
    learner.load(policy, None)
    given = into / _GIVEN if config.is_given else None
    num = learner.start_draft(policy, config, given, known_tokens(config, train, policy))
    losses = pretrain.train_draft(
        train,
        config,
        update=lambda _, indices: learner.draft_step(indices, temperature),
        save=learner.save_draft_checkpoint,
        load=learner.load_draft_checkpoint,
        hold=lambda: learner.hold_draft_chats(train.token_ids, train.prompt_lengths, config),
        checkpoint=into / _CHECKPOINT,
        on_step=log,
    )
    found = learner.evaluate_draft(heldout.token_ids, heldout.prompt_lengths, temperature)
    learner.save_draft(into / _DRAFT)
    return num, losses, found


def _teach_responses(
    learner: RemoteLearner,
    recipe: Recipe,
    policy: Path,
    *,
    train: Chats,
    heldout: Chats,
    into: Path,
    log: OnStep,
) -> tuple[int, list[float], DraftProgress]:
    """Train a small language model on the policy's responses; return the same as `_teach_states`."""
    config, temperature = recipe.draft, recipe.sampling.temperature
    logger.info("pretrain_draft: training a small model on %d responses", len(train.token_ids))
    lengths = [len(tokens) - start for tokens, start in zip(heldout.token_ids, heldout.prompt_lengths, strict=True)]
    judged = TrainBatch(  # only its logprobs are computed; nothing is trained on it
        token_ids=heldout.token_ids,
        prompt_lengths=heldout.prompt_lengths,
        rollout_logprobs=[[0.0] * length for length in lengths],
        advantages=[0.0] * len(lengths),
        policy_version=0,
    )
    learner.load(policy, None)
    of_policy = learner.logprobs(judged, temperature)
    scratch, vocab_size, eos = pretrain.scratch_model(config, policy)
    num = learner.create(scratch, vocab_size, eos, scratch.optimizer)

    def save(path: Path) -> None:
        learner.save_checkpoint(path, {})
        learner.finish_checkpoint()

    losses = pretrain.train_draft(
        train,
        config,
        update=pretrain.response_update(learner.lm_step, train, scratch),
        save=save,
        load=learner.load_checkpoint,
        checkpoint=into / _CHECKPOINT,
        on_step=log,
    )
    of_draft = learner.logprobs(judged, temperature)
    learner.save_hf(into / _DRAFT, policy)
    return num, losses, pretrain.heldout_acceptance(of_policy, of_draft, num_tokens=config.pretrain.ttt_steps)


def known_tokens(config: DraftConfig, train: Chats, policy: Path) -> tuple[int, ...] | None:
    """Tokens of a draft with a reduced vocabulary; None for all tokens."""
    num = _num_known(config)
    if num is None:
        return None
    answers = [tokens[start:] for tokens, start in zip(train.token_ids, train.prompt_lengths, strict=True)]
    vocab_size = Architecture.from_hf(policy).vocab_size
    token_ids, share = pretrain.frequent_tokens(answers, num=num, vocab_size=vocab_size)
    shares = len(token_ids), vocab_size, 100 * share
    logger.info("pretrain_draft: %d of %d tokens make up %.2f %% of the responses", *shares)
    return token_ids


def _num_known(config: DraftConfig) -> int | None:
    """Tokens of a draft whose vocabulary can be reduced; None for all tokens."""
    return config.reader.vocab_size if config.reads("eagle3") or config.reads("dflash") else None
