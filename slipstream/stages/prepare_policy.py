"""Resolve the policy, or train the recipe's own from random weights."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.data.chat import render
from slipstream.data.synthetic import pretraining_corpus
from slipstream.learner.architecture import MIMO, QWEN3, Architecture
from slipstream.learner.config import SCRATCH
from slipstream.learner.policy_source import pretrain, resolve, write_positions
from slipstream.logs import progress
from slipstream.recipe import Recipe
from slipstream.records.files import write_record
from slipstream.records.stages import PolicyRecord
from slipstream.stages.context import RunContext
from slipstream.stages.runs import tracked
from slipstream.stages.store import data_identity, kept, policy_key, publish
from slipstream.stages.support import policy_needs, settled, tokenizer
from slipstream.train.arm import LogMetrics
from slipstream.workers.learners import start_learner
from slipstream.workers.session import connect

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

POLICY_RECORDS = ("policy.json", "*config.json", "tokenizer*", "*.jinja")
"""Patterns of a policy's files beside its weights."""

_NODE = "prepare_policy"


def prepare_policy(context: RunContext, recipe: Recipe, *, data: Path) -> Path:
    """Resolve and check the policy, or train the recipe's own with the data's tokenizer; return its directory."""
    recipe = settled(context, recipe)
    key = None  # of a policy that is trained: links to existing files are not worth storing
    if recipe.policy.scratch is not None:
        key = policy_key(recipe, data=data_identity(data))
        if done := kept(context, recipe, _NODE, key):
            return done / "policy"
    directory = context.directory(_NODE) / "policy"
    with tracked(context, recipe, _NODE) as tracker:
        if key is None:
            record = resolve(recipe.policy, policy_needs(recipe), directory)
        else:
            record = train_from_scratch(recipe, directory, tokenizer_dir=data / "tokenizer", log=tracker.log)
        write_record(record, directory / "policy.json")
        tracker.log_params({"num_parameters": record.num_parameters, "model": record.model})
        tracker.log({"time/prepare_policy_s": record.elapsed_s})
    made = record.architecture, record.num_parameters / 1e6, record.elapsed_s
    logger.info("prepare_policy: %s, %.1f M parameters, %.0f s", *made)
    return directory if key is None else publish(context, _NODE, key) / "policy"


def train_from_scratch(recipe: Recipe, directory: Path, *, tokenizer_dir: Path, log: LogMetrics) -> PolicyRecord:
    """Train the recipe's own policy on its synthetic corpus; write it in HF format, with its tokenizer."""
    scratch = recipe.policy.scratch
    assert scratch is not None, "the recipe's own policy has an architecture"
    start = time.perf_counter()
    words = tokenizer(tokenizer_dir)
    assert isinstance(words.eos_token_id, int)
    steps = f"{scratch.num_steps} steps of {scratch.tokens_per_step} tokens"
    logger.info("prepare_policy: training takes %s; the learner's processes start first", steps)
    connect()
    with (
        start_learner(recipe.learner, layout=recipe.layout) as learner,
        progress(_NODE, total=scratch.num_steps, unit="step") as bar,
    ):

        def on_step(step: int, loss: float) -> None:
            log({"pretrain/loss": loss}, step)
            if scratch.num_mtp_layers and (mtp_loss := learner.mtp_loss()) is not None:
                log({"pretrain/mtp_loss": mtp_loss}, step)
            bar.advance(text=f"loss {loss:.3f}")

        num_parameters = learner.create(scratch, len(words), words.eos_token_id, scratch.optimizer)
        losses = pretrain(learner.lm_step, documents(recipe, words), scratch, on_step)
        learner.save_hf(directory, tokenizer_dir)
    if recipe.policy.rope is not None:
        write_positions(Architecture.from_hf(directory).extended(recipe.policy.rope), directory)
    return PolicyRecord(
        model=SCRATCH,
        architecture=(MIMO if scratch.num_mtp_layers else QWEN3).name,
        num_parameters=num_parameters,
        vocab_size=len(words),
        max_position_embeddings=recipe.policy.scratch_positions,
        eos_token_id=words.eos_token_id,
        pretrain_steps=scratch.num_steps,
        pretrain_loss=losses[-1] if losses else 0.0,
        pretrain_losses=tuple(losses),
        elapsed_s=time.perf_counter() - start,
    )


def documents(recipe: Recipe, words: PreTrainedTokenizerBase) -> Iterator[tuple[list[int], int]]:
    """Chats of the synthetic corpus as token ids, with the length of the prompt, which is not learned."""
    corpus = pretraining_corpus(recipe.data.synthetic, workload=recipe.workload, seed=recipe.data.seed)
    for example in corpus:
        prompt = list(render(example.problem, config=recipe.data, tokenizer=words))
        response = words.encode(example.response, add_special_tokens=False)
        assert isinstance(words.eos_token_id, int)
        yield [*prompt, *response, words.eos_token_id], len(prompt)
