"""Workflow `certify`: the losslessness certificate of any policy and draft."""

# Inside a workflow a task returns promises, which flytekit types as a union of all return types of a task.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportReturnType=false, reportArgumentType=false

from __future__ import annotations

from flytekit.types.directory import FlyteDirectory

from slipstream.types import Workload
from tasks.certify_losslessness import Report, certify_draft, require_lossless
from tasks.fail_run import fail_certificate
from tasks.prepare_data import prepare_data_for
from tasks.resources import CLUSTER
from tasks.start_run import start_run
from workflows.on_cluster import RECIPE, named, workflow


@workflow(on_failure=fail_certificate)
def certify(
    policy: FlyteDirectory,
    draft: FlyteDirectory,
    recipe: str = RECIPE,
    workload: Workload | None = None,
    num_speculative_tokens: int = 3,
    seed: int | None = None,
    overrides: list[str] = [],  # noqa: B006  # flytekit reads the default as a value, and passes a copy
    run_root: str = CLUSTER.run_root,
) -> Report:
    """Certify that speculation with `draft` samples the distribution of `policy`, and fail if it does not.

    No policy is trained: one task, over all nodes of the profile, compares samples of the engine with and without the
    draft.

    Args:
        policy: model directory in Hugging Face format, with its tokenizer.
        draft: directory of an EAGLE-3 draft in vLLM's format.
        recipe: name of a file in configs/ without its extension; sets engine, sampling, prompts and size of the
            certificate.
        workload: workload whose section of the recipe applies: rl_zero or rl_think; default: the recipe's.
        num_speculative_tokens: draft tokens an iteration (k), at least 1.
        seed: integer seed of the prompts; default: the recipe's.
        overrides: recipe fields as field=value, one an item, as in losslessness.num_tokens=200000; a field's name
            contains its unit.
        run_root: absolute directory on the shared volume of all pods.

    Returns:
        report: certificate.json; the execution fails if the verdict is not lossless.
    """
    started = start_run(recipe=recipe, workload=workload, seed=seed, overrides=overrides, run_root=run_root)
    run = named(started, "check the recipe", "start-run")
    shared = {"context": run.context, "recipe": run.recipe}
    data = named(prepare_data_for(**shared, policy=policy), "prepare data", "prepare-data").data
    certifying = certify_draft(**shared, policy=policy, data=data, draft=draft, k=num_speculative_tokens)
    certificate = named(certifying, "certify draft", "certify-draft").certificate
    lossless = require_lossless(certificate=certificate, report=certificate)
    return named(lossless, "require lossless", "require-lossless")
