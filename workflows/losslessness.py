"""The losslessness certificate alone, of any policy and draft."""

# Inside a workflow a task gives promises, which flytekit types as a union of all that a task may give anywhere.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportReturnType=false, reportArgumentType=false

from __future__ import annotations

from flytekit import workflow
from flytekit.types.directory import FlyteDirectory

from slipstream.types import Workload
from tasks.certify_losslessness import certify_draft, require_lossless
from tasks.prepare_data import prepare_data_for
from tasks.start_run import start_run


@workflow
def certify(
    policy: FlyteDirectory,
    draft: FlyteDirectory,
    recipe: str = "tiny",
    workload: Workload = Workload.RL_ZERO,
    num_speculative_tokens: int = 3,
    seed: int = 0,
    run_root: str = "runs",
) -> FlyteDirectory:
    """Certify that speculation with `draft` samples `policy`'s own distribution; fails where it does not.

    Args:
        policy: model directory in Hugging Face format, with its tokenizer.
        draft: EAGLE-3 draft as vLLM loads it.
        recipe: engine and sampling settings, prompts, and the certificate's size.
    """
    run = start_run(
        recipe=recipe,
        workload=workload,
        num_steps=0,
        seed=seed,
        run_root=run_root,
        resume_execution="",
        reuse_stored=True,
    )
    data = prepare_data_for(context=run.context, recipe=run.recipe, policy=policy)
    certificate = certify_draft(
        context=run.context, recipe=run.recipe, policy=policy, data=data, draft=draft, k=num_speculative_tokens
    )
    return require_lossless(certificate=certificate, report=certificate)
