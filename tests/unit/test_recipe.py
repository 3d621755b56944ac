"""A recipe is refused as a whole before anything starts, with a message that says how to fix it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.config import merge, parse_overrides
from slipstream.recipe import CONFIGS, difference, load_recipe, parameters, resolve_recipe, write_recipe
from slipstream.types import Workload


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
@pytest.mark.parametrize("workload", list(Workload))
def test_every_shipped_recipe_is_valid_and_survives_writing(path: Path, workload: Workload, tmp_path: Path) -> None:
    recipe = load_recipe(path.stem, workload=workload)
    assert recipe.workload is workload
    assert load_recipe(str(write_recipe(recipe, tmp_path / "recipe.yaml"))) == recipe


def test_an_unknown_recipe_names_the_known_ones(refusal: Callable[..., str]) -> None:
    assert (
        refusal(lambda: load_recipe("tinny"))
        == "recipe must name a recipe file, got 'tinny'; known recipes: dapo_8b, qwen2.5_1.5b_gsm8k, "
        "qwen3_1.7b, qwen3_8b, qwen3_8b_h200, smollm2, tiny, tiny_async, tiny_gpu, tiny_long"
    )


def written(directory: Path, text: str, name: str = "mine.yaml") -> str:
    """A recipe file: the embedded one with the sections of `text` laid over it."""
    values = merge(yaml.safe_load((CONFIGS / "tiny.yaml").read_text()), yaml.safe_load(text))
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(yaml.safe_dump(values))
    return str(directory / name)


def test_what_nobody_gave_changes_nothing_and_what_was_given_wins_over_the_file(tmp_path: Path) -> None:
    name = written(tmp_path, "{workload: rl_think, grpo: {seed: 5}}")
    kept = load_recipe(name)
    assert (kept.workload, kept.grpo.seed, kept.engine.max_model_len) == (Workload.RL_THINK, 5, 480)
    given = load_recipe(name, workload=Workload.RL_ZERO, overrides={"grpo": {"seed": 0}})
    assert (given.workload, given.grpo.seed, given.engine.max_model_len) == (Workload.RL_ZERO, 0, 256)
    launched = load_recipe(name, overrides={"workload": "rl_zero"})
    assert (launched.workload, launched.engine.max_model_len) == (Workload.RL_ZERO, 256)


def test_a_written_recipe_says_behind_each_field_who_gave_it_this_value(tmp_path: Path) -> None:
    name = written(tmp_path, "{workload: rl_think, data: {instruction: 'first # line\n\nlast: {problem}'}}")
    recipe, origins = resolve_recipe(name, overrides={"grpo": {"seed": 7}, "tuning": {"candidate_ks": [0, 3]}})
    path = write_recipe(recipe, tmp_path / "resolved.yaml", origins)
    assert load_recipe(str(path)) == recipe
    lines = [line.strip() for line in path.read_text().splitlines()]
    assert "seed: 7  # launch" in lines
    assert "candidate_ks:  # launch" in lines
    assert "workload: rl_think  # recipe" in lines
    assert "max_model_len: 480  # recipe, workloads.rl_think" in lines
    assert "num_steps: 24  # recipe" in lines
    assert "clip_low: 0.2" in lines  # the default
    assert any(line.endswith("last: {problem}'  # recipe") for line in lines)
    assert "#" not in write_recipe(recipe, tmp_path / "bare.yaml").read_text().replace("first # line", "")


def test_relative_paths_of_a_recipe_are_those_beside_its_file_and_of_a_launch_those_of_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipes" / "sets").mkdir(parents=True)
    (tmp_path / "caller" / "policy").mkdir(parents=True)
    text = """
    data:
      train: [{path: rows.jsonl}, {path: ../more.parquet, max_rows: 3}, {path: sets}, {path: synthetic}, {path: a/hub}]
      validation: [{path: /absolute.jsonl}, {path: ~/home.json}]
    workloads: {rl_zero: {data: {draft_general: [{path: ./chats.jsonl}]}}}
    tracking: {uri: "sqlite:///runs.db"}
    """
    name = written(tmp_path / "recipes", text)
    monkeypatch.chdir(tmp_path / "caller")
    launched = {"policy": {"model": "policy", "scratch": None}, "draft": {"init": "from_hub", "model": "./draft"}}
    recipe = load_recipe("../recipes/mine.yaml", overrides=launched)
    base = str(tmp_path / "recipes")
    assert [source.path for source in recipe.data.train] == [
        f"{base}/rows.jsonl",
        f"{tmp_path}/more.parquet",
        f"{base}/sets",
        "synthetic",
        "a/hub",
    ]
    assert [source.path for source in recipe.data.validation] == ["/absolute.jsonl", str(Path.home() / "home.json")]
    assert recipe.data.draft_general[0].path == f"{base}/chats.jsonl"
    assert recipe.tracking.uri == f"sqlite:///{base}/runs.db"
    assert recipe.policy.model == f"{tmp_path}/caller/policy"
    assert recipe.draft.model == f"{tmp_path}/caller/draft"
    assert load_recipe(name, overrides=launched) == recipe
    stranger = load_recipe(name, overrides={"data": {"train": [{"path": "~nobody-here/a.jsonl"}]}})
    assert stranger.data.train[0].path == f"{tmp_path}/caller/~nobody-here/a.jsonl"
    server = load_recipe(name, overrides={"tracking": {"uri": "http://127.0.0.1:5000"}})
    assert server.tracking.uri == "http://127.0.0.1:5000"


CRASH = (
    "raise it, or lower one of the others: where a sequence nears max_model_len, vLLM stops drafting for its whole "
    "batch, and one that ends there with k+1 tokens in flight crashes the engine"
)


WHOLE = "the learner's logprobs know no truncation: set top_p 1.0 and top_k 0"
NO_CUDA = "refit.channel must do without CUDA: engine.kv_cache_gib is for engines on CPUs, got"
ADAMW = ("grpo.optimizer.method=adamw", "policy.scratch.optimizer.method=adamw")
ONLINE = ("draft.online.when=always", *ADAMW)
MIXTURE = (f"policy.model={Path(__file__).parent / 'recipe_fields' / 'mixture'}", "policy.scratch=null")
ON_GPU = ("engine={kv_cache_gib: null, gpu_memory_utilization: 0.19}",)
ROLLOUTS = "draft.online.updates must be at most the 48 rollouts of an update /"
INT8 = ("engine.quantization=int8", "grpo.loss.truncated_importance_sampling=2.0")
ON_SGLANG = "engine.backend=sglang"
SGLANG_FIX = "it computes on CPUs, reads new weights from files, and gives the logprobs of the whole distribution"
REFUSED: dict[tuple[str, ...], str] = {
    **{
        (ON_SGLANG, f"{field}={value}"): f"{field} must be {rule} with engine.backend sglang, got {got}; {SGLANG_FIX}"
        for field, value, rule, got in (
            ("engine.tensor_parallel_size", "2", "1", "2"),
            ("loop.mode", "one_step_off", "synchronous", "'one_step_off'"),
            ("refit.channel", "gloo", "auto or shared_memory", "'gloo'"),
            ("evaluation.sampling.top_p", "0.9", "1.0", "0.9"),
            ("evaluation.sampling.top_k", "5", "0", "5"),
        )
    },
    (ON_SGLANG, *INT8): f"engine.quantization must be none with engine.backend sglang, got 'int8'; {SGLANG_FIX}",
    (ON_SGLANG, "engine.kv_cache_gib=null", "engine.gpu_memory_utilization=0.1"): "engine.kv_cache_gib must be given "
    f"with engine.backend sglang, got None; {SGLANG_FIX}",
    ("grpo.group_sise=4",): "unknown key 'grpo.group_sise'; did you mean 'grpo.group_size'?",
    ("draft.num_prompts=4",): "unknown key 'draft.num_prompts'; did you mean 'draft.pretrain.num_prompts'?",
    ("draft.suffix_max_tree_depth=4",): "unknown key 'draft.suffix_max_tree_depth'; did you mean "
    "'draft.suffix.max_tree_depth'?",
    ("draft.online_learning_rate=1",): "unknown key 'draft.online_learning_rate'; did you mean "
    "'draft.online.optimizer.learning_rate'?",
    ("policy.scratch.num_layers=4",): "unknown key 'policy.scratch.num_layers'; did you mean "
    "'policy.scratch.shape.num_layers'?",
    ("draft.draft_model.shape.num_query_groups=3",): "draft.draft_model.shape.num_query_groups must divide "
    "num_attention_heads 2, got 3",
    ("tuning.batch_sizes=[12, 64]",): "tuning.batch_sizes must be multiples of grpo.group_size 8, got [12]",
    ("engine.max_model_len=236", "evaluation.sampling.max_response_tokens=1"): "engine.max_model_len must hold "
    f"data.max_prompt_tokens 64 + sampling.max_response_tokens 160 + 13 for drafts of k 7 = 237 tokens, got 236; "
    f"{CRASH}",
    ("engine.max_model_len=236", "sampling.max_response_tokens=1"): "engine.max_model_len must hold "
    f"data.max_prompt_tokens 64 + evaluation.sampling.max_response_tokens 160 + 13 for drafts of k 7 = 237 "
    f"tokens, got 236; {CRASH}",
    # One draft token needs room for two.
    ("engine.max_model_len=225", "tuning.candidate_ks=[0, 1]"): "engine.max_model_len must hold "
    f"data.max_prompt_tokens 64 + sampling.max_response_tokens 160 + 2 for drafts of k 1 = 226 tokens, got 225; "
    f"{CRASH}",
    (
        "engine.max_model_len=1024",
    ): "engine.max_model_len must be <= policy.scratch.max_position_embeddings 512, got 1024",
    ("engine.max_model_len=1025", "policy.rope={type: yarn, factor: 2}"): "engine.max_model_len must be <= "
    "policy.scratch.max_position_embeddings 512, which policy.rope extends to 1024, got 1025",
    ("policy.rope={type: yarn, factor: 2, original_max_position_embeddings: 513}",): "policy.rope."
    "original_max_position_embeddings must be <= the policy's 512 positions, got 513; it is the length that the model "
    "was trained on",
    ("policy.scratch.num_mtp_layers=1", "policy.scratch.shape.head_dim=16"): "policy.scratch.shape.head_dim must be "
    "hidden_size 128 / num_attention_heads 4 with MTP, got 16; vLLM's MiMo knows no other",
    ("engine.kv_cache_gib=null",): "engine.gpu_memory_utilization must be at most 0.95 / tuning.max_live_engines 5, "
    "got 0.6; tuning compares engines that live at once; tuning.gpu_memory_utilization is for these engines alone",
    (
        "engine={kv_cache_gib: null, gpu_memory_utilization: 0.1}",
        "tuning.gpu_memory_utilization=0.2",
    ): "tuning.gpu_memory_utilization must be at most 0.95 / tuning.max_live_engines 5, got 0.2; tuning compares "
    "engines that live at once",
    ("refit.channel=nccl",): f"{NO_CUDA} 'nccl'; set auto",
    ("refit.channel=ipc",): f"{NO_CUDA} 'ipc'; set auto",
    (
        "sampling.top_p=0.9",
    ): "sampling.top_p and sampling.top_k must leave the policy's distribution whole in training, "
    f"got (0.9, 0); {WHOLE}",
    ("sampling.top_k=20",): "sampling.top_p and sampling.top_k must leave the policy's distribution whole in training, "
    f"got (1.0, 20); {WHOLE}",
    (
        "policy.lora.rank=65",
        *ADAMW,
    ): "policy.lora.rank must be at most 64, the shorter side of k_proj, got 65; the matrix itself has no higher rank",
    ("policy.lora.rank=8", "grpo.optimizer.method=muon"): "grpo.optimizer.method must be adamw with policy.lora, got "
    "'muon'; it steps whole matrices, not their factors: take adamw",
    ("sampling.temperature=0.0",): "sampling.temperature must be > 0 for training, got 0.0; greedy rollouts of a group "
    "are all equal and teach nothing",
    ("grpo.dynamic_sampling.max_extra_batches=1", "draft.autopilot=true"): "draft.autopilot must be false with "
    "grpo.dynamic_sampling.max_extra_batches 1, got True; it weighs one generation a step against another: leave out "
    "one of them",
    ("grpo.dynamic_sampling.max_extra_batches=2", "loop.mode=one_step_off"): "grpo.dynamic_sampling.max_extra_batches "
    "must be 0 with loop.mode one_step_off, got 2; there prompts are submitted before the rewards of others are known: "
    "set loop.mode synchronous",
    (
        *ON_GPU,
        "grpo.router_replay=true",
    ): "grpo.router_replay must be false for a dense policy, got True; it has no routers: leave it out",
    (
        *MIXTURE,
        "grpo.router_replay=true",
    ): "grpo.router_replay must be false with engines on CPUs (engine.kv_cache_gib), "
    "got True; vLLM returns the routes of its model runner for GPUs alone",
    (*MIXTURE, *ON_GPU, "grpo.router_replay=true", "loop.mode=one_step_off"): "grpo.router_replay must be false with "
    "loop.mode one_step_off, got True; the routes of rollouts that wait for training are not kept: set loop.mode "
    "synchronous",
    ("reward.overlong.buffer_tokens=161",): "reward.overlong.buffer_tokens must be at most "
    "sampling.max_response_tokens 160, got 161; the penalty begins that many tokens before the limit",
    ("learner.max_tokens_per_microbatch=223",): "learner.max_tokens_per_microbatch must hold one whole sequence of 224 "
    "tokens, got 223",
    ("draft.eagle3.aux_hidden_state_layer_ids=[2, 12, 24]",): "draft.eagle3.aux_hidden_state_layer_ids must be in "
    "[0, 24), the policy's layers, got (2, 12, 24)",
    ("draft.method=dflash",): "draft.pretrain.ttt_steps must be >= the longest of tuning.candidate_ks, 7, with "
    "draft.method dflash, got 4; its blocks are that long: raise it, or shorten tuning.candidate_ks",
    ("draft.method=dflash", "draft.pretrain.ttt_steps=7", "engine.max_model_len=237"): "engine.max_model_len must hold "
    "data.max_prompt_tokens 64 + sampling.max_response_tokens 160 + 14 for drafts of k 7 = 238 tokens, got 237; raise "
    "it, or lower one of the others: where a sequence nears max_model_len, vLLM stops drafting for its whole batch, "
    "and one that ends there with k+1 tokens in flight crashes the engine",
    ("draft.method=mtp",): "policy.scratch.num_mtp_layers must be 1 with draft.method mtp, got 0; or choose another "
    "method",
    (
        "learner.parallel.data=25",
        "grpo.updates_per_step=2",
    ): "learner.parallel.data must be at most the 24 rollouts of an "
    "update, got 25; each rank learns from rollouts of its own: lower it or grpo.updates_per_step, or sample more "
    "rollouts",
    (*ONLINE, "draft.online.updates=49"): f"{ROLLOUTS} 1 data-parallel ranks, got 49; each learns from rollouts of its "
    "own",
    (*ONLINE, "draft.online.updates=25", "learner.parallel.data=2"): f"{ROLLOUTS} 2 data-parallel ranks, got 25; each "
    "learns from rollouts of its own",
    (
        *ONLINE,
        "draft.method=ngram",
    ): "draft.online.when must be off with draft.method ngram, got 'always'; nothing of it is trained during RL",
    (*ONLINE, "draft.method=mtp", "learner.parallel.pipeline=2"): "learner.parallel must have pipeline 1, "
    "context 1 and sequence_parallel false with draft.method mtp, got ParallelConfig(tensor=1, pipeline=2, context=1, "
    "data=1, expert=1, sequence_parallel=False); the MTP layer reads whole states, and the embeddings beside them: "
    "split by tensor and data",
    (
        "policy.scratch.num_mtp_layers=1",
        "learner.parallel.context=2",
    ): "learner.parallel.context must be 1 for a policy "
    "with an MTP layer, which reads the states of whole sequences, got 2",
    ("learner.parallel.context=4",): "learner.parallel.context must divide the 2 key-value heads that "
    "learner.parallel.tensor 1 leaves each rank, got 4; attention splits whole heads over these ranks: lower it, or "
    "tensor",
    ("loop={mode: one_step_off, max_off_policy_steps: 2}",): "grpo.loss.correction must be given with "
    "loop.max_off_policy_steps 2, got None; rollouts are of older policies than the one that learns: set token or "
    "sequence with a cap, grpo.loss.truncated_importance_sampling, or none in so many words",
    (
        "engine.quantization=fp8",
    ): "engine.quantization must be none or int8 with engines on CPUs (engine.kv_cache_gib), "
    "got 'fp8'; vLLM multiplies 8-bit floats on GPUs alone",
    ("engine.quantization=int8",): "grpo.loss.correction must be given with engine.quantization int8, got None; the "
    "policy that samples differs from the one that learns: set token or sequence with a cap, "
    "grpo.loss.truncated_importance_sampling, or none in so many words",
    (*INT8, "policy.scratch.num_mtp_layers=1", "draft.method=mtp"): "draft.method must not be mtp with "
    "engine.quantization int8, got 'mtp'; the MTP layer is a layer of the policy, and vLLM would quantize it too",
    (*INT8, "learner.parallel.tensor=2", *ADAMW): "engine.tensor_parallel_size must be a multiple of "
    "learner.parallel.tensor 2 with engine.quantization int8, got 1; the judge of a certificate rounds inputs as each "
    "rank of an engine does",
    (*MIXTURE, *INT8): "engine.quantization must be none for a mixture of experts, got 'int8'; vLLM's kernels of "
    "experts have layouts of their own",
}


@pytest.mark.parametrize("overrides", REFUSED, ids=", ".join)
def test_a_broken_rule_names_field_rule_value_and_fix(refusal: Callable[..., str], overrides: tuple[str, ...]) -> None:
    assert refusal(lambda: load_recipe("tiny", overrides=parse_overrides(overrides))) == REFUSED[overrides]


LAGS = "loop={mode: one_step_off, max_off_policy_steps: 2}"
CAPPED = "grpo.loss.truncated_importance_sampling=2.0"


@pytest.mark.parametrize(
    "overrides",
    [
        ("engine.max_model_len=237",),
        ("engine.max_model_len=512",),
        ("engine.max_model_len=226", "tuning.candidate_ks=[0, 1]"),
        ("learner.max_tokens_per_microbatch=224",),
        ("reward.overlong.buffer_tokens=160",),
        ("grpo.dynamic_sampling.max_extra_batches=2",),
        ("sampling.temperature=0.5",),
        ("draft.eagle3.aux_hidden_state_layer_ids=[2, 12, 23]",),
        ("draft.method=mtp", "policy.scratch.num_mtp_layers=1"),
        ("draft.method=dflash", "draft.pretrain.ttt_steps=7", "engine.max_model_len=238"),
        ("engine={kv_cache_gib: null, gpu_memory_utilization: 0.475}", "tuning.max_live_engines=2"),
        (
            "engine={kv_cache_gib: null, gpu_memory_utilization: 0.9}",
            "tuning={max_live_engines: 2, gpu_memory_utilization: 0.475}",
        ),
        ("learner.parallel.tensor=2", *ADAMW),
        ("draft.online.when=always", "draft.online.updates=48"),
        ("draft.online.when=always", "draft.online.updates=24", "learner.parallel.data=2"),
        ("loop={mode: one_step_off, max_off_policy_steps: 0}",),
        (LAGS, CAPPED),
        (LAGS, CAPPED, "grpo.loss.correction=sequence"),
        (LAGS, "grpo.loss.correction=none"),
        INT8,
        ("engine.quantization=int8", "grpo.loss.correction=none"),
        (LAGS, CAPPED, "draft.autopilot=true"),
        ("loop={mode: in_flight, max_off_policy_steps: 1}", CAPPED, "engine={num_engines: 6, max_num_seqs: 8}"),
    ],
    ids=", ".join,
)
def test_what_stands_on_a_bound_is_taken(overrides: tuple[str, ...]) -> None:
    load_recipe("tiny", overrides=parse_overrides(overrides))


def test_a_policy_that_is_loaded_has_no_sizes_to_hold_against() -> None:
    recipe = load_recipe("qwen3_8b", overrides={"grpo": {"optimizer": {"method": "adamw"}}})
    assert (recipe.policy.scratch, recipe.learner.parallel.tensor) == (None, 2)


def test_a_workloads_section_lies_over_the_recipe_and_overrides_lie_over_both() -> None:
    zero, think = load_recipe("tiny"), load_recipe("tiny", workload=Workload.RL_THINK)
    assert (zero.workload, zero.sampling.max_response_tokens) == (Workload.RL_ZERO, 160)
    assert (think.workload, think.sampling.max_response_tokens, think.engine.max_model_len) == (
        Workload.RL_THINK,
        384,
        480,
    )
    override = {"workload": "rl_think", "sampling": {"max_response_tokens": 300}}
    by_override = load_recipe("tiny", overrides=override)
    assert (by_override.workload, by_override.sampling.max_response_tokens) == (Workload.RL_THINK, 300)
    assert by_override.evaluation.sampling.max_response_tokens == 384


def test_a_recipe_may_be_any_yaml_file(tmp_path: Path) -> None:
    for name in ("mine.yaml", "mine.yml"):
        path = write_recipe(load_recipe("tiny"), tmp_path / "new" / "deeper" / name)
        assert load_recipe(str(path)) == load_recipe("tiny")
    assert path.read_text().startswith("name: tiny\nworkload: rl_zero\npolicy:\n")  # in the fields' order


def tiny_with(directory: Path, workloads: str) -> str:
    """The path of a recipe like tiny whose section `workloads` is another."""
    text = (CONFIGS / "tiny.yaml").read_text().partition("\nworkloads:")[0]
    path = directory / "mine.yaml"
    path.write_text(f"{text}\n{workloads}\n")
    return str(path)


@pytest.mark.parametrize(
    ("workloads", "message"),
    [
        (
            "workloads: {rl_thnk: {grpo: {seed: 1}}}",
            "workloads.rl_thnk must be of a known workload, got 'rl_thnk'; did you mean 'rl_think'?",
        ),
        ("workloads: {sft: {}}", "workloads.sft must be of a known workload, got 'sft'; known: rl_zero, rl_think"),
        ("workloads: {1: {}}", "workloads.1 must be of a known workload, got 1; known: rl_zero, rl_think"),
        ("workloads: [rl_think]", "workloads must be a mapping of workload to what it changes, got ['rl_think']"),
        ("workloads: {rl_think: off}", "workloads.rl_think must be a mapping of field to value, got 'off'"),
        (
            "workloads: {rl_think: {grpo: {gruop_size: 4}}}",
            "unknown key 'workloads.rl_think.grpo.gruop_size'; did you mean 'workloads.rl_think.grpo.group_size'?",
        ),
        (
            "workloads: {rl_think: {data: {train: [{path: a, splt: b}]}}}",
            "unknown key 'workloads.rl_think.data.train[0].splt'; did you mean "
            "'workloads.rl_think.data.train[0].split'?",
        ),
        (
            "workloads: {rl_think: {workload: rl_zero}}",
            "workloads.rl_think.workload must be left out: the section is of that workload, got 'rl_zero'",
        ),
    ],
)
def test_a_workloads_section_is_checked_though_another_workload_is_run(
    refusal: Callable[..., str], tmp_path: Path, workloads: str, message: str
) -> None:
    path = tiny_with(tmp_path, workloads)
    for workload in (None, Workload.RL_ZERO, Workload.RL_THINK):
        assert refusal(load_recipe, name=path, workload=workload) == message


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
def test_a_base_that_cannot_be_is_refused(refusal: Callable[..., str], tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    assert refusal(lambda: load_recipe(str(tmp_path / "mine.yaml"))).startswith(message)


@pytest.mark.parametrize(
    "workloads", ["", "workloads:", "workloads: {}", "workloads: {rl_think: }", "workloads: {rl_think: {}, rl_zero: ~}"]
)
def test_an_empty_section_of_workloads_changes_nothing(tmp_path: Path, workloads: str) -> None:
    path = tiny_with(tmp_path, workloads)
    assert load_recipe(path, workload=Workload.RL_THINK).sampling.max_response_tokens == 160
    assert load_recipe(path) == load_recipe("tiny")


def test_words_that_yaml_1_1_reads_as_switches_are_words_in_a_recipe(tmp_path: Path) -> None:
    text = (
        "workloads: {rl_think: {draft: {online: {when: off}}, data: {train: [{path: a.jsonl, split: on, subset: no}]}}}"
    )
    recipe = load_recipe(tiny_with(tmp_path, text), workload=Workload.RL_THINK)
    (source,) = recipe.data.train
    assert (recipe.draft.online.when.value, source.split, source.subset) == ("off", "on", "no")
    assert load_recipe(str(write_recipe(recipe, tmp_path / "written.yaml"))) == recipe


@pytest.mark.parametrize("name", ["off", "1e-4", "2026-11-25", "010", "12:30", "null", "a: b", "-", "x # y", "käse\n"])
def test_a_recipe_is_read_back_as_it_was_written_whatever_its_words(tmp_path: Path, name: str) -> None:
    source = {"path": name, "subset": name, "split": name}
    changes = {"name": name, "data": {"train": [source], "instruction": f"{name} {{problem}}"}}
    recipe = load_recipe("tiny", overrides=changes)
    assert load_recipe(str(write_recipe(recipe, tmp_path / "mine.yaml"))) == recipe


@pytest.mark.parametrize(
    ("overrides", "same"),
    [
        ({"name": "other"}, True),
        ({"tracking": {"uri": "http://host"}}, True),
        ({"tuning": {"num_repeats": 9}}, True),
        ({"evaluation": {"num_samples_per_problem": 9, "every_steps": 3}}, True),
        ({"losslessness": {"num_tokens": 9}}, True),
        ({"refit": {"check_every_steps": 9}}, True),
        ({"simulator": None}, True),
        ({"grpo": {"num_steps": 99}}, True),
        ({"grpo": {"checkpoint_every_steps": 9}}, True),
        ({"engine": {"num_kept_idle": 9}}, True),
        ({"engine": {"answer_timeout_s": 9, "start_timeout_s": 9, "max_restarts": 9}}, True),
        ({"learner": {"answer_timeout_s": 9, "start_timeout_s": 9, "max_restarts": 9}}, True),
        ({"grpo": {"seed": 9}}, False),
        ({"engine": {"max_num_seqs": 9}}, False),
        ({"reward": {"timeout_s": 9}}, False),
        ({"data": {"seed": 9}}, False),
        ({"draft": {"seed": 9}}, False),
        ({"loop": {"mode": "one_step_off"}}, False),
    ],
)
def test_a_fingerprint_is_of_what_the_weights_depend_on(overrides: dict[str, Any], same: bool) -> None:
    recipe = load_recipe("tiny").fingerprint()
    assert len(recipe) == 16
    assert (load_recipe("tiny", overrides=overrides).fingerprint() == recipe) is same


def test_the_first_field_that_two_recipes_do_not_share_is_named_with_both_its_values() -> None:
    tiny = load_recipe("tiny")
    other = load_recipe("tiny", overrides={"grpo": {"seed": 3, "optimizer": {"learning_rate": 0.5}}})
    assert difference(tiny, other) == ("grpo.optimizer.learning_rate", 3e-4, 0.5)
    assert difference(other, tiny) == ("grpo.optimizer.learning_rate", 0.5, 3e-4)
    assert difference(tiny, load_recipe("tiny")) is None


def test_a_section_that_only_one_recipe_has_is_a_difference() -> None:
    with_projection = load_recipe("tiny")
    without = load_recipe("tiny", overrides={"simulator": None})
    assert difference(without, with_projection) == ("simulator.hardware", None, "cpu-2core")
    assert difference(with_projection, without) == ("simulator.hardware", "cpu-2core", None)


def test_where_a_run_is_tracked_is_no_difference() -> None:
    assert difference(load_recipe("tiny"), load_recipe("tiny", overrides={"tracking": {"replay_every_s": 7}})) is None


def test_parameters_are_every_field_as_text_but_where_the_run_is_tracked() -> None:
    found = parameters(load_recipe("tiny"))
    assert found["name"] == "tiny"  # not '"tiny"'
    assert found["grpo.group_size"] == "8"
    assert found["engine.enforce_eager"] == "true"
    assert found["learner.logprob_chunk_tokens"] == "null"
    assert found["tuning.candidate_ks"] == "[0, 1, 3, 5, 7]"
    assert not [name for name in found if name.startswith("tracking")]


IN_FLIGHT = ("loop={mode: in_flight, max_off_policy_steps: 1}", CAPPED)
ALONE = "a group runs on one engine, and "
IN_TURN = "nobody's turn ever comes to what is kept for later stages, and it holds memory"


@pytest.mark.parametrize(
    ("recipe", "given", "and_then", "message"),
    [
        (
            *("qwen3_8b", (), IN_FLIGHT),
            "placement.mode must be split with loop.mode in_flight, got 'colocated'; learner and engines that share a "
            "GPU work in turn: set split, or loop.mode synchronous",
        ),
        (
            *("qwen3_8b", ("placement.memory=in_turn",), IN_FLIGHT),
            "placement.memory must be 'shared' with loop.mode in_flight, got 'in_turn'; there learner and engines "
            "work at the same time: leave it out, or set loop.mode synchronous",
        ),
        (
            *("tiny", ("engine.num_engines=7",), IN_FLIGHT),
            "engine.num_engines must be at most grpo.prompts_per_step 6 with loop.mode in_flight, got 7; "
            f"{ALONE}the others would have no work",
        ),
        (
            *("tiny", ("engine.max_num_seqs=7",), IN_FLIGHT),
            "grpo.group_size must be at most engine.max_num_seqs 7 with loop.mode in_flight, got 8; "
            f"{ALONE}whoever waits for room there grows old",
        ),
        (
            *("tiny", ("draft.autopilot=true",), IN_FLIGHT),
            "draft.autopilot must be false with loop.mode in_flight, got True; it weighs one generation "
            "against another, and here none ends: set loop.mode one_step_off",
        ),
        *(
            (
                *("qwen3_8b", (f"{section}.num_kept_idle=1",), ("placement.memory=in_turn",)),
                f"{section}.num_kept_idle must be 0 with placement.memory 'in_turn', got 1; {IN_TURN}",
            )
            for section in ("engine", "learner")
        ),
    ],
)
def test_what_a_recipe_may_say_alone_is_refused_where_the_rest_cannot_serve_it(
    refusal: Callable[..., str], recipe: str, given: tuple[str, ...], and_then: tuple[str, ...], message: str
) -> None:
    load_recipe(recipe, overrides=parse_overrides(given))
    assert refusal(lambda: load_recipe(recipe, overrides=parse_overrides((*given, *and_then)))) == message
