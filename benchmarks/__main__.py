"""`make bench`: what our step adds to its parts, measured on the policy and the draft of the last demo.

Prints engine-only generation time beside the step's generation stage, the learner's tokens per second, the refit and
the sum of the stages, as medians over the steps after the first.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from slipstream import logs
from slipstream.data.prompts import PromptStream, read_prompt_sets
from slipstream.drafts.config import speculative_config
from slipstream.recipe import load_recipe
from slipstream.records import StepRecord, TuningRecord, read_record
from slipstream.refit.gate import RefitGate
from slipstream.rewards.verifier import Verifier
from slipstream.rollout.engine import GenerationResult
from slipstream.train.arm import score
from slipstream.train.loop import SyncLoop
from slipstream.workers.engines import RemoteEngine, start_engine
from slipstream.workers.learners import start_learner
from slipstream.workers.session import connect


@dataclass
class NotingEngine:
    """Passes everything on and notes the engine's own generation time."""

    engine: RemoteEngine
    seconds: list[float]

    def generate(self, *args: Any, **kwargs: Any) -> GenerationResult:
        """See `Engine.generate`."""
        result = self.engine.generate(*args, **kwargs)
        self.seconds.append(result.generation_s)
        return result

    def close(self) -> None:
        """See `Engine.close`."""
        self.engine.close()


def main() -> int:
    """Run the benchmark; status 2 without a finished demo."""
    parser = argparse.ArgumentParser(prog="benchmarks")
    parser.add_argument("--run", type=Path, default=Path("runs/latest"), help="report directory of a finished run")
    parser.add_argument("--num-steps", type=int, default=8)
    parser.add_argument("--trl", type=Path, default=None, help="directory with TRL's packages: compares with it")
    options = parser.parse_args()
    execution = options.run.resolve().parent
    if not (execution / "prepare_policy").is_dir():
        print(f"error: {options.run} is no finished run; run `make demo` first", file=sys.stderr)
        return 2
    if options.trl is not None and not (options.trl / "trl").is_dir():
        print(f"error: {options.trl} must hold the package trl; run `make bench-setup` first", file=sys.stderr)
        return 2
    logs.configure()
    chosen_k = read_record(TuningRecord, execution / "tune_draft_length" / "tuning.json").chosen_k
    step_s = {}
    for k in sorted({0, chosen_k}):
        records, engine_s = _steps(execution, options.num_steps, k)
        _show(records[1:], engine_s[1:], k)
        step_s[f"ours, k={k}"] = float(np.median([record.times.step_s for record in records[1:]]))
    if options.trl is not None:
        _compare(execution, options.trl, options.num_steps, step_s)
    return 0


def _compare(execution: Path, packages: Path, num_steps: int, ours: dict[str, float]) -> None:
    """TRL in either dtype, after our own engines and learners have ended."""
    path = os.pathsep.join([str(packages.resolve()), str(Path(__file__).parents[1])])
    trl: dict[str, float] = {}
    for dtype in ("float32", "bfloat16"):
        command = [sys.executable, "-m", "benchmarks.trl_step", str(execution), "--num-steps", str(num_steps)]
        done = subprocess.run(
            [*command, "--dtype", dtype],
            env={**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        measured = json.loads(done.stdout.strip().splitlines()[-1])
        trl[dtype] = float(np.median(measured["step_s"][1:]))
        tokens = float(np.mean(measured["mean_response_tokens"][1:]))
        print(f"TRL, {dtype}: step {trl[dtype]:.3f} s, {tokens:.0f} tokens a response in the mean")
    best = min(trl.values())
    for name, seconds in ours.items():
        print(f"{name}: {seconds:.3f} s a step, {seconds / best:.2f} of TRL's faster one")


def _steps(execution: Path, num_steps: int, k: int) -> tuple[list[StepRecord], list[float]]:
    from transformers import AutoTokenizer

    recipe = load_recipe(str(execution / "start_run" / "recipe.yaml"))
    policy = execution / "prepare_policy" / "policy"
    draft = speculative_config(recipe.draft.method, execution / "pretrain_draft" / "draft", k) if k else None
    tokenizer = AutoTokenizer.from_pretrained(policy)
    prompts = read_prompt_sets(execution / "prepare_data").train
    records: list[StepRecord] = []
    connect()
    with (
        tempfile.TemporaryDirectory() as transfer,
        start_learner(recipe.learner) as learner,
        start_engine(policy, config=recipe.engine, speculative_config=draft) as remote,
        Verifier(recipe.reward) as verifier,
    ):
        engine = NotingEngine(engine=remote, seconds=[])
        learner.load(policy, recipe.grpo.optimizer)
        SyncLoop(
            engine=engine,
            learner=learner,
            prompts=PromptStream(prompts=prompts, batch_size=recipe.grpo.prompts_per_step, seed=recipe.grpo.seed),
            score=partial(score, verifier=verifier, decode=lambda ids: tokenizer.decode(list(ids))),
            config=replace(recipe.grpo, num_steps=num_steps),
            sampling=recipe.sampling,
            gate=RefitGate(
                remote,
                learner,
                transfer=Path(transfer),
                draft=execution / "pretrain_draft" / "draft" if k else None,
                config=recipe.refit,
            ),
            draft_version=0 if k else None,
            on_step=records.append,
        ).run(start_step=0)
    return records, engine.seconds


def _show(records: Sequence[StepRecord], engine_s: Sequence[float], k: int) -> None:
    def median(values: Sequence[float]) -> float:
        return float(np.median(values))

    generation_s = [record.times.generation_s for record in records]
    learner_s = [record.times.logprob_s + record.times.train_s for record in records]
    step_s = [record.times.step_s for record in records]
    stage_sum = [sum(record.times.by_stage().values()) / record.times.step_s for record in records]
    overhead = [stage / engine - 1 for stage, engine in zip(generation_s, engine_s, strict=True)]
    tokens = [record.num_response_tokens for record in records]
    print(f"k={k}, {records[0].num_rollouts} rollouts a step, {median(tokens):.0f} response tokens, medians:")
    print(f"  step                     {median(step_s):8.3f} s")
    print(f"  generation, engine only  {median(engine_s):8.3f} s")
    print(f"  generation, our stage    {median(generation_s):8.3f} s  ({median(overhead):+.1%})")
    print(f"  learner                  {median([t / s for t, s in zip(tokens, learner_s, strict=True)]):8.0f} tokens/s")
    refit_s = [record.times.prepare_s for record in records]
    print(f"  refit (prepare)          {median(refit_s):8.3f} s  ({median(refit_s) / median(step_s):.1%} of a step)")
    check_s = [record.refit.elapsed_s for record in records]
    print(f"    of it the check        {median(check_s):8.3f} s  ({median(check_s) / median(step_s):.1%} of a step)")
    print(f"  stages / step            {median(stage_sum):8.1%}")


if __name__ == "__main__":
    sys.exit(main())
