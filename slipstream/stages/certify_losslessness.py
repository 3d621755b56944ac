"""Certify a run: engines sample, the learner judges their tokens, and the verdict is written and tagged."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from slipstream.config import require
from slipstream.data.prompts import read_prompt_sets
from slipstream.drafts.length import DraftLength
from slipstream.grpo.config import KvCache
from slipstream.learner.config import Packing
from slipstream.logs import progress
from slipstream.losslessness.sampling import Sample, Subject, draw
from slipstream.losslessness.verdict import LOSSLESS, certify, judged
from slipstream.recipe import Recipe
from slipstream.records.files import read_record, write_record
from slipstream.records.stages import CertificateRecord
from slipstream.refit.config import WeightFiles
from slipstream.refit.fingerprint import directory_fingerprint
from slipstream.stages.context import RunContext
from slipstream.stages.recipe_engines import draft_length, fitting_weights, given_length, recipe_engine, sampled
from slipstream.stages.runs import end_execution, tracked
from slipstream.stages.store import finished
from slipstream.stages.support import settled, versions
from slipstream.types import Dtype, Prompt
from slipstream.workers.learners import start_learner
from slipstream.workers.session import connect

logger = logging.getLogger(__name__)

_NODE = "certify_losslessness"
_NO_DRAFT = DraftLength(num_speculative_tokens=0)
_TRAINED_DRAFT = 1
_START = 0  # version of the policy before RL
_STEPS_BETWEEN = 8  # fewest engine steps from one refit in flight to the next
_REFITS_PER_RESPONSE = 16  # most refits in the longest response: each recomputes the caches of everything that runs


class LosslessnessError(RuntimeError):
    """A run's certificate does not show that its speculation is lossless."""


def tuned_length(recipe: Recipe, tuning: Path) -> DraftLength:
    """Draft length to certify: the trained arm's, or the largest candidate where speculation lost."""
    length = draft_length(recipe, tuning)
    k = length.num_speculative_tokens
    return length if k else replace(length, num_speculative_tokens=max(recipe.tuning.candidate_ks))


def certify_losslessness(
    context: RunContext,
    recipe: Recipe,
    *,
    policy: Path,
    trained: Path,
    data: Path,
    draft: Path,
    length: DraftLength,
    trained_draft: Path | None = None,
) -> Path:
    """Certify speculation by `length` for the policy in `trained`; return a directory with certificate.json.

    The speculative engine starts with `policy` and `draft` and is refitted to `trained` and `trained_draft`, as in
    training, so that the certificate covers the refit. With `loop.mode: in_flight` it changes between the two every few
    steps while it samples, with recomputed caches, and each token is judged by the policy that sampled it.

    Args:
        trained_draft: draft that learned beside the policy; None: the draft stayed as it was.
    """
    if done := finished(context, _NODE, "certificate.json"):
        return done
    recipe = settled(context, recipe)
    directory = context.directory(_NODE)
    weights = fitting_weights(recipe, policy, draft)
    certified = trained_draft or weights
    prompts = read_prompt_sets(data).train
    started_s = time.perf_counter()
    connect()
    with tracked(context, recipe, _NODE, {"k": length.label}) as tracker:
        seed = recipe.losslessness.seed
        speculative = _drawn(recipe, policy, trained, weights, length, prompts, seed=seed, trained_draft=trained_draft)
        seed += recipe.losslessness.num_tokens + 1  # The two engines must not share their randomness.
        baseline = _drawn(recipe, trained, trained, None, _NO_DRAFT, prompts, seed=seed)
        subject = Subject(
            num_speculative_tokens=length.num_speculative_tokens,
            schedule=length.schedule,
            draft_sampling=length.sampling.value,
            policy_fingerprint=directory_fingerprint(trained),
            draft_fingerprint="" if certified is None else directory_fingerprint(certified),
            versions=versions(),
            kv_cache=recipe.loop.in_flight_kv_cache,
            quantization=recipe.engine.quantization,
        )
        record = _certificate(recipe, policy, trained, speculative, baseline, subject=subject, started_s=started_s)
        tracker.set_tags({"losslessness": record.verdict})
        tracker.log({"time/certify_s": record.elapsed_s, "losslessness/num_tokens": record.num_tokens})
        for power in record.detectable:
            tracker.log({f"losslessness/detectable_{power.alternative}": power.detectable_total_variation})
        tracker.log_artifact(write_record(record, directory / "certificate.json"))
    logger.info("certify_losslessness: %s: %s", record.verdict, record.reason)
    return directory


def _certificate(
    recipe: Recipe,
    start: Path,
    trained: Path,
    speculative: Sample,
    baseline: Sample,
    *,
    subject: Subject,
    started_s: float,
) -> CertificateRecord:
    """Judge both samples with the learner, each token by the policy that sampled it."""
    logger.info("%s: the learner is judging %d responses", _NODE, len(speculative.traces) + len(baseline.traces))
    sampling, config = recipe.sampling, recipe.losslessness
    weight_format = recipe.engine.weight_format
    packing = recipe.learner.packing if weight_format is None else Packing.ALWAYS  # layers that can round their inputs
    judge = replace(recipe.learner, dtype=Dtype.FLOAT32, packing=packing)
    with start_learner(judge, layout=recipe.layout) as learner:
        earlier = {}
        if subject.kv_cache is not None:
            learner.load(start, None, computed_as=weight_format)
            earlier[_START] = judged(speculative.traces, learner, sampling=sampling, seed=config.seed)
        learner.load(trained, None, computed_as=weight_format)
        return certify(
            speculative,
            baseline,
            learner,
            config=config,
            sampling=sampling,
            subject=subject,
            started_s=started_s,
            earlier=earlier,
        )


def _drawn(
    recipe: Recipe,
    start: Path,
    trained: Path,
    draft: Path | None,
    length: DraftLength,
    prompts: Sequence[Prompt],
    *,
    seed: int,
    trained_draft: Path | None = None,
) -> Sample:
    """Sample with an engine that starts with one policy, is refitted to the trained one, and drafts by `length`."""
    config, k, num_steps = recipe.losslessness, length.num_speculative_tokens, recipe.grpo.num_steps
    is_in_flight = k > 0 and recipe.loop.in_flight_kv_cache is not None
    kv_cache = KvCache.RECOMPUTE if is_in_flight else None
    first_draft = None if trained_draft is None else draft  # else the engine keeps the one that it has
    room = recipe.engine.num_engines * recipe.engine.max_num_seqs
    with (
        recipe_engine(
            sampled(recipe, length.sampling), start, draft, k, schedule=length.schedule, kv_cache=kv_cache
        ) as engine,
        progress(f"{_NODE} k={length.label}", total=config.num_tokens, unit="token") as bar,
    ):
        weights = WeightFiles(
            policy=trained, policy_version=num_steps, draft=trained_draft, draft_version=_TRAINED_DRAFT
        )
        engine.refit(weights)
        across = partial(
            engine.trace,
            refits=(WeightFiles(policy=start, policy_version=_START, draft=first_draft), weights),
            steps_between=max(_STEPS_BETWEEN, recipe.sampling.max_response_tokens // _REFITS_PER_RESPONSE),
        )
        sample = draw(
            engine,
            prompts,
            config=config,
            sampling=recipe.sampling,
            batch=min(room, recipe.grpo.prompts_per_step * recipe.grpo.group_size),
            seed=seed,
            across=across if is_in_flight else None,
            on_drawn=bar.advance,
        )
    logger.info("certify_losslessness: k=%s sampled %d tokens", length.label, sample.num_tokens)
    return sample


def certify_alone(context: RunContext, recipe: Recipe, *, policy: Path, data: Path, draft: Path, k: int) -> Path:
    """Certify `draft` for a policy that was not trained, and end the execution's run; refuse `k` without room."""
    require(k >= 1, "num_speculative_tokens", "must be >= 1", k)
    recipe = replace(recipe, tuning=replace(recipe.tuning, candidate_ks=(0, k)))
    length = given_length(recipe, k)
    directory = certify_losslessness(
        context, recipe, policy=policy, trained=policy, data=data, draft=draft, length=length
    )
    end_execution(context, recipe, read_record(CertificateRecord, directory / "certificate.json"))
    return directory


def require_lossless(certificate: Path) -> None:
    """Raise a `LosslessnessError` unless the certificate's verdict is `lossless`."""
    record = read_record(CertificateRecord, certificate / "certificate.json")
    if record.verdict != LOSSLESS:
        raise LosslessnessError(f"the run is {record.verdict}: {record.reason}; see {certificate / 'certificate.json'}")
