"""The stage that certifies a run: the engines draw, the learner judges, the verdict is written and tagged."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from slipstream.data.prompts import read_prompt_sets
from slipstream.losslessness.sampling import Sample, Subject, draw
from slipstream.losslessness.verdict import LOSSLESS, certify
from slipstream.progress import progress
from slipstream.recipe import Recipe
from slipstream.records import CertificateRecord, TuningRecord, read_record, write_record
from slipstream.refit.fingerprint import directory_fingerprint
from slipstream.stages.context import RunContext
from slipstream.stages.execution import end_execution
from slipstream.stages.store import finished
from slipstream.stages.support import draft_weights, recipe_engine, settled, tracked, versions
from slipstream.types import Dtype, Prompt
from slipstream.workers.learners import start_learner
from slipstream.workers.session import connect

logger = logging.getLogger(__name__)

_NODE = "certify_losslessness"


class LosslessnessError(RuntimeError):
    """The certificate of a run does not say that its speculation is lossless."""


def tuned_length(recipe: Recipe, tuning: Path) -> int:
    """The draft length to certify: the chosen one, or the largest tried where speculation lost."""
    return read_record(TuningRecord, tuning / "tuning.json").chosen_k or max(recipe.tuning.candidate_ks)


def certify_losslessness(
    context: RunContext, recipe: Recipe, *, policy: Path, trained: Path, data: Path, draft: Path, k: int
) -> Path:
    """Certify speculation of k tokens with `draft` for the policy in `trained`; a directory with certificate.json.

    The speculative engine starts with `policy` and is refitted to `trained`, as in training, so that the certificate
    covers the refit.
    """
    from slipstream.drafts.fit import require_fit

    done = finished(context, _NODE, "certificate.json")
    if done is not None:
        return done
    recipe = settled(context, recipe)
    directory = context.directory(_NODE)
    weights = draft_weights(recipe.draft, draft)
    require_fit(recipe.draft, policy, weights, max_model_len=recipe.engine.max_model_len)
    prompts = read_prompt_sets(data).train
    started_s = time.perf_counter()
    connect()
    with tracked(context, recipe, _NODE, {"k": str(k)}) as tracker:
        # The engines must not share their randomness.
        speculative = _drawn(recipe, policy, trained, draft, k, prompts, seed=recipe.losslessness.seed)
        seed = recipe.losslessness.seed + recipe.losslessness.num_tokens + 1
        baseline = _drawn(recipe, trained, trained, draft, 0, prompts, seed=seed)
        num_responses = len(speculative.traces) + len(baseline.traces)
        logger.info("certify_losslessness: the learner judges %d responses", num_responses)
        with start_learner(replace(recipe.learner, dtype=Dtype.FLOAT32), layout=recipe.layout) as learner:
            learner.load(trained, None)
            record = certify(
                speculative,
                baseline,
                learner,
                config=recipe.losslessness,
                sampling=recipe.sampling,
                subject=Subject(
                    num_speculative_tokens=k,
                    policy_fingerprint=directory_fingerprint(trained),
                    draft_fingerprint="" if weights is None else directory_fingerprint(weights),
                    versions=versions(),
                ),
                started_s=started_s,
            )
        tracker.set_tags({"losslessness": record.verdict})
        tracker.log({"time/certify_s": record.elapsed_s, "losslessness/num_tokens": record.num_tokens})
        for power in record.detectable:
            tracker.log({f"losslessness/detectable_{power.alternative}": power.detectable_total_variation})
        tracker.log_artifact(write_record(record, directory / "certificate.json"))
    logger.info("certify_losslessness: %s: %s", record.verdict, record.reason)
    return directory


def _drawn(
    recipe: Recipe, start: Path, trained: Path, draft: Path, k: int, prompts: Sequence[Prompt], *, seed: int
) -> Sample:
    """What an engine with k draft tokens, started with one policy and refitted to the trained one, says."""
    config = recipe.losslessness
    with (
        recipe_engine(recipe, start, draft, k) as engine,
        progress(f"{_NODE} k={k}", total=config.num_tokens, unit="token") as bar,
    ):
        engine.refit(trained, policy_version=recipe.grpo.num_steps)
        sample = draw(
            engine,
            prompts,
            config=config,
            sampling=recipe.sampling,
            batch=min(recipe.engine.max_num_seqs, recipe.grpo.prompts_per_step * recipe.grpo.group_size),
            seed=seed,
            on_drawn=bar.advance,
        )
    logger.info("certify_losslessness: k=%d drew %d tokens", k, sample.num_tokens)
    return sample


def certify_alone(context: RunContext, recipe: Recipe, *, policy: Path, data: Path, draft: Path, k: int) -> Path:
    """Certify `draft` for a policy that was not trained; the execution's run ends with it."""
    directory = certify_losslessness(context, recipe, policy=policy, trained=policy, data=data, draft=draft, k=k)
    end_execution(context, recipe, read_record(CertificateRecord, directory / "certificate.json"))
    return directory


def require_lossless(certificate: Path) -> CertificateRecord:
    """Read the certificate.

    Raises:
        LosslessnessError: its verdict is not `lossless`.
    """
    record = read_record(CertificateRecord, certificate / "certificate.json")
    if record.verdict != LOSSLESS:
        raise LosslessnessError(f"the run is {record.verdict}: {record.reason}; see {certificate / 'certificate.json'}")
    return record
