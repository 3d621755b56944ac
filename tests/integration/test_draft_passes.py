"""An eager EAGLE-3 draft's passes on a CPU: the tokens and probabilities that vLLM's own passes give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.drafts.methods import speculative_config
from slipstream.workers.engines import start_engine
from tests.small import DRAFT, ENGINE, PROMPTS, SAMPLING, require_equal

pytestmark = pytest.mark.slow

KNOWN = (3, *range(5, 40, 2), 63)


def llama_draft(path: Path, policy: Path) -> Path:
    """A random draft with all that the other has not: a Llama's layer, a vocabulary of its own, and every norm."""
    from speculators.models.eagle3 import Eagle3DraftModel
    from transformers import LlamaConfig

    from slipstream.drafts.eagle3 import fresh_draft, layer_config, save_draft

    known = layer_config(policy).to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    sizes = {name: known[name] for name in (*names, "rms_norm_eps", "max_position_embeddings")}
    layer = LlamaConfig(**sizes, num_hidden_layers=1, tie_word_embeddings=False)
    norms = {"norm_before_residual": False, "fc_norm": True, "norm_output": True}
    reads = {"ttt_steps": 3, "target_layer_ids": [1, 2, 3]}
    save_draft(fresh_draft(Eagle3DraftModel, layer, policy, KNOWN, seed=3, **norms, **reads), path)
    return path


def proposed(process: Any, is_vllms: bool) -> tuple[list[Any], list[np.ndarray], int]:
    """Traces, the probabilities of each proposal, and the number of vLLM's own proposals; runs in the engine."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    from slipstream.engine import vllm_eager

    proposer: Any = SpecDecodeBaseProposer
    assert proposer.propose is vllm_eager.propose, "the plugin installs them"
    probabilities, num_shipped, shipped = [], [0], vllm_eager.SHIPPED_PROPOSAL

    def counted(*args: Any, **given: Any) -> Any:
        num_shipped[0] += 1
        return shipped(*args, **given)

    def kept(own: Any, **given: Any) -> Any:
        tokens = counted(own, **given) if is_vllms else vllm_eager.propose(own, **given)
        if own.take_last_draft_probs() is not None:  # None of requests that are greedy
            probabilities.append(own.take_last_draft_probs().numpy().copy())
        return tokens

    vllm_eager.SHIPPED_PROPOSAL, proposer.propose = counted, kept
    try:
        traces = process.trace(PROMPTS, sampling=SAMPLING, group_size=4, seed=1)
    finally:
        vllm_eager.SHIPPED_PROPOSAL, proposer.propose = shipped, vllm_eager.propose
    return traces, probabilities, num_shipped[0]


@pytest.mark.parametrize("is_llama", [False, True], ids=["qwen3", "llama, few tokens, norms"])
def test_own_passes_propose_what_vllms_do(
    models: dict[str, Path], tmp_path: Path, ray_session: None, is_llama: bool
) -> None:
    draft = llama_draft(tmp_path / "draft", models["old"]) if is_llama else models["old_draft"]
    with start_engine(models["old"], config=ENGINE, speculative_config=speculative_config(DRAFT, draft, 3)) as engine:

        def run(is_vllms: bool) -> tuple[list[Any], list[np.ndarray], int]:
            (answer,) = engine._crew.ask("proposals", lambda actor: actor.__ray_call__.remote(proposed, is_vllms))
            return answer

        traces, probabilities, num_shipped = run(is_vllms=False)
        by_vllm, expected, num_by_vllm = run(is_vllms=True)
        first, second = (engine.generate(PROMPTS, sampling=SAMPLING, group_size=4, seed=1) for _ in range(2))
    require_equal(first, second)  # drafts of the traces are in no generation's counts
    assert (num_shipped, num_by_vllm) == (0, len(expected))
    assert traces == by_vllm
    assert len({trace.window_lengths for trace in traces}) > 1, "drafts are accepted, and not always"
    for found, exact in zip(probabilities, expected, strict=True):
        assert found.shape == exact.shape
        assert np.allclose(found, exact, atol=1e-5)
        assert np.allclose(found.sum(axis=-1), 1.0, atol=1e-5)
