"""The stages of the chain: what each Flyte task calls. A stage reads and writes directories and logs one MLflow run.

Engines and learners live in processes of their own and never at the same time as one another's work: on a small
machine two of them at once slow each other many times over.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream import evaluation, tuning
from slipstream.context import RunContext
from slipstream.data.prompts import load_prompt_sets, read_prompt_sets, render, write_prompt_sets
from slipstream.data.synthetic import pretraining_corpus
from slipstream.drafts.config import DraftInit
from slipstream.recipe import Recipe, load_recipe, write_recipe
from slipstream.records import (
    ArmRecord,
    CertificateRecord,
    DraftRecord,
    EvaluationRecord,
    PolicyRecord,
    RunRecord,
    TuningRecord,
    read_record,
    write_record,
)
from slipstream.rewards import Verifier
from slipstream.simulator.project.records import ProjectionRecord
from slipstream.simulator.project.runs import project_speedup as project
from slipstream.stage_tools import decode, machine, recipe_engine, recipe_layout, tokenizer, tracked, versions
from slipstream.tracking import Tracker, store_uri
from slipstream.types import Arm, Workload

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)

_LOG_EVERY_STEPS = 25


def start_run(
    recipe_name: str, *, workload: Workload | None, root: Path, execution: str, overrides: Mapping[str, Any]
) -> tuple[RunContext, Path]:
    """Check the whole recipe before anything expensive starts, write it out in full, and open the parent run."""
    recipe = load_recipe(recipe_name, workload=workload, overrides=overrides)
    context = RunContext(
        execution=execution, root=str(root.resolve()), experiment=recipe.name, workload=recipe.workload.value
    )
    resolved = write_recipe(recipe, context.directory("start_run") / "recipe.yaml")
    with Tracker.open(
        recipe.tracking,
        root=root.resolve(),
        experiment=recipe.name,
        key=execution,
        name=execution,
        tags={"workload": recipe.workload.value, "seed": str(recipe.grpo.seed)},
    ) as tracker:
        tracker.log_artifact(resolved)
    logger.info("run %s: recipe %s, workload %s", execution, recipe.name, recipe.workload.value)
    return context, resolved


def prepare_policy(context: RunContext, recipe: Recipe) -> Path:
    """Resolve and check the policy, or train the recipe's own from random weights; a directory in HF format."""
    from slipstream.policy.prepare import resolve, train_from_scratch

    directory = context.directory("prepare_policy") / "policy"
    with tracked(context, recipe, "prepare_policy") as tracker:

        def on_step(step: int, loss: float) -> None:
            tracker.log({"pretrain/loss": loss}, step)
            if step % _LOG_EVERY_STEPS == 0:
                logger.info("prepare_policy: step %d, loss %.3f", step, loss)

        if recipe.policy.scratch is None:
            record = resolve(recipe, directory)
        else:
            record = train_from_scratch(recipe, directory, documents=partial(_documents, recipe), on_step=on_step)
        write_record(record, directory / "policy.json")
        tracker.log_params({"num_parameters": record.num_parameters, "model": record.model})
        tracker.log({"time/prepare_policy_s": record.elapsed_s})
    logger.info(
        "prepare_policy: %s, %.1f M parameters, %.0f s",
        record.architecture,
        record.num_parameters / 1e6,
        record.elapsed_s,
    )
    return directory


def prepare_data(context: RunContext, recipe: Recipe, policy: Path) -> Path:
    """Load, filter and tokenize the four prompt sets; a directory with them and their manifest."""
    directory = context.directory("prepare_data")
    with tracked(context, recipe, "prepare_data") as tracker, Verifier(recipe.reward) as verifier:
        sets = load_prompt_sets(
            recipe.data, tokenizer=tokenizer(policy), parseable=verifier.parseable, directory=directory / "sources"
        )
        write_prompt_sets(sets, directory)
        tracker.log_artifact(directory / "manifest.json")
        for record in sets.records:
            logger.info("prepare_data: %s read %d, kept %d", record.name, record.num_read, record.num_kept)
    return directory


def pretrain_draft(context: RunContext, recipe: Recipe, policy: Path, data: Path) -> Path:
    """Train the draft on the policy's own responses and hidden states; a directory that vLLM loads, and draft.json."""
    from slipstream.drafts.pretrain import pretrain_draft as pretrain
    from slipstream.loop import workers

    directory = context.directory("pretrain_draft")
    sets = read_prompt_sets(data)
    prompts = sets.draft_in_domain if recipe.draft.init is DraftInit.IN_DOMAIN else sets.draft_general
    with tracked(context, recipe, "pretrain_draft", {"draft.init": recipe.draft.init.value}) as tracker:

        def on_step(step: int, loss: float) -> None:
            tracker.log({"draft/loss": loss}, step)
            if step % _LOG_EVERY_STEPS == 0:
                logger.info("pretrain_draft: step %d, loss %.3f", step, loss)

        with workers.session():
            record = pretrain(recipe, policy, prompts, directory, on_step=on_step)
        write_record(record, directory / "draft.json")
        tracker.log({"draft/heldout_acceptance_length": record.heldout_mean_acceptance_length})
        tracker.log({f"draft/heldout_rate_pos_{i + 1}": r for i, r in enumerate(record.heldout_rate_by_position)})
    logger.info(
        "pretrain_draft: held-out acceptance length %.2f at k=%d, %.0f s",
        record.heldout_mean_acceptance_length,
        recipe.draft.ttt_steps,
        record.elapsed_s,
    )
    return directory


def tune_draft_length(context: RunContext, recipe: Recipe, policy: Path, data: Path, draft: Path) -> Path:
    """Measure generation time over draft length and batch, choose by time; a directory with tuning.json."""
    from slipstream.drafts.checks import check_draft
    from slipstream.loop import workers
    from slipstream.report.figures import sweep as sweep_figure

    directory = context.directory("tune_draft_length")
    check_draft(policy, draft / "draft", max_model_len=recipe.engine.max_model_len)

    def on_point(point: Any) -> None:
        logger.info(
            "tune_draft_length: k=%d batch %d: %.2f s, %.2fx, AL %.2f",
            point.k,
            point.batch,
            point.generation_s,
            point.speedup,
            point.mean_acceptance_length,
        )

    with tracked(context, recipe, "tune_draft_length") as tracker, workers.session():
        points = tuning.sweep(
            partial(recipe_engine, recipe, policy, draft),
            read_prompt_sets(data).train,
            config=recipe.tuning,
            sampling=recipe.sampling,
            seed=recipe.grpo.seed,
            group_size=recipe.grpo.group_size,
            on_point=on_point,
        )
        record = tuning.choose(
            points, config=recipe.tuning, batch=recipe.grpo.prompts_per_step * recipe.grpo.group_size
        )
        tracker.log_artifact(write_record(record, directory / "tuning.json"))
        figure = directory / "sweep.svg"
        figure.write_text(sweep_figure(record.points, record.chosen_k))
        tracker.log_artifact(figure)
        tracker.set_tags({"k": str(record.chosen_k)})
        for point in points:
            tracker.log({f"sweep/speedup_batch_{point.batch}": point.speedup}, point.k)
    logger.info("tune_draft_length: %s", record.reason)
    return directory


def train_grpo(
    context: RunContext, recipe: Recipe, policy: Path, data: Path, draft: Path, tuning: Path, arm: Arm
) -> Path:
    """Train one arm, going on from its last checkpoint if an attempt left one; arm.json and the final policy."""
    from slipstream.loop import workers
    from slipstream.loop.train import ArmPlan, train

    node = f"train_grpo_{arm.value}"
    directory = context.directory(node)
    chosen_k = read_record(TuningRecord, tuning / "tuning.json").chosen_k if arm is Arm.SPECULATIVE else 0
    tags = {"arm": arm.value, "k": str(chosen_k), "draft.method": recipe.draft.method.value}
    with tracked(context, recipe, node, tags) as tracker, workers.session():
        record = train(
            recipe,
            ArmPlan(
                arm=arm,
                num_speculative_tokens=chosen_k,
                draft=draft / "draft" if chosen_k else None,
                start_engine=partial(recipe_engine, recipe, policy, draft, chosen_k),
            ),
            policy=policy,
            prompts=read_prompt_sets(data).train,
            decode=decode(tokenizer(policy)),
            directory=directory,
            log=tracker.log,
        )
        write_record(record, directory / "arm.json")
    return directory


def evaluate_aime(context: RunContext, recipe: Recipe, data: Path, model: Path, policy: str) -> Path:
    """Accuracy of the policy in `model` on the validation problems; a directory with evaluation.json."""
    from slipstream.loop import workers

    node = f"evaluate_aime_{policy}"
    directory = context.directory(node)
    prompts = read_prompt_sets(data).validation
    with tracked(context, recipe, node, {"policy": policy}) as tracker, workers.session():
        with (
            workers.start_engine(model, config=recipe.engine) as engine,
            Verifier(recipe.reward) as verifier,
        ):
            record = evaluation.evaluate(
                engine,
                prompts,
                verifier=verifier,
                decode=decode(tokenizer(model)),
                config=recipe.evaluation,
                policy=policy,
                seed=recipe.grpo.seed,
            )
        write_record(record, directory / "evaluation.json")
        tracker.log(
            {
                f"aime24/avg_at_{record.k}": record.avg_at_k,
                f"aime24/maj_at_{record.k}": record.maj_at_k,
                "aime24/truncated_fraction": record.truncated_fraction,
                "aime24/num_timeouts": record.num_timeouts,
            }
        )
    logger.info("evaluate_aime: %s avg@%d %.3f", policy, record.k, record.avg_at_k)
    return directory


def project_speedup(context: RunContext, recipe: Recipe, *, tuning: Path, arms: list[Path]) -> Path:
    """Calibrate the simulator on the run and project from it; a directory with projection.json."""
    directory = context.directory("project_speedup")
    record = project(
        [read_record(ArmRecord, arm / "arm.json") for arm in arms],
        read_record(TuningRecord, tuning / "tuning.json"),
        layout=recipe_layout(recipe),
        execution=context.execution,
    )
    write_record(record, directory / "projection.json")
    return directory


def report_speedup(  # noqa: PLR0913  # one input a record
    context: RunContext,
    recipe: Recipe,
    *,
    policy: Path,
    data: Path,
    draft: Path,
    tuning: Path,
    arms: list[Path],
    evaluations: list[Path],
    certificate: Path,
    projection: Path,
) -> Path:
    """Bring all records together; a directory with report.html, report.json and run.json, linked as runs/latest."""
    from slipstream.report import summarise, write_report

    directory = context.directory("report_speedup")
    record = RunRecord(
        recipe=recipe.name,
        workload=context.workload,
        execution=context.execution,
        tracking_uri=store_uri(recipe.tracking, Path(context.root)),
        versions=versions(),
        machine=machine(),
        policy=read_record(PolicyRecord, policy / "policy.json"),
        data=read_prompt_sets(data).records,
        draft=read_record(DraftRecord, draft / "draft.json"),
        tuning=read_record(TuningRecord, tuning / "tuning.json"),
        arms=tuple(read_record(ArmRecord, arm / "arm.json") for arm in arms),
        evaluations=tuple(read_record(EvaluationRecord, path / "evaluation.json") for path in evaluations),
        certificate=read_record(CertificateRecord, certificate / "certificate.json"),
        layout=recipe_layout(recipe),
    )
    with tracked(context, recipe, "report_speedup") as tracker:
        write_record(record, directory / "run.json")
        projected = read_record(ProjectionRecord, projection / "projection.json")
        write_report(record, directory, projection=projected)
        speedup = summarise(record)["speedup"]
        tracker.log({f"speedup/{name}": value["value"] for name, value in speedup.items() if value["value"]})
        for name in ("report.html", "report.json", "run.json"):
            tracker.log_artifact(directory / name)
    _link_latest(Path(context.root), directory)
    return directory


def _documents(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[list[int], int]]:
    """Chats of the synthetic corpus; only the responses are learned."""
    corpus = pretraining_corpus(recipe.data.synthetic, workload=recipe.workload, seed=recipe.data.seed)
    for example in corpus:
        prompt = list(render(example.problem, tokenizer=tokenizer, instruction=recipe.data.instruction))
        response = tokenizer.encode(example.response, add_special_tokens=False)
        assert isinstance(tokenizer.eos_token_id, int)
        yield [*prompt, *response, tokenizer.eos_token_id], len(prompt)


def _link_latest(root: Path, directory: Path) -> None:
    """Point `<root>/latest` at this run's report."""
    link, temporary = root / "latest", root / ".latest.part"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(directory)
    temporary.replace(link)
