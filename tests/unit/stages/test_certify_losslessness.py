"""The certificate is about the weights that the speculative arm ended with, a draft that learned among them."""

from collections import defaultdict
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
from slipstream.grpo.config import KvCache
from slipstream.learner.config import LearnerConfig, Packing
from slipstream.losslessness.sampling import Subject
from slipstream.recipe import load_recipe
from slipstream.refit.config import WeightFormat
from slipstream.refit.fingerprint import directory_fingerprint
from slipstream.stages import certify_losslessness as stage
from tests.small import replace_in, run_context

FLYING = {"loop": {"mode": "in_flight", "kv_cache": "keep"}, "grpo": {"num_steps": 24}}
QUANTIZED = {"engine": {"quantization": "int8"}, "grpo": {"loss": {"truncated_importance_sampling": 2.0}}}


class JudgedError(Exception):
    """The learner was asked to judge: all that comes before is done."""


@pytest.mark.parametrize("in_flight", [True, False])
@pytest.mark.parametrize("learned", [True, False])
def test_the_speculative_engine_is_given_what_policy_and_draft_became_and_in_flight_what_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, learned: bool, in_flight: bool
) -> None:
    models = {name: tmp_path / name for name in ("policy", "draft", "trained", "trained_draft")}
    for number, path in enumerate(models.values()):
        path.mkdir()
        save_file({"w": torch.full((1,), float(number))}, path / "model.safetensors")
    seen: dict[str, list[Any]] = defaultdict(list)

    @contextmanager
    def engine(recipe: Any, policy: Path, draft: Path, k: int, *, schedule: Any, kv_cache: Any) -> Iterator[Any]:
        seen["caches"].append(kv_cache)
        seen["kinds"] += [recipe.draft.sampling] if k else []
        told = seen["refits"].append
        yield SimpleNamespace(refit=lambda to: told((policy, k, to.policy, to.draft)), trace=lambda: None)

    def draw(*_: Any, across: Any, **__: Any) -> Any:
        seen["across"].append(across)
        return SimpleNamespace(traces=(), num_tokens=0)

    def judge(*_: Any, subject: Subject, earlier: dict[int, Any], **__: Any) -> None:
        seen["subjects"].append(subject)
        seen["earlier versions"] += earlier
        raise JudgedError

    def start_learner(config: LearnerConfig, layout: Any) -> AbstractContextManager[Any]:
        def load(policy: Path, optimizer: None, *, computed_as: WeightFormat | None) -> None:
            seen["judging"].append(policy)
            seen["formats"].append((config.packing, computed_as))

        return nullcontext(SimpleNamespace(load=load))

    recipe = load_recipe("tiny_async", overrides=FLYING) if in_flight else load_recipe("tiny", overrides=QUANTIZED)
    replace_in(monkeypatch, compatibility, require_fit=lambda *_, **__: None)
    replace_in(monkeypatch, stage, recipe_engine=engine, draw=draw, certify=judge, start_learner=start_learner)
    replace_in(monkeypatch, stage, connect=lambda: None, tracked=lambda *_: nullcontext(), judged=lambda *_, **__: None)
    replace_in(monkeypatch, stage, settled=lambda context, recipe: recipe)
    replace_in(monkeypatch, stage, read_prompt_sets=lambda data: SimpleNamespace(train=()))

    trained, trained_draft = models["trained"], models["trained_draft"] if learned else None
    length = DraftLength(num_speculative_tokens=3, sampling=DraftSampling.GREEDY)
    given = {"policy": models["policy"], "trained": trained, "data": tmp_path, "draft": models["draft"]}
    with pytest.raises(JudgedError):
        stage.certify_losslessness(run_context(tmp_path), recipe, **given, length=length, trained_draft=trained_draft)

    assert seen["refits"] == [(models["policy"], 3, trained, trained_draft), (trained, 0, trained, None)]
    (subject,) = seen["subjects"]
    assert subject.draft_fingerprint == directory_fingerprint(trained_draft or models["draft"])
    assert subject.policy_fingerprint == directory_fingerprint(trained)
    assert seen["kinds"] == [DraftSampling.GREEDY]
    assert subject.draft_sampling == "greedy"

    across, of_baseline = seen["across"]
    assert of_baseline is None
    assert seen["judging"] == ([models["policy"], trained] if in_flight else [trained])
    assert seen["earlier versions"] == ([0] if in_flight else [])
    as_in_engines = (Packing.AUTO, None) if in_flight else (Packing.ALWAYS, recipe.engine.weight_format)
    assert seen["formats"] == [as_in_engines] * len(seen["judging"])
    assert subject.quantization is recipe.engine.quantization
    # Kept caches would bias what is drawn: the certificate recomputes them, and names what the run does.
    assert seen["caches"] == [KvCache.RECOMPUTE if in_flight else None, None]
    assert subject.kv_cache is (KvCache.KEEP if in_flight else None)
    assert (across is not None) == in_flight
    if across is not None:
        found = [(to.policy, to.policy_version, to.draft, to.draft_version) for to in across.keywords["refits"]]
        first, last = (models["draft"], trained_draft) if learned else (None, None)
        assert found == [(models["policy"], 0, first, 0), (trained, 24, last, 1)]


def test_a_certificate_of_no_tuned_length_needs_a_kind_of_drafts(tmp_path: Path, refusal: Callable[..., str]) -> None:
    auto = load_recipe("tiny", overrides={"draft": {"sampling": "auto"}})
    paths = {"policy": tmp_path, "data": tmp_path, "draft": tmp_path}
    assert refusal(partial(stage.certify_alone, run_context(tmp_path), auto, **paths, k=3)) == (
        "draft.sampling must be probabilistic or greedy where no draft length is tuned, got 'auto'; "
        "tuning alone compares the two"
    )


@pytest.mark.parametrize(
    ("k", "words"),
    [
        (0, "num_speculative_tokens must be >= 1, got 0"),  # an engine without drafts is no subject of a certificate
        (60, "engine.max_model_len must hold data.max_prompt_tokens"),
    ],
)
def test_a_certificate_of_a_k_that_no_engine_can_draft_is_refused(
    tmp_path: Path, refusal: Callable[..., str], k: int, words: str
) -> None:
    paths = {"policy": tmp_path, "data": tmp_path, "draft": tmp_path}
    assert refusal(partial(stage.certify_alone, run_context(tmp_path), load_recipe("tiny"), **paths, k=k)).startswith(
        words
    )
