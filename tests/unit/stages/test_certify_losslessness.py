"""The certificate is about the weights that the speculative arm ended with, a draft that learned among them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slipstream.drafts import fit
from slipstream.drafts.schedule import DraftLength
from slipstream.losslessness.sampling import Subject
from slipstream.recipe import load_recipe
from slipstream.refit.fingerprint import directory_fingerprint
from slipstream.stages import certify_losslessness as stage
from slipstream.stages.context import RunContext


class JudgedError(Exception):
    """The learner was asked to judge: all that comes before is done."""


@pytest.mark.parametrize("learned", [True, False])
def test_the_speculative_engine_drafts_with_what_the_draft_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, learned: bool
) -> None:
    models = {}
    for number, name in enumerate(("policy", "draft", "trained", "trained_draft")):
        models[name] = tmp_path / name
        models[name].mkdir()
        save_file({"w": torch.full((1,), float(number))}, models[name] / "model.safetensors")
    refits: list[tuple[Path, int, Path, Path | None]] = []
    subjects: list[Subject] = []

    @contextmanager
    def engine(recipe: Any, policy: Path, draft: Path, k: int, *, schedule: Any, kv_cache: Any) -> Iterator[Any]:
        def refit(to: Path, *, policy_version: int, draft: Path | None, draft_version: int) -> None:
            refits.append((policy, k, to, draft))

        yield SimpleNamespace(refit=refit)

    def judge(*_: Any, subject: Subject, **__: Any) -> None:
        subjects.append(subject)
        raise JudgedError

    nothing = SimpleNamespace(load=lambda policy, optimizer: None)
    monkeypatch.setattr(fit, "require_fit", lambda *_, **__: None)
    monkeypatch.setattr(stage, "recipe_engine", engine)
    monkeypatch.setattr(stage, "draw", lambda *_, **__: SimpleNamespace(traces=(), num_tokens=0))
    monkeypatch.setattr(stage, "certify", judge)
    monkeypatch.setattr(stage, "connect", lambda: None)
    monkeypatch.setattr(stage, "settled", lambda context, recipe: recipe)
    monkeypatch.setattr(stage, "start_learner", lambda config, layout: nullcontext(nothing))
    monkeypatch.setattr(stage, "tracked", lambda *_: nullcontext())
    monkeypatch.setattr(stage, "read_prompt_sets", lambda data: SimpleNamespace(train=()))

    trained_draft = models["trained_draft"] if learned else None
    with pytest.raises(JudgedError):
        stage.certify_losslessness(
            RunContext(execution="e", root=str(tmp_path), experiment="x", workload="rl_zero"),
            load_recipe("tiny"),
            policy=models["policy"],
            trained=models["trained"],
            data=tmp_path,
            draft=models["draft"],
            length=DraftLength(num_speculative_tokens=3),
            trained_draft=trained_draft,
        )

    speculative, baseline = refits
    assert speculative == (models["policy"], 3, models["trained"], trained_draft)
    assert baseline == (models["trained"], 0, models["trained"], None)
    assert subjects[0].draft_fingerprint == directory_fingerprint(trained_draft or models["draft"])
    assert subjects[0].policy_fingerprint == directory_fingerprint(models["trained"])
