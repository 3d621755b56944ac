"""Start of the benchmark of a moving policy: a policy with a habit that RL unlearns, and a draft of that policy.

A finished run's policy can add, and answers half of its problems without showing work. A few training steps on answers
that rarely show work make nearly all answers like that, and keep the ability to add. The policy's answers then teach a
draft. RL rewards work, so the style of the answers moves away from the draft's training data.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.runs import FinishedRun
from slipstream.data.prompts import read_prompt_sets
from slipstream.drafts.pretrain import read_responses
from slipstream.learner.policy_source import pretrain
from slipstream.records.files import read_record, write_record
from slipstream.records.stages import DraftRecord
from slipstream.stages.prepare_policy import documents
from slipstream.stages.pretrain_draft import train_on
from slipstream.stages.support import decode, tokenizer
from slipstream.workers.learners import start_learner

_TOKENS_PER_STEP = 1024
_WORK = "="  # only a worked step has one


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Policy and draft that the arms start from; `draft` holds the draft's record beside the weights."""

    policy: Path
    draft: Path
    share_of_work: float | None = None  # fraction of the policy's answers that show work; None: not counted

    def described(self) -> str:
        """Describe draft and policy in one line."""
        record = read_record(DraftRecord, self.draft / "draft.json")
        text = f"start: held-out acceptance length of the draft {record.heldout_mean_acceptance_length or 0.0:.2f}"
        return text if self.share_of_work is None else f"{text}; {100 * self.share_of_work:.1f} % of answers with work"


@dataclass(frozen=True, kw_only=True, slots=True)
class Lessons:
    """Training that teaches the habit."""

    num_steps: int
    share_of_work: float  # fraction of the training answers that show work
    learning_rate: float


def start_with_habit(run: FinishedRun, directory: Path, lessons: Lessons) -> Start:
    """Train habit and draft, or load both from `directory` if they exist."""
    policy = directory / "policy"
    if not policy.is_dir():
        _teach(run, policy, lessons)
    if not (directory / "draft.json").is_file():
        prompts = read_prompt_sets(run.data).draft_in_domain
        recipe = replace(run.recipe, learner=replace(run.recipe.learner, num_kept_idle=0))
        record = train_on(prompts, recipe, policy=policy, directory=directory, on_step=lambda step, loss: None)
        write_record(record, directory / "draft.json")
    answers, words = read_responses(directory / "responses.json"), decode(tokenizer(policy))
    pairs = zip(answers.token_ids, answers.prompt_lengths, strict=True)
    with_work = [_WORK in words(tokens[:start], tokens[start:]) for tokens, start in pairs]
    return Start(policy=policy, draft=directory, share_of_work=sum(with_work) / len(with_work))


def _teach(run: FinishedRun, directory: Path, lessons: Lessons) -> None:
    """Continue pretraining of the run's policy on answers that rarely show work."""
    data, scratch = run.recipe.data, run.recipe.policy.scratch
    assert scratch is not None, "the run made its policy"
    hasty = replace(
        data, synthetic=replace(data.synthetic, careless_rate=1.0 - lessons.share_of_work), seed=data.seed + 1
    )
    short = replace(
        scratch,
        num_steps=lessons.num_steps,
        tokens_per_step=_TOKENS_PER_STEP,
        optimizer=replace(
            scratch.optimizer,
            learning_rate=lessons.learning_rate,
            warmup_steps=min(scratch.optimizer.warmup_steps, lessons.num_steps),
        ),
    )
    with start_learner(replace(run.recipe.learner, num_kept_idle=0)) as learner:
        learner.load(run.policy, short.optimizer)
        corpus = documents(replace(run.recipe, data=hasty), tokenizer(run.policy))
        pretrain(learner.lm_step, corpus, short)
        learner.save_hf(directory, run.policy)
