"""Certify that speculation keeps the policy's distribution, and fail a run without a lossless certificate."""

from __future__ import annotations

from typing import NamedTuple

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from slipstream.stages import certify_losslessness as stage
from slipstream.stages.context import RunContext
from tasks.deliverables import handed_on, model_of, recipe_of, records_of
from tasks.recoverable import recoverable
from tasks.resources import CHECKING, MEASURING, on_cpus, on_gpus


class Certificate(NamedTuple):
    """Output of a certification: the directory of certificate.json."""

    certificate: FlyteDirectory


class RunCertificate(NamedTuple):
    """Output of the certification of a run; None without a speculative arm."""

    certificate: FlyteDirectory | None


class Report(NamedTuple):
    """Output of a workflow: the directory of its report."""

    report: FlyteDirectory


@task(**on_gpus())
@recoverable(MEASURING)
def certify_losslessness(
    context: RunContext,
    recipe: FlyteFile,
    policy: FlyteDirectory,
    trained: list[FlyteDirectory],
    data: FlyteDirectory,
    draft: FlyteDirectory | None,
    tuning: FlyteDirectory | None,
) -> RunCertificate:
    """Certify a trained speculative arm, the last of its loop, in certificate.json.

    An arm's directory holds its weights in `policy/` and, if the draft learned during RL, the draft in `draft/`.
    """
    if draft is None or tuning is None:
        return RunCertificate(certificate=None)
    loaded, arm = recipe_of(recipe), model_of(context, trained[-1])
    directory = stage.certify_losslessness(
        context,
        loaded,
        policy=model_of(context, policy),
        trained=arm / "policy",
        trained_draft=arm / "draft" if (arm / "draft").is_dir() else None,
        data=records_of(data),
        draft=model_of(context, draft),
        length=stage.tuned_length(loaded, records_of(tuning)),
    )
    handed = handed_on(context, "certify_losslessness", directory, records=("certificate.json",))
    return RunCertificate(certificate=handed)


@task(**on_gpus())
@recoverable(MEASURING)
def certify_draft(
    context: RunContext, recipe: FlyteFile, policy: FlyteDirectory, data: FlyteDirectory, draft: FlyteDirectory, k: int
) -> Certificate:
    """Certify any policy and draft in certificate.json, without a training run."""
    directory = stage.certify_alone(
        context,
        recipe_of(recipe),
        policy=model_of(context, policy),
        data=records_of(data),
        draft=model_of(context, draft),
        k=k,
    )
    return Certificate(certificate=handed_on(context, "certify_losslessness", directory, records=("certificate.json",)))


@task(**on_cpus(retries=0))
@recoverable(CHECKING)
def require_lossless(certificate: FlyteDirectory | None, report: FlyteDirectory) -> Report:
    """Return the report, or fail the run if there is a certificate that is not lossless; the report is written before.

    A run without a speculative arm has no certificate.
    """
    if certificate is not None:
        stage.require_lossless(records_of(certificate))
    return Report(report=report)
