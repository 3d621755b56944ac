"""GRPO with speculative rollouts in one file: the loop that `slipstream demo` runs, without its stages.

A policy of 5 M parameters learns sums from random weights, which takes a few minutes on two cores. Then GRPO teaches it
to show its work: vLLM samples rollouts and drafts by n-grams, a Megatron-Core learner trains on them, and a gate proves
at every step that the engine holds the learner's weights. From a clone of the repository:

    make setup
    .venv/bin/python examples/one_file_grpo.py --num-steps 8
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from slipstream.data.prompts import PromptStream
from slipstream.drafts.methods import speculative_config
from slipstream.grpo.update import Update
from slipstream.learner.policy_source import write_policy_tokenizer
from slipstream.recipe import Recipe, load_recipe
from slipstream.refit.channel import open_channel
from slipstream.refit.gate import RefitGate
from slipstream.stages.prepare_policy import train_from_scratch
from slipstream.stages.support import decode, policy_needs, recipe_prompt_sets, tokenizer
from slipstream.train.batch import assemble
from slipstream.types import Prompt
from slipstream.workers.engines import start_engine
from slipstream.workers.learners import start_learner
from slipstream.workers.session import connect

OVERRIDES = {
    "learner": {"dtype": "float32"},
    "engine": {"dtype": "float32"},
    "draft": {"method": "ngram"},  # reads its proposals from the sequence, so there is no draft to train
}


def reward(prompt: Prompt, response: str) -> float:
    """Score 1 for the right sum in a box, and 0 for anything else: a policy that guesses is often wrong."""
    return float(f"\\boxed{{{prompt.answer}}}" in response)


def prepare(recipe: Recipe, directory: Path) -> tuple[Path, tuple[Prompt, ...]]:
    """Make prompts, and train the policy that starts; return its directory and the prompts of GRPO."""
    write_policy_tokenizer(recipe.policy, policy_needs(recipe), directory / "tokenizer")
    words = tokenizer(directory / "tokenizer")
    prompts = recipe_prompt_sets(recipe, words, trains_draft=False).train
    assert recipe.policy.scratch is not None, "the recipe makes its own policy"
    print(f"{len(prompts)} prompts; the policy trains {recipe.policy.scratch.num_steps} steps")
    train_from_scratch(
        recipe, directory / "policy", tokenizer_dir=directory / "tokenizer", log=lambda metrics, step: None
    )
    return directory / "policy", prompts


def train(recipe: Recipe, policy: Path, prompts: Sequence[Prompt], *, num_drafted: int, output: Path) -> list[float]:
    """Train `recipe.grpo.num_steps` steps; return the mean reward of each.

    Args:
        num_drafted: draft tokens a step of the engine; 0 decodes one token at a time.
        output: directory of the trained policy, in Hugging Face format.
    """
    grpo, text = recipe.grpo, decode(tokenizer(policy))
    stream = PromptStream(prompts=tuple(prompts), batch_size=grpo.prompts_per_step, seed=grpo.seed)
    drafts = speculative_config(recipe.draft, None, num_drafted) if num_drafted else None
    means = []
    with (
        start_engine(policy, config=recipe.engine, speculative_config=drafts, layout=recipe.layout) as engines,
        start_learner(recipe.learner, layout=recipe.layout) as learner,
    ):
        learner.load(policy, grpo.optimizer)
        with open_channel(recipe.refit, learner, engines) as channel:
            gate = RefitGate(engines, learner, channel=channel, draft=None, trains_draft=False, config=recipe.refit)
            for step in range(grpo.num_steps):
                start = time.perf_counter()
                check = gate.refit(step)  # raises if any engine holds other weights than the learner
                result = engines.generate(
                    stream.batch(step), sampling=recipe.sampling, group_size=grpo.group_size, seed=grpo.seed + step
                )
                rewards = [
                    reward(group.prompt, text(group.prompt.token_ids, rollout.token_ids))
                    for group in result.groups
                    for rollout in group.rollouts
                ]
                batch = assemble(
                    result.groups,
                    rewards,
                    config=grpo,
                    policy_version=step,
                    draft_version=None,
                )
                trained = learner.train_step(
                    Update(
                        batch=batch,
                        trainer_logprobs=None,
                        ref_logprobs=None,
                        loss=grpo.loss,
                        temperature=recipe.sampling.temperature,
                        max_response_tokens=recipe.sampling.max_response_tokens,
                    )
                )
                means.append(sum(rewards) / len(rewards))
                told = [
                    f"step {step + 1}/{grpo.num_steps}: reward {means[-1]:.3f}",
                    f"{time.perf_counter() - start:.1f} s, of these {result.generation_s:.1f} s generation",
                    f"{check.num_tensors} tensors compared",
                    f"gradient norm {trained.stats.grad_norm:.2f}",
                ]
                if result.acceptance is not None:
                    told.append(f"acceptance length {result.acceptance.mean_acceptance_length:.2f}")
                print(", ".join(told), flush=True)
        learner.save_hf(output, policy)
    return means


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Parse the command line, and train."""
    parser = argparse.ArgumentParser(description="GRPO with speculative rollouts in one file.")
    parser.add_argument("--recipe", default="tiny", help="recipe with a policy from random weights")
    parser.add_argument("--num-steps", type=int, default=8, help="steps of GRPO")
    parser.add_argument("--num-drafted", type=int, default=3, help="tokens drafted at once; 0 for none")
    parser.add_argument("--output", type=Path, default=Path("runs/one_file_grpo"), help="directory of the policy")
    given = parser.parse_args(arguments)
    recipe = load_recipe(given.recipe, overrides=OVERRIDES)
    recipe = replace(recipe, grpo=replace(recipe.grpo, num_steps=given.num_steps))
    connect()
    with TemporaryDirectory() as directory:
        policy, prompts = prepare(recipe, Path(directory))
        return train(recipe, policy, prompts, num_drafted=given.num_drafted, output=given.output)


if __name__ == "__main__":
    main()
