"""Seconds of one iteration by cause, worked by hand."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.catalog import Precision, load_model, section_names
from slipstream.simulator import Array
from slipstream.simulator.iteration import CostModel, Drafting, active_experts
from slipstream.simulator.settings import IDEAL, CostParameters, Regime, Setting, load_setting

DENSE = replace(load_setting("paper-8b"), gpus_per_engine=1)
_HOST = {"host_s": 3e-3, "host_per_token_s": 1e-5, "eager_s_per_layer": 2.5e-4, "tile_factor": 1.0}
_DRAFT = {"draft_pass_s": 3e-4, "attention_per_draft_token": 0.15, "ngram_s_per_token": 2e-8, "speculation_s": 5e-4}
PARAMETERS = CostParameters(bandwidth_efficiency=0.7, compute_efficiency=0.5, **_HOST, **_DRAFT)

regimes = st.sampled_from(list(Regime))
names = st.sampled_from(section_names("models"))
batches = st.integers(min_value=1, max_value=512)
contexts = st.floats(min_value=1.0, max_value=32_000.0)
LARGEST = {"host_s": 0.02, "host_per_token_s": 1e-3, "eager_s_per_layer": 1e-2, "tile_factor": 5.0}
LARGEST |= {"draft_pass_s": 0.01, "attention_per_draft_token": 2.0, "ngram_s_per_token": 1e-6, "speculation_s": 0.01}
efficiencies = {name: st.floats(0.1, 1.0) for name in ("bandwidth_efficiency", "compute_efficiency")}
costs = st.builds(CostParameters, **efficiencies, **{name: st.floats(0.0, most) for name, most in LARGEST.items()})


def setting(name: str) -> Setting:
    return replace(DENSE, model=name, gpus_per_engine=8, precision=Precision.FLOAT8)


def only(parameters: CostParameters, regime: Regime) -> CostParameters:
    """Without what the other structures add."""
    others = {"eager_s_per_layer": Regime.CAPTURED, "tile_factor": Regime.TILE}
    return replace(parameters, **{field: 0.0 for field, of in others.items() if of is not regime})


def cost(
    name: str, parameters: CostParameters, batch: float, context: float, k: int, regime: Regime = Regime.SMOOTH
) -> dict[str, Array]:
    model = CostModel(setting=setting(name), parameters=only(parameters, regime))
    return model.iteration(batch_S=np.array([batch]), context_S=np.array([batch * context]), k=k)


def ideal(batch: float, context: float) -> dict[str, Array]:
    model = CostModel(setting=DENSE, parameters=IDEAL)
    return model.iteration(batch_S=np.array([batch]), context_S=np.array([context]), k=0)


def total(
    name: str, parameters: CostParameters, batch: float, context: float, k: int, regime: Regime = Regime.SMOOTH
) -> float:
    return float(sum(cost(name, parameters, batch, context, k, regime).values(), np.zeros(1))[0])


@given(names, costs, batches, contexts, st.integers(0, 15), regimes)
def test_a_bigger_batch_and_one_more_draft_token_are_never_cheaper_per_iteration(
    name: str, parameters: CostParameters, batch: int, context: float, k: int, regime: Regime
) -> None:
    smaller = total(name, parameters, batch, context, k, regime)
    assert total(name, parameters, batch + 1, context, k, regime) >= smaller
    assert total(name, parameters, batch, context, k + 1, regime) >= smaller


def test_an_ideal_small_batch_reads_the_weights_once_a_large_one_is_bound_by_flops_and_attention_by_the_context() -> (
    None
):
    # 7.568 G parameters that every token reads, two bytes each, at 8 TB/s: 1.892 ms.
    assert sum(ideal(1.0, 0.0).values(), np.zeros(1))[0] == pytest.approx(1.892e-3, rel=1e-3)
    # 2 x 7.568 G flops a token, 4,096 tokens, 2.5 PF: 24.8 ms.
    assert ideal(4096.0, 0.0)["weights"][0] == pytest.approx(24.8e-3, rel=1e-3)
    # 36 layers x 8 heads x 128 x 2 (keys, values) x 2 bytes = 147,456 bytes a token; a million tokens at 8 TB/s.
    assert ideal(1.0, 1e6)["attention"][0] == pytest.approx(147_456e6 / 8e12, rel=1e-9)


def test_a_draft_of_eagle_makes_k_passes_and_an_ngram_scans_the_context() -> None:
    model = CostModel(setting=setting("qwen3-8b"), parameters=PARAMETERS)

    def drafted(k: int, drafting: Drafting) -> float:
        batch, context = np.array([4.0]), np.array([4000.0])
        return float(model.iteration(batch_S=batch, context_S=context, k=k, drafting=drafting)["draft"][0])

    eagle = [drafted(k, Drafting.EAGLE3) - 5e-4 for k in (1, 3)]
    assert eagle[1] == pytest.approx(3 * eagle[0])
    assert eagle[0] > 3e-4
    assert drafted(3, Drafting.NGRAM) == pytest.approx(5e-4 + 4000 * 2e-8)
    assert drafted(0, Drafting.EAGLE3) == drafted(0, Drafting.NGRAM) == 0.0


def test_a_dflash_draft_makes_one_pass_of_five_layers_over_the_block_of_every_sequence() -> None:
    # Qwen3-8B: a layer of 192.9 M parameters and 16.8 M for the features that it reads, five times; a head of 131.1 M.
    model, batch = CostModel(setting=setting("qwen3-8b"), parameters=PARAMETERS), 512.0
    assert setting("qwen3-8b").model_shape.dflash_parameters == 5 * (192_937_984 + 16_777_216) + 131_072_000

    def drafted(k: int, context: float) -> float:
        at = {"batch_S": np.array([batch]), "context_S": np.array([context])}
        return float(model.iteration(**at, k=k, drafting=Drafting.DFLASH)["draft"][0])

    # 512 x 16 tokens, two flops a parameter, at half of 8 x 5 PF; five launches of 0.3 ms, and 0.5 ms of speculation.
    flops_s = 2 * 1_179_648_000 * batch * 16 / (PARAMETERS.compute_efficiency * 8 * 5e15)
    assert drafted(15, 0.0) == pytest.approx(flops_s + 5 * PARAMETERS.draft_pass_s + PARAMETERS.speculation_s)
    # Five of the 36 layers' 73,728 bytes of keys and values a token.
    read_s = 5 / 36 * 73_728e6 / (PARAMETERS.bandwidth_efficiency * 8 * 8e12)
    assert drafted(15, 1e6) - drafted(15, 0.0) == pytest.approx(read_s)
    assert drafted(0, 0.0) == 0.0


def test_leaving_the_captured_sizes_costs_an_eager_iteration() -> None:
    # 128 x 4 = 512 tokens are captured, 128 x 6 are not: 36 layers x 0.25 ms.
    inside = cost("qwen3-8b", PARAMETERS, 128, 1000, 3, Regime.CAPTURED)
    outside = cost("qwen3-8b", PARAMETERS, 128, 1000, 5, Regime.CAPTURED)
    assert inside["regime"][0] == 0.0
    assert outside["regime"][0] == pytest.approx(36 * 2.5e-4)


@pytest.mark.parametrize(("k", "extra_tiles"), [(0, 0), (3, 0), (4, 0.625), (5, 0.75), (7, 1), (8, 1.625)])
def test_a_tile_holds_sixteen_query_rows(k: int, extra_tiles: float) -> None:
    # Qwen3-8B has 4 queries a key-value head: 4 (k + 1) rows. At k = 5 they are 24: a second tile, half full.
    found = cost("qwen3-8b", PARAMETERS, 16, 1000, k, Regime.TILE)
    plain = cost("qwen3-8b", PARAMETERS, 16, 1000, 0, Regime.TILE)
    assert found["regime"][0] == pytest.approx(extra_tiles * plain["attention"][0])


def test_an_engine_across_domains_reduces_over_the_network_too_by_a_belief_with_a_source() -> None:
    # 16 H100 in two domains of 8: two all-reduces in each of 36 layers, over NVLink and then over the network.
    ideal = {"parameters": IDEAL, "network_collective_s": 3e-5}
    inside, across = (replace(DENSE, hardware="h100", gpus_per_engine=gpus, num_gpus=64) for gpus in (8, 16))
    batch = {"batch_S": np.array([10.0]), "context_S": np.array([0.0]), "k": 0}
    nvlink_s = 10e-6 + 2 * 7 / 8 * 10 * 4096 * 2 / 0.45e12
    network_s = 3e-5 + 10 * 4096 * 2 / (8 * 50e9)
    found = [CostModel(setting=setting, **ideal).iteration(**batch)["host"][0] for setting in (inside, across)]
    assert found[0] == pytest.approx(2 * 36 * nvlink_s)
    assert found[1] == pytest.approx(2 * 36 * (nvlink_s + network_s))
    assert CostModel(setting=DENSE, parameters=IDEAL).network_collective_s == 3e-5


def test_experts_fill_up_with_tokens() -> None:
    model = load_model("qwen3-235b-a22b")
    active = active_experts(model, np.array([1.0, 2.0, 1e4]))
    assert active[0] == pytest.approx(8.0)  # one token hits its eight
    assert active[1] == pytest.approx(15.5)  # 128 (1 - (15/16)^2)
    assert active[2] == pytest.approx(128.0)
