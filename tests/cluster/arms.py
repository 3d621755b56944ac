"""Drivers that train whole arms over several hosts; see `runs` for how they are called."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slipstream.config import merge
from slipstream.drafts.methods import speculative_config
from slipstream.losslessness.sampling import Sample, draw
from slipstream.recipe import load_recipe
from slipstream.records.steps import ArmRecord
from slipstream.refit.config import WeightFiles
from slipstream.train.arm import LogMetrics
from slipstream.workers.engines import RemoteEngine, start_engine
from slipstream.workers.learners import start_learner
from slipstream.workers.session import connect
from tests.cluster.runs import say
from tests.conftest import _make_draft, _make_policy
from tests.small import RECIPE, additions, certified, train_arm

K = 2
_GRPO = {"num_steps": 3, "prompts_per_step": 4, "group_size": 4, "checkpoint_every_steps": 3}
_CHANGES: dict[str, Any] = {
    "engine": {"max_num_seqs": 32, "num_kept_idle": 0},
    "learner": {"max_tokens_per_microbatch": 256},
    "grpo": {**_GRPO, "optimizer": {"method": "adamw", "learning_rate": 1e-3}},
    "refit": {"bucket_mib": 0.02, "check_every_steps": 1},  # of a policy of 0.6 MB: tensors are cut
    "simulator": None,
}
_SMALL = merge(RECIPE, _CHANGES)


def train_arms(directory: str, layouts: Mapping[str, Mapping[str, Any]], certified: str) -> dict[str, Any]:
    """Train the speculative arm in each layout; of one of them the certificate too.

    Args:
        directory: all hosts see it.
        layouts: what each recipe says of where it runs, by name.
        certified: a layout's name.
    Returns:
        For each layout the steps' losses, rewards and so on, the hosts of ranks and engines, and what was logged.
    """
    found: dict[str, Any] = {}
    for name, layout in layouts.items():
        arm = _Arm(Path(directory), name, merge(layout, {"engine": {"num_kept_idle": 2}}))
        found[name] = arm.train()
        if name == certified:
            found[name]["certificate"] = arm.certificate()
    return found


def outlive_hosts(directory: str, layout: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Train the speculative arm on GPUs that are reserved, while hosts are lost, and once more undisturbed.

    After each of its first two steps it says `done` and waits for a file of that step's name in the directory.
    """
    root, often = Path(directory), {"grpo": {"checkpoint_every_steps": 1}}

    def wait(metrics: Mapping[str, float], step: int) -> None:
        if step < 2:
            say("done", step)
            while not (root / str(step)).exists():
                time.sleep(0.1)

    arms = [_Arm(root, name, merge(layout, often)) for name in ("disturbed", "undisturbed")]
    return [arms[0].train(wait), arms[1].train()]


class _Arm:
    def __init__(self, root: Path, name: str, layout: Mapping[str, Any]) -> None:
        logging.basicConfig(level=logging.INFO)  # what was printed is shown when a test fails
        connect()
        self._recipe, self._directory = load_recipe("tiny", overrides=merge(_SMALL, layout)), root / name
        self._policy, self._draft = root / "models" / "policy", root / "models" / "draft"
        if not self._policy.exists():
            _make_draft(self._draft, _make_policy(self._policy, 0, num_key_value_heads=2), 5)
        self._prompts = additions(self._policy, num=12)

    def train(self, log: LogMetrics = lambda metrics, step: None) -> dict[str, Any]:
        """Train the arm; return its steps, the hosts of learner and engines, which stay, and the log."""
        with _logged() as lines:
            how: dict[str, Any] = {"prompts": self._prompts, "k": K, "draft": self._draft, "log": log}
            record = train_arm(self._recipe, self._policy, self._directory, **how)
        with self._engines(K) as engines, start_learner(self._recipe.learner, layout=self._recipe.layout) as learner:
            ends = {"learner": learner, "engines": engines}
            hosts = {name: [each.host for each in end.workers] for name, end in ends.items()}
        return {"steps": _told(record), "hosts": hosts, "log": lines}

    def certificate(self) -> dict[str, Any]:
        """Certificate of the trained policy: engines of this layout sample, its learner judges."""
        recipe, trained, samples = self._recipe, self._directory / "policy", list[Sample]()
        config, sampling = recipe.losslessness, recipe.sampling
        for k in (K, 0):
            with self._engines(k) as engines:
                engines.refit(WeightFiles(policy=trained, policy_version=recipe.grpo.num_steps))
                seed = len(samples) * (config.num_tokens + 1)
                samples.append(draw(engines, self._prompts, config=config, sampling=sampling, batch=32, seed=seed))
        with start_learner(recipe.learner, layout=recipe.layout) as learner:
            learner.load(trained, None)
            record = certified(samples[0], samples[1], learner, config, sampling=sampling)
        return {"verdict": record.verdict, "reason": record.reason, "num_tokens": record.num_tokens}

    @contextmanager
    def _engines(self, k: int) -> Iterator[RemoteEngine]:
        recipe = self._recipe
        speculative = speculative_config(recipe.draft, self._draft, k) if k else None
        how: dict[str, Any] = {"config": recipe.engine, "layout": recipe.layout}
        with start_engine(self._policy, speculative_config=speculative, **how) as engines:
            yield engines


def _told(record: ArmRecord) -> list[dict[str, Any]]:
    return [
        {
            "loss": step.train.loss,
            "grad_norm": step.train.grad_norm,
            "reward": step.reward_mean,
            "num_tokens": step.num_response_tokens,
            "num_accepted": None if step.acceptance is None else step.acceptance.num_accepted_tokens,
            "num_compared": step.refit.num_tensors,
            "sampled_by": step.policy_version,
            "hidden_s": None if step.overlap is None else step.overlap.hidden_s,
        }
        for step in record.steps
    ]


@contextmanager
def _logged() -> Iterator[list[str]]:
    """Collect the lines that the library logs in the block."""
    lines: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("slipstream")
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
