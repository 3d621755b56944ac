"""A recipe is refused as a whole before anything starts, with a message that says how to fix it."""

import re
from pathlib import Path

import pytest
import yaml

from slipstream.config import merge, parse_overrides
from slipstream.recipe import CONFIGS, difference, load_recipe, parameters, resolve_recipe, write_recipe
from slipstream.types import Workload
from tests.unit.conftest import Refusal
from tests.unit.refusals import overrides, refused, rows


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
@pytest.mark.parametrize("workload", list(Workload))
def test_every_shipped_recipe_is_valid_and_survives_writing(path: Path, workload: Workload, tmp_path: Path) -> None:
    recipe = load_recipe(path.stem, workload=workload)
    assert recipe.workload is workload
    assert load_recipe(str(write_recipe(recipe, tmp_path / "recipe.yaml"))) == recipe


def written(directory: Path, text: str) -> str:
    """A recipe file: the embedded one with the sections of `text` laid over it."""
    values = merge(yaml.safe_load((CONFIGS / "tiny.yaml").read_text()), yaml.safe_load(text))
    directory.mkdir(exist_ok=True)
    (directory / "mine.yaml").write_text(yaml.safe_dump(values))
    return str(directory / "mine.yaml")


def test_what_nobody_gave_changes_nothing_and_what_was_given_wins_over_the_file(tmp_path: Path) -> None:
    name = written(tmp_path, "{workload: rl_think, grpo: {seed: 5}}")
    kept = load_recipe(name)
    assert (kept.workload, kept.grpo.seed, kept.engine.max_model_len) == (Workload.RL_THINK, 5, 512)
    given = load_recipe(name, workload=Workload.RL_ZERO, overrides={"grpo": {"seed": 0}})
    assert (given.workload, given.grpo.seed, given.engine.max_model_len) == (Workload.RL_ZERO, 0, 288)
    launched = load_recipe(name, overrides={"workload": "rl_zero"})
    assert (launched.workload, launched.engine.max_model_len) == (Workload.RL_ZERO, 288)


def test_a_written_recipe_says_behind_each_field_who_gave_it_this_value(tmp_path: Path) -> None:
    name = written(tmp_path, "{workload: rl_think, data: {instruction: 'first # line\n\nlast: {problem}'}}")
    recipe, origins = resolve_recipe(name, overrides={"grpo": {"seed": 7}, "tuning": {"candidate_ks": [0, 3]}})
    path = write_recipe(recipe, tmp_path / "resolved.yaml", origins)
    assert load_recipe(str(path)) == recipe
    lines = [line.strip() for line in path.read_text().splitlines()]
    assert {"seed: 7  # launch", "candidate_ks:  # launch", "workload: rl_think  # recipe"} <= {*lines}
    assert {"max_model_len: 512  # recipe, workloads.rl_think", "num_steps: 24  # recipe"} <= {*lines}
    assert "clip_low: 0.2" in lines  # the default
    assert any(line.endswith("last: {problem}'  # recipe") for line in lines)
    assert "#" not in write_recipe(recipe, tmp_path / "bare.yaml").read_text().replace("first # line", "")


def test_relative_paths_lie_beside_the_file_or_where_a_launch_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipes" / "sets").mkdir(parents=True)
    (tmp_path / "recipes" / "mathematics").mkdir()
    (tmp_path / "caller" / "policy").mkdir(parents=True)
    text = """
    data:
      train: [{path: rows.jsonl}, {path: ../more.parquet, max_rows: 3}, {path: sets}, {path: synthetic}, {path: a/hub}]
      validation: [{path: /absolute.jsonl}, {path: ~/home.json}]
    workloads: {rl_zero: {data: {draft_general: [{path: ./chats.jsonl}]}}}
    tracking: {uri: "sqlite:///runs.db"}
    reward: {functions: [{function: mathematics}, {function: own.py:f}]}
    """
    name = written(tmp_path / "recipes", text)
    monkeypatch.chdir(tmp_path / "caller")
    launched = {"policy": {"model": "policy", "scratch": None}, "draft": {"init": "from_hub", "model": "./draft"}}
    recipe = load_recipe("../recipes/mine.yaml", overrides=launched)
    base = str(tmp_path / "recipes")
    paths = [f"{base}/rows.jsonl", f"{tmp_path}/more.parquet", f"{base}/sets", "synthetic", "a/hub"]
    assert [source.path for source in recipe.data.train] == paths
    assert [source.path for source in recipe.data.validation] == ["/absolute.jsonl", str(Path.home() / "home.json")]
    assert recipe.data.draft_general[0].path == f"{base}/chats.jsonl"
    assert recipe.tracking.uri == f"sqlite:///{base}/runs.db"
    assert [part.function for part in recipe.reward.functions] == ["mathematics", f"{base}/own.py:f"]
    assert recipe.policy.model == f"{tmp_path}/caller/policy"
    assert recipe.draft.model == f"{tmp_path}/caller/draft"
    assert load_recipe(name, overrides=launched) == recipe
    stranger = load_recipe(name, overrides={"data": {"train": [{"path": "~nobody-here/a.jsonl"}]}})
    assert stranger.data.train[0].path == f"{tmp_path}/caller/~nobody-here/a.jsonl"
    server = load_recipe(name, overrides={"tracking": {"uri": "http://127.0.0.1:5000"}})
    assert server.tracking.uri == "http://127.0.0.1:5000"


ADAMW = ("grpo.optimizer.method=adamw", "policy.scratch.optimizer.method=adamw")
CAPPED = "grpo.loss.truncated_importance_sampling=2.0"
NAMED = {
    "ADAMW": ADAMW,
    "CAPPED": (CAPPED,),
    "LAGS": ("loop={mode: one_step_off, max_off_policy_steps: 2}",),
    "IN_FLIGHT": ("loop={mode: in_flight, max_off_policy_steps: 1}", CAPPED),
    "IN_TURN": ("placement.memory=in_turn",),
    "ONLINE": ("draft.online.when=always", *ADAMW),
    "MIXTURE": (f"policy.model={Path(__file__).parent / 'recipe_fields' / 'mixture'}", "policy.scratch=null"),
    "ON_GPU": ("engine={kv_cache_gib: null, gpu_memory_utilization: 0.19}", "placement.gpus_per_node=1"),
    "INT8": ("engine.quantization=int8", CAPPED),
    "MTP": ("draft.method=mtp", "draft.pretrain.optimizer.method=adamw"),
}


@rows(
    """
engine.backend=sglang + engine.tensor_parallel_size=2
    engine.tensor_parallel_size must be 1 with engine.backend sglang, got 2;
engine.backend=sglang + loop.mode=one_step_off
    loop.mode must be synchronous with engine.backend sglang, got 'one_step_off';
engine.backend=sglang + refit.channel=gloo
    refit.channel must be auto or shared_memory with engine.backend sglang, got 'gloo';
engine.backend=sglang + evaluation.sampling.top_p=0.9
    evaluation.sampling.top_p must be 1.0 with engine.backend sglang, got 0.9;
engine.backend=sglang + evaluation.sampling.top_k=5
    evaluation.sampling.top_k must be 0 with engine.backend sglang, got 5;
engine.backend=sglang + INT8 => engine.quantization must be none with engine.backend sglang, got 'int8';
engine={backend: sglang, kv_cache_gib: null, gpu_memory_utilization: 0.1} + placement.gpus_per_node=1
    engine.kv_cache_gib must be given with engine.backend sglang, got None;
grpo.group_sise=4 => unknown key 'grpo.group_sise'; did you mean 'grpo.group_size'?
draft.num_prompts=4 => unknown key 'draft.num_prompts'; did you mean 'draft.pretrain.num_prompts'?
draft.suffix_max_tree_depth=4 => unknown key 'draft.suffix_max_tree_depth'; did you mean 'draft.suffix.max_tree_depth'?
draft.online_learning_rate=1
    unknown key 'draft.online_learning_rate'; did you mean 'draft.online.optimizer.learning_rate'?
policy.scratch.num_layers=4 => unknown key 'policy.scratch.num_layers'; did you mean 'policy.scratch.shape.num_layers'?
data.synthetic.num_leaked=31 => data.synthetic.num_leaked must be <= num_validation_problems (30), got 31
data.synthetic.num_train_problems=7 => data.synthetic.num_conflicting must be <= num_train_problems (7), got 8
data.synthetic.max_terms=2 => data.synthetic.max_terms must be >= min_terms (3), got 2
data.synthetic.min_terms=11 + data.synthetic.max_terms=11
    data.synthetic.min_terms times max_term must be <= 999, the largest answer, got 11; lower min_terms or max_term
draft.draft_model.shape.num_query_groups=3
    draft.draft_model.shape.num_query_groups must divide num_attention_heads 2, got 3
tuning.batch_sizes=[12, 64] => tuning.batch_sizes must be multiples of grpo.group_size 8, got [12]
engine.max_model_len=248 + evaluation.sampling.max_response_tokens=1
    engine.max_model_len must hold ... 64 + sampling.max_response_tokens 160 + 25 ... k 13 = 249 tokens, got 248;
engine.max_model_len=248 + sampling.max_response_tokens=1
    engine.max_model_len must hold ... evaluation.sampling.max_response_tokens 160 + 25 ... k 13 = 249 tokens, got 248;
engine.max_model_len=225 + tuning.candidate_ks=[0, 1]
    engine.max_model_len must hold ... 64 + sampling.max_response_tokens 160 + 2 ... k 1 = 226 tokens, got 225;
engine.max_model_len=1024 => engine.max_model_len must be <= policy.scratch.max_position_embeddings 512, got 1024
engine.max_model_len=1025 + policy.rope={type: yarn, factor: 2}
    engine.max_model_len must be <= policy.scratch.max_position_embeddings 512, which ... extends to 1024, got 1025
policy.rope={type: yarn, factor: 2, original_max_position_embeddings: 513}
    policy.rope.original_max_position_embeddings must be <= the policy's 512 positions, got 513;
policy.scratch.num_mtp_layers=1 + policy.scratch.shape.head_dim=16
    policy.scratch.shape.head_dim must be hidden_size 128 / num_attention_heads 4 with MTP, got 16;
engine.kv_cache_gib=null => engine.gpu_memory_utilization must be at most 0.95 / tuning.max_live_engines 5, got 0.6;
engine={kv_cache_gib: null, gpu_memory_utilization: 0.1} + tuning.gpu_memory_utilization=0.2
    tuning.gpu_memory_utilization must be at most 0.95 / tuning.max_live_engines 5, got 0.2;
engine={kv_cache_gib: null, gpu_memory_utilization: 0.1} => engine.kv_cache_gib must be given without GPUs, got None;
placement.gpus_per_node=1 => engine.kv_cache_gib must be null with GPUs, got 0.4;
placement={gpus_per_node: 1, logical_gpus: true, memory: in_turn}
    placement.memory must be 'shared' without GPUs, got 'in_turn';
refit.channel=nccl => refit.channel must do without CUDA: engine.kv_cache_gib is for engines on CPUs, got 'nccl';
refit.channel=ipc => refit.channel must do without CUDA: engine.kv_cache_gib is for engines on CPUs, got 'ipc';
sampling.top_p=0.9
    sampling.top_p and sampling.top_k must leave the policy's distribution whole in training, got (0.9, 0);
sampling.top_k=20
    sampling.top_p and sampling.top_k must leave the policy's distribution whole in training, got (1.0, 20);
policy.lora.rank=65 + ADAMW => policy.lora.rank must be at most 64, the shorter side of k_proj, got 65;
policy.lora.rank=8 + grpo.optimizer.method=muon => grpo.optimizer.method must be adamw with policy.lora, got 'muon';
sampling.temperature=0.0 => sampling.temperature must be > 0 for training, got 0.0;
grpo.dynamic_sampling.max_extra_batches=1 + draft.autopilot=true
    draft.autopilot must be false with grpo.dynamic_sampling.max_extra_batches 1, got True;
grpo.dynamic_sampling.max_extra_batches=2 + loop.mode=one_step_off
    grpo.dynamic_sampling.max_extra_batches must be 0 with loop.mode one_step_off, got 2;
ON_GPU + IN_FLIGHT
    placement.mode must be split with loop.mode in_flight, got 'colocated';
ON_GPU + IN_TURN + IN_FLIGHT => placement.memory must be 'shared' with loop.mode in_flight, got 'in_turn';
ON_GPU + IN_TURN + engine.num_kept_idle=1
    engine.num_kept_idle must be 0 with placement.memory 'in_turn', got 1;
ON_GPU + IN_TURN + engine.num_kept_idle=0 + learner.num_kept_idle=1
    learner.num_kept_idle must be 0 with placement.memory 'in_turn', got 1;
IN_FLIGHT + engine.num_engines=7
    engine.num_engines must be at most grpo.prompts_per_step 6 with loop.mode in_flight, got 7;
IN_FLIGHT + engine.max_num_seqs=7
    grpo.group_size must be at most engine.max_num_seqs 7 with loop.mode in_flight, got 8;
IN_FLIGHT + draft.autopilot=true => draft.autopilot must be false with loop.mode in_flight, got True;
ON_GPU + grpo.router_replay=true => grpo.router_replay must be false for a dense policy, got True;
MIXTURE + grpo.router_replay=true
    grpo.router_replay must be false with engines on CPUs (engine.kv_cache_gib), got True;
MIXTURE + ON_GPU + grpo.router_replay=true + loop.mode=one_step_off
    grpo.router_replay must be false with loop.mode one_step_off, got True;
reward.overlong.buffer_tokens=161
    reward.overlong.buffer_tokens must be at most sampling.max_response_tokens 160, got 161;
learner.max_tokens_per_microbatch=223
    learner.max_tokens_per_microbatch must hold one whole sequence of 224 tokens, got 223
draft.eagle3.aux_hidden_state_layer_ids=[2, 12, 24]
    draft.eagle3.aux_hidden_state_layer_ids must be in [0, 24), the policy's layers, got (2, 12, 24)
draft.method=dflash
    draft.pretrain.ttt_steps must be >= the longest of tuning.candidate_ks, 13, with draft.method dflash, got 4;
draft.method=dflash + draft.pretrain.ttt_steps=13 + engine.max_model_len=249
    engine.max_model_len must hold ... 64 + sampling.max_response_tokens 160 + 26 ... k 13 = 250 tokens, got 249;
MTP => policy.scratch.num_mtp_layers must be 1 with draft.method mtp, got 0;
learner.parallel.data=25 + grpo.updates_per_step=2
    learner.parallel.data must be at most the 24 rollouts of an update, got 25;
ONLINE + draft.online.updates=49
    draft.online.updates must be at most the 48 rollouts of an update / 1 data-parallel ranks, got 49;
ONLINE + draft.online.updates=25 + learner.parallel.data=2
    draft.online.updates must be at most the 48 rollouts of an update / 2 data-parallel ranks, got 25;
ONLINE + draft.method=ngram => draft.online.when must be off with draft.method ngram, got 'always';
ONLINE + MTP + learner.parallel.pipeline=2
    learner.parallel must have pipeline 1, context 1 and sequence_parallel false with draft.method mtp, got ...;
policy.scratch.num_mtp_layers=1 + learner.parallel.context=2
    learner.parallel.context must be 1 for a policy with an MTP layer, which reads the states of whole sequences, got 2
learner.parallel.context=4
    learner.parallel.context must divide the 2 key-value heads that learner.parallel.tensor 1 leaves each rank, got 4;
loop={mode: one_step_off, max_off_policy_steps: 2}
    grpo.loss.correction must be given with loop.max_off_policy_steps 2, got None;
engine.quantization=fp8
    engine.quantization must be none or int8 with engines on CPUs (engine.kv_cache_gib), got 'fp8';
engine.quantization=int8 => grpo.loss.correction must be given with engine.quantization int8, got None;
INT8 + policy.scratch.num_mtp_layers=1 + MTP => draft.method must not be mtp with engine.quantization int8, got 'mtp';
INT8 + learner.parallel.tensor=2 + ADAMW
    engine.tensor_parallel_size must be a multiple of learner.parallel.tensor 2 with engine.quantization int8, got 1;
MIXTURE + INT8 => engine.quantization must be none for a mixture of experts, got 'int8';
"""
)
def test_a_broken_rule_names_field_rule_value_and_fix(given: str, expected: str) -> None:
    """Dots stand for some words, and after a semicolon the error says the fix."""
    wanted = re.escape(expected).replace(r"\.\.\.", ".*") + (" .+" if expected.endswith(";") else "")
    assert re.fullmatch(wanted, refused(given, NAMED))


ON_A_BOUND = """
engine.max_model_len=249
engine.max_model_len=512
engine.max_model_len=226 + tuning.candidate_ks=[0, 1]
learner.max_tokens_per_microbatch=224
reward.overlong.buffer_tokens=160
grpo.dynamic_sampling.max_extra_batches=2
sampling.temperature=0.5
draft.eagle3.aux_hidden_state_layer_ids=[2, 12, 23]
MTP + policy.scratch.num_mtp_layers=1
draft.method=dflash + draft.pretrain.ttt_steps=13 + engine.max_model_len=250
draft.method=dflash + draft.pretrain.ttt_steps=13 + draft.eagle3.aux_hidden_state_layer_ids=[2, 12, 24]
placement={gpus_per_node: 1, logical_gpus: true}
engine={kv_cache_gib: null, gpu_memory_utilization: 0.475} + tuning.max_live_engines=2 + placement.gpus_per_node=1
ON_GPU + tuning={max_live_engines: 2, gpu_memory_utilization: 0.475}
learner.parallel.tensor=2 + ADAMW
draft.online.when=always + draft.online.updates=48
draft.online.when=always + draft.online.updates=24 + learner.parallel.data=2
loop={mode: one_step_off, max_off_policy_steps: 0}
LAGS + CAPPED
LAGS + CAPPED + grpo.loss.correction=sequence
LAGS + grpo.loss.correction=none
INT8
engine.quantization=int8 + grpo.loss.correction=none
LAGS + CAPPED + draft.autopilot=true
IN_FLIGHT + engine={num_engines: 6, max_num_seqs: 8}
engine={num_engines: 7, max_num_seqs: 7} + draft.autopilot=true
ON_GPU + IN_TURN + engine.num_kept_idle=0 + learner.num_kept_idle=0
"""


@pytest.mark.parametrize("given", ON_A_BOUND.strip().splitlines())
def test_what_stands_on_a_bound_is_taken(given: str) -> None:
    load_recipe("tiny", overrides=overrides(given, NAMED))


def test_a_workloads_section_lies_over_the_recipe_and_overrides_lie_over_both() -> None:
    override = {"workload": "rl_think", "sampling": {"max_response_tokens": 300}}
    found = [
        (recipe.workload, *(each.max_response_tokens for each in (recipe.sampling, recipe.evaluation.sampling)))
        for recipe in (
            load_recipe("tiny"),
            load_recipe("tiny", workload=Workload.RL_THINK),
            load_recipe("tiny", overrides=override),
        )
    ]
    think = Workload.RL_THINK
    assert found == [(Workload.RL_ZERO, 160, 160), (think, 384, 384), (think, 300, 384)]


def test_a_recipe_may_be_any_yaml_file_and_an_unknown_one_names_the_known_ones(
    tmp_path: Path, refusal: Refusal
) -> None:
    for name in ("mine.yaml", "mine.yml"):
        path = write_recipe(load_recipe("tiny"), tmp_path / "new" / "deeper" / name)
        assert load_recipe(str(path)) == load_recipe("tiny")
    assert path.read_text().startswith("name: tiny\nworkload: rl_zero\npolicy:\n")  # in the fields' order
    assert refusal(lambda: load_recipe("tinny")) == (
        "recipe must name a recipe file, got 'tinny'; known recipes: dapo_8b, qwen2.5_1.5b_gsm8k, "
        "qwen3_1.7b, qwen3_8b, qwen3_8b_h200, smollm2, tiny, tiny_async, tiny_gpu, tiny_long"
    )


@pytest.mark.parametrize(
    ("workloads", "message"),
    [
        ("{rl_thnk: {grpo: {seed: 1}}}", "workloads.rl_thnk must be of a known workload, got 'rl_thnk'; known: "),
        ("{sft: {}}", "workloads.sft must be of a known workload, got 'sft'; known: rl_zero, rl_think"),
        ("{1: {}}", "workloads.1 must be of a known workload, got 1; known: rl_zero, rl_think"),
        ("[rl_think]", "workloads must be a mapping of workload to what it changes, got ['rl_think']"),
        ("{rl_think: off}", "workloads.rl_think must be a mapping of field to value, got 'off'"),
        ("{rl_think: {grpo: {gruop_size: 4}}}", "unknown key 'workloads.rl_think.grpo.gruop_size'; did you mean 'work"),
        ("{rl_think: {data: {train: [{splt: b}]}}}", "unknown key 'workloads.rl_think.data.train[0].splt'; did you me"),
        ("{rl_think: {workload: rl_zero}}", "workloads.rl_think.workload must be left out: the section is of that wo"),
    ],
)
def test_a_workloads_section_is_checked_though_another_workload_is_run(
    refusal: Refusal, tmp_path: Path, workloads: str, message: str
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"base: tiny\nname: mine\nworkloads: {workloads}\n")
    for workload in (None, Workload.RL_ZERO, Workload.RL_THINK):
        assert refusal(load_recipe, name=str(path), workload=workload).startswith(message)


def test_a_recipe_may_start_from_another_and_say_what_it_changes(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    middle = tmp_path / "middle.yaml"
    middle.write_text(
        "base: tiny\nname: middle\ndata: {train: [{path: ./mine.jsonl}]}\ngrpo: {num_steps: 3}\n"
        "workloads: {rl_think: {grpo: {num_steps: 4}}}\n"
    )
    top = tmp_path / "below" / "top.yaml"
    top.write_text("base: ../middle.yaml\nname: top\ngrpo: {group_size: 16}\n")
    recipe, tiny = load_recipe(str(top)), load_recipe("tiny")
    assert (recipe.name, recipe.grpo.num_steps, recipe.grpo.group_size) == ("top", 3, 16)
    assert recipe.data.train[0].path == str(tmp_path / "mine.jsonl")
    assert (recipe.draft, recipe.grpo.optimizer) == (tiny.draft, tiny.grpo.optimizer)
    thinking = load_recipe(str(top), workload=Workload.RL_THINK)
    assert thinking.grpo.num_steps == 4
    assert thinking.sampling == load_recipe("tiny", workload=Workload.RL_THINK).sampling


def test_what_a_recipe_gives_lies_over_its_base_in_every_workload(tmp_path: Path) -> None:
    middle, top = tmp_path / "middle.yaml", tmp_path / "top.yaml"
    middle.write_text("base: qwen3_8b\nname: middle\nworkloads: {rl_think: {grpo: {num_steps: 4}, data: {seed: 5}}}\n")
    top.write_text("base: middle.yaml\nname: top\npolicy: {model: my/model}\ngrpo: {num_steps: 3}\n")
    recipe, origins = resolve_recipe(str(top), workload=Workload.RL_THINK)
    assert (recipe.policy.model, recipe.grpo.num_steps, recipe.data.seed) == ("my/model", 3, 5)
    assert (origins["policy.model"], origins["data.seed"]) == ("recipe", "recipe, workloads.rl_think")
    assert load_recipe("qwen3_8b", workload=Workload.RL_THINK).policy.model == "Qwen/Qwen3-8B"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base: tiny\ngrpo: {num_steps: 3}\n", "name must be given beside base, got None; runs are found by it"),
        ("base: 3\nname: mine\n", "base must name a recipe, got 3"),
        ("base: tyni\nname: mine\n", "recipe must name a recipe file, got 'tyni'; known recipes: "),
        ("base: mine.yaml\nname: mine\n", "base must not lead back to the recipe itself, got 'mine.yaml'"),
        ("base: tiny\nname: mine\ngrpo: {group_siz: 3}\n", "unknown key 'grpo.group_siz'; did you mean"),
    ],
)
def test_a_base_that_cannot_be_is_refused(refusal: Refusal, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    assert refusal(lambda: load_recipe(str(tmp_path / "mine.yaml"))).startswith(message)


@pytest.mark.parametrize(
    "workloads", ["", "workloads:", "workloads: {}", "workloads: {rl_think: }", "workloads: {rl_think: {}, rl_zero: ~}"]
)
def test_an_empty_section_of_workloads_changes_nothing(tmp_path: Path, workloads: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text((CONFIGS / "tiny.yaml").read_text().partition("\nworkloads:")[0] + f"\n{workloads}\n")
    assert load_recipe(str(path), workload=Workload.RL_THINK).sampling.max_response_tokens == 160
    assert load_recipe(str(path)) == load_recipe("tiny")


@pytest.mark.parametrize("name", ["off", "1e-4", "2026-11-25", "010", "12:30", "null", "a: b", "-", "x # y", "käse\n"])
def test_a_recipe_is_read_back_as_it_was_written_whatever_its_words(tmp_path: Path, name: str) -> None:
    source = {"path": name, "subset": name, "split": name}
    changes = {"name": name, "data": {"train": [source], "instruction": f"{name} {{problem}}"}}
    recipe = load_recipe("tiny", overrides=changes)
    assert load_recipe(str(write_recipe(recipe, tmp_path / "mine.yaml"))) == recipe


KEPT = (
    *("name=other", "tracking.uri=http://host", "tuning.num_repeats=9", "losslessness.num_tokens=9"),
    *("evaluation={num_samples_per_problem: 9, every_steps: 3}", "refit.check_every_steps=9", "simulator=null"),
    *("grpo.num_steps=99", "grpo.checkpoint_every_steps=9", "engine.num_kept_idle=9"),
    *(f"{each}={{answer_timeout_s: 9, start_timeout_s: 9, max_restarts: 9}}" for each in ("engine", "learner")),
)
MATTERS = (
    *("grpo.seed=9", "engine.max_num_seqs=9", "reward.timeout_s=9", "data.seed=9", "draft.seed=9"),
    "loop.mode=one_step_off",
)


@pytest.mark.parametrize("override", [*KEPT, *MATTERS])
def test_a_fingerprint_is_of_what_the_weights_depend_on(override: str) -> None:
    fingerprint = load_recipe("tiny").fingerprint()
    assert len(fingerprint) == 16
    changed = load_recipe("tiny", overrides=parse_overrides([override])).fingerprint()
    assert (changed == fingerprint) is (override in KEPT)


def test_the_first_field_that_two_recipes_do_not_share_is_named_with_both_its_values() -> None:
    tiny, without = load_recipe("tiny"), load_recipe("tiny", overrides={"simulator": None})
    other = load_recipe("tiny", overrides={"grpo": {"seed": 3, "optimizer": {"learning_rate": 0.5}}})
    assert difference(tiny, other) == ("grpo.optimizer.learning_rate", 3e-4, 0.5)
    assert difference(other, tiny) == ("grpo.optimizer.learning_rate", 0.5, 3e-4)
    assert difference(without, tiny) == ("simulator.hardware", None, "cpu-2core")
    assert difference(tiny, without) == ("simulator.hardware", "cpu-2core", None)
    assert difference(tiny, load_recipe("tiny", overrides={"tracking": {"replay_every_s": 7}})) is None


def test_parameters_are_every_field_as_text_but_where_the_run_is_tracked() -> None:
    found = parameters(load_recipe("tiny"))
    assert found["name"] == "tiny"  # not '"tiny"'
    assert found["grpo.group_size"] == "8"
    assert found["engine.enforce_eager"] == "true"
    assert found["learner.logprob_chunk_tokens"] == "null"
    assert found["tuning.candidate_ks"] == "[0, 3, 7, 10, 13]"
    assert not [name for name in found if name.startswith("tracking")]
