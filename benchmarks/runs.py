"""A finished run as input of the benchmarks: paths of its stages' outputs, and its floating-point types."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slipstream.config import require
from slipstream.drafts.methods import DraftSampling
from slipstream.learner.numerics import capabilities
from slipstream.recipe import Recipe, load_recipe
from slipstream.records.files import read_record
from slipstream.records.stages import TuningRecord
from slipstream.stages.context import RunContext
from slipstream.stages.recipe_engines import sampled
from slipstream.stages.support import settled

_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
_NEEDED = (
    "start_run/recipe.yaml",
    "prepare_data",
    "prepare_policy/policy",
    "pretrain_draft/draft",
    "tune_draft_length/tuning.json",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRun:
    """Finished execution; `recipe` has resolved types and drafts instead of `auto`."""

    execution: Path
    recipe: Recipe
    chosen_k: int

    @property
    def policy(self) -> Path:
        """Directory of the policy that both arms started from."""
        return self.execution / "prepare_policy" / "policy"

    @property
    def data(self) -> Path:
        """Directory of the prompt sets."""
        return self.execution / "prepare_data"

    @property
    def draft(self) -> Path:
        """Directory of the draft in vLLM's format."""
        return self.execution / "pretrain_draft" / "draft"

    def described(self) -> str:
        """Describe run, types and processor, one line each."""
        found = capabilities()
        flags = ", ".join(f"{flag} {'yes' if flag in found else 'no'}" for flag in _FLAGS)
        types = f"learner {self.recipe.learner.dtype.value}, engine {self.recipe.engine.dtype.value}"
        return f"run:  {self.execution}\ntype: {types}\nCPU:  {flags}"


def find_execution(path: Path) -> Path:
    """Find the directory of an execution, which holds a directory for each stage.

    Args:
        path: the execution's directory, or the directory of its report, to which `runs/latest` links.
    Raises:
        ConfigError: neither `path` nor its parent holds the outputs of the stages before GRPO; the missing ones are
            named.
    """
    resolved = path.resolve()
    candidates = (resolved, resolved.parent) if resolved.is_dir() else ()
    missing = {candidate: [name for name in _NEEDED if not (candidate / name).exists()] for candidate in candidates}
    nearest = min(missing, key=lambda candidate: len(missing[candidate]), default=None)
    lacks = "no such directory" if nearest is None else f"{nearest} lacks {', '.join(missing[nearest])}"
    require(
        nearest is not None and not missing[nearest],
        "--run",
        "must be a finished run's directory (start_run/, prepare_policy/, ...) or that of its report",
        str(path),
        f"{lacks}: run `make demo` first, or name another run",
    )
    assert nearest is not None
    return nearest


def open_run(path: Path) -> FinishedRun:
    """Read the run at `path`, with every `auto` of types and drafts resolved as in its stages.

    Raises:
        ConfigError: `path` holds no finished run.
    """
    execution = find_execution(path)
    recipe = load_recipe(str(execution / "start_run" / "recipe.yaml"))
    context = RunContext(execution=execution.name, root=str(execution.parent))
    tuning = read_record(TuningRecord, execution / "tune_draft_length" / "tuning.json")
    return FinishedRun(
        execution=execution,
        recipe=sampled(settled(context, recipe), DraftSampling(tuning.sampling)),
        chosen_k=tuning.chosen_k,
    )
