"""The certificate is about the weights that the speculative arm ended with, a draft that learned among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slipstream.drafts import compatibility
from slipstream.drafts.length import DraftLength
from slipstream.drafts.methods import DraftSampling
from slipstream.grpo.loop_config import KvCache
from slipstream.learner.config import LearnerConfig, Packing
from slipstream.losslessness.sampling import Subject
from slipstream.recipe import load_recipe
from slipstream.refit.config import WeightFiles, WeightFormat
from slipstream.refit.fingerprint import directory_fingerprint
from slipstream.stages import certify_losslessness as stage
from slipstream.stages.context import RunContext

FLYING = {"loop": {"mode": "in_flight", "kv_cache": "keep"}, "grpo": {"num_steps": 24}}
QUANTIZED = {"engine": {"quantization": "int8"}, "grpo": {"loss": {"truncated_importance_sampling": 2.0}}}


class JudgedError(Exception):
    """The learner was asked to judge: all that comes before is done."""


@pytest.mark.parametrize("in_flight", [True, False])
@pytest.mark.parametrize("learned", [True, False])
def test_the_speculative_engine_is_given_what_policy_and_draft_became_and_in_flight_what_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, learned: bool, in_flight: bool
) -> None:
    models = {}
    for number, name in enumerate(("policy", "draft", "trained", "trained_draft")):
        models[name] = tmp_path / name
        models[name].mkdir()
        save_file({"w": torch.full((1,), float(number))}, models[name] / "model.safetensors")
    refits: list[tuple[Path, int, Path, Path | None]] = []
    subjects: list[Subject] = []
    drawn_across: list[Any] = []
    caches: list[KvCache | None] = []
    kinds: list[DraftSampling] = []
    judging: list[Path] = []
    formats: list[tuple[Packing, WeightFormat | None]] = []
    earlier_versions: list[int] = []

    @contextmanager
    def engine(recipe: Any, policy: Path, draft: Path, k: int, *, schedule: Any, kv_cache: Any) -> Iterator[Any]:
        caches.append(kv_cache)
        if k:
            kinds.append(recipe.draft.sampling)

        def refit(weights: WeightFiles) -> None:
            refits.append((policy, k, weights.policy, weights.draft))

        yield SimpleNamespace(refit=refit, trace=lambda: None)

    def draw(*_: Any, across: Any, **__: Any) -> Any:
        drawn_across.append(across)
        return SimpleNamespace(traces=(), num_tokens=0)

    def judge(*_: Any, subject: Subject, earlier: dict[int, Any], **__: Any) -> None:
        subjects.append(subject)
        earlier_versions.extend(earlier)
        raise JudgedError

    def start_learner(config: LearnerConfig, layout: Any) -> AbstractContextManager[Any]:
        def load(policy: Path, optimizer: None, *, computed_as: WeightFormat | None) -> None:
            judging.append(policy)
            formats.append((config.packing, computed_as))

        return nullcontext(SimpleNamespace(load=load))

    recipe = load_recipe("tiny_async", overrides=FLYING) if in_flight else load_recipe("tiny", overrides=QUANTIZED)
    monkeypatch.setattr(compatibility, "require_fit", lambda *_, **__: None)
    monkeypatch.setattr(stage, "recipe_engine", engine)
    monkeypatch.setattr(stage, "draw", draw)
    monkeypatch.setattr(stage, "judged", lambda *_, **__: None)
    monkeypatch.setattr(stage, "certify", judge)
    monkeypatch.setattr(stage, "connect", lambda: None)
    monkeypatch.setattr(stage, "settled", lambda context, recipe: recipe)
    monkeypatch.setattr(stage, "start_learner", start_learner)
    monkeypatch.setattr(stage, "tracked", lambda *_: nullcontext())
    monkeypatch.setattr(stage, "read_prompt_sets", lambda data: SimpleNamespace(train=()))

    trained_draft = models["trained_draft"] if learned else None
    with pytest.raises(JudgedError):
        stage.certify_losslessness(
            RunContext(execution="e", root=str(tmp_path), experiment="x", workload="rl_zero"),
            recipe,
            policy=models["policy"],
            trained=models["trained"],
            data=tmp_path,
            draft=models["draft"],
            length=DraftLength(num_speculative_tokens=3, sampling=DraftSampling.GREEDY),
            trained_draft=trained_draft,
        )

    speculative, baseline = refits
    assert speculative == (models["policy"], 3, models["trained"], trained_draft)
    assert baseline == (models["trained"], 0, models["trained"], None)
    assert subjects[0].draft_fingerprint == directory_fingerprint(trained_draft or models["draft"])
    assert subjects[0].policy_fingerprint == directory_fingerprint(models["trained"])

    assert kinds == [DraftSampling.GREEDY]
    assert subjects[0].draft_sampling == "greedy"

    across, of_baseline = drawn_across
    assert of_baseline is None
    assert judging == ([models["policy"], models["trained"]] if in_flight else [models["trained"]])
    assert earlier_versions == ([0] if in_flight else [])
    as_in_engines = (Packing.AUTO, None) if in_flight else (Packing.ALWAYS, recipe.engine.weight_format)
    assert formats == [as_in_engines] * len(judging)
    assert subjects[0].quantization is recipe.engine.quantization
    # Kept caches would bias what is drawn: the certificate recomputes them, and names what the run does.
    assert caches == [KvCache.RECOMPUTE if in_flight else None, None]
    assert subjects[0].kv_cache is (KvCache.KEEP if in_flight else None)
    assert (across is not None) == in_flight
    if across is not None:
        found = [
            (each.policy, each.policy_version, each.draft, each.draft_version) for each in across.keywords["refits"]
        ]
        first, last = (models["draft"], trained_draft) if learned else (None, None)
        assert found == [(models["policy"], 0, first, 0), (models["trained"], 24, last, 1)]


def test_a_certificate_without_a_tuned_length_needs_the_kind_of_drafts(
    tmp_path: Path, refusal: Callable[..., str]
) -> None:
    auto = load_recipe("tiny", overrides={"draft": {"sampling": "auto"}})
    context = RunContext(execution="e", root=str(tmp_path), experiment="x", workload="rl_zero")
    ask = partial(stage.certify_alone, context, auto, policy=tmp_path, data=tmp_path, draft=tmp_path, k=3)
    assert refusal(ask) == (
        "draft.sampling must be probabilistic or greedy where no draft length is tuned, got 'auto'; "
        "tuning alone compares the two"
    )
