"""TRL's GRPO trainer on the same step as ours, in its own process.

For each step the process prints that it is ready, waits for a line, takes the step and prints the seconds. At the end
it prints the mean lengths.

Policy, prompts, rewards, group size, lengths, temperature and learning rate are those of the run; transformers
generates, as in TRL without an engine. `python -m benchmarks` starts this module with TRL's packages on the path.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from slipstream.data.prompts import PromptStream, read_prompt_sets
from slipstream.recipe import Recipe, load_recipe
from slipstream.rewards.verifier import Verifier
from slipstream.types import Prompt

MARK = "@trl "  # prefix of a line for the caller, because TRL prints other lines
READY = "ready"


def main() -> int:
    """Train some steps and print the mean lengths."""
    parser = argparse.ArgumentParser(prog="benchmarks.trl_step")
    parser.add_argument("execution", type=Path, help="directory of a run: its policy, data and recipe are used")
    parser.add_argument("--num-steps", type=int, required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), required=True)
    options = parser.parse_args()
    recipe = load_recipe(str(options.execution / "start_run" / "recipe.yaml"))
    _say(json.dumps(_train(recipe, options.execution, options.num_steps, options.dtype)))
    return 0


def _say(text: str) -> None:
    print(f"{MARK}{text}", flush=True)


def _prompts(recipe: Recipe, execution: Path, num_steps: int) -> list[Prompt]:
    stream = PromptStream(
        prompts=read_prompt_sets(execution / "prepare_data").train,
        batch_size=recipe.grpo.prompts_per_step,
        seed=recipe.grpo.seed,
    )
    return [prompt for step in range(num_steps) for prompt in stream.batch(step)]


def _train(recipe: Recipe, execution: Path, num_steps: int, dtype: str) -> list[float]:
    """Train with TRL; returns the mean response tokens of each step."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]  # installed by make bench-setup

    torch.set_num_threads(recipe.learner.num_threads or torch.get_num_threads())
    policy = execution / "prepare_policy" / "policy"
    tokenizer = AutoTokenizer.from_pretrained(policy)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=getattr(torch, dtype))
    rows = _prompts(recipe, execution, num_steps)
    texts = [tokenizer.decode(list(prompt.token_ids)) for prompt in rows]
    for text, prompt in zip(texts, rows, strict=True):
        assert tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) == prompt.token_ids, "TRL reads our tokens"

    class Clock(TrainerCallback):
        """Clock of each step's wall time: generation, rewards, logprobs and update."""

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            _say(READY)
            sys.stdin.readline()
            self.started_s = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            _say(f"{time.perf_counter() - self.started_s:.6f}")

    with closing(Verifier(recipe.reward)) as verifier, tempfile.TemporaryDirectory() as output:

        def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
            return list(verifier.score(completions, answer).rewards)

        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=output,
                max_steps=num_steps,
                per_device_train_batch_size=recipe.grpo.prompts_per_step * recipe.grpo.group_size,
                num_generations=recipe.grpo.group_size,
                max_completion_length=recipe.sampling.max_response_tokens,
                temperature=recipe.sampling.temperature,
                learning_rate=recipe.grpo.optimizer.learning_rate,
                beta=recipe.grpo.loss.kl_coefficient,
                shuffle_dataset=False,
                gradient_checkpointing=False,
                bf16=False,  # the model's own dtype
                use_cpu=True,
                logging_steps=1,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict({"prompt": texts, "answer": [prompt.answer for prompt in rows]}),
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        trainer.train()
        return [entry["completions/mean_length"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    sys.exit(main())
