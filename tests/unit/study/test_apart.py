"""An ablation is planned whole or not at all; a part says how it ended, and what needs it is not tried without it."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.config import ConfigError
from slipstream.drafts.config import DraftInit, DraftMethod
from slipstream.kubernetes.profile import ClusterProfile, FlyteServer, read_profile
from slipstream.recipe import load_recipe
from slipstream.records.files import write_record
from slipstream.records.steps import ArmRecord
from slipstream.stages.context import RunContext, recorded_recipe
from slipstream.study import apart
from slipstream.study.apart import PartRecord, collect, ending, fail_ablation, make_part, plan_ablation, read_plan
from slipstream.study.variants import Grid, Kind
from slipstream.tracking.spool import Event, read_spool
from slipstream.types import Arm
from tests.small import UNTRACKED
from tests.unit.kubernetes.api_server import Answer, Cluster, serving
from tests.unit.report.handmade import step

VARIANT = "rl_zero-in_domain-eagle3-kl_div-k3-seed0"
OTHER = "rl_zero-in_domain-eagle3-kl_div-k5-seed0"
DRAFT = "draft-rl_zero-in_domain-eagle3-kl_div-seed0"


def plan(root: Path, cluster: str = "local", **changes: Any) -> dict[Kind, list[RunContext]]:
    how = {"root": root, "execution": "abl", "requested": {"tracking": UNTRACKED}, "cluster": read_profile(cluster)}
    return plan_ablation("tiny", Grid(**{"draft_lengths": (3, 5), **changes}), **how)


def ended(root: Path, name: str, reason: str = "") -> None:
    write_record(PartRecord(reason=reason), root / "abl" / name / "part.json")


def reasons(root: Path) -> dict[str, str]:
    return {failure.variant.name: failure.reason for failure in collect(root, read_plan(root, "abl")).failures}


def events(root: Path) -> list[Event]:
    return [event for path in (root / "spool").glob("*.jsonl") for event in read_spool(path).events]


def test_every_part_has_a_context_and_a_recipe_of_its_own_below_the_ablations(tmp_path: Path) -> None:
    planned = plan(tmp_path)
    assert [context.execution for context in planned[Kind.POLICY]] == ["abl/policy-rl_zero"]
    assert [context.execution for context in planned[Kind.VARIANT]] == [f"abl/{VARIANT}", f"abl/{OTHER}"]
    assert {context.part_of for contexts in planned.values() for context in contexts} == {"abl"}
    assert load_recipe(str(recorded_recipe(tmp_path, f"abl/{VARIANT}"))).tuning.candidate_ks == (0, 3)
    assert len(read_plan(tmp_path, "abl").parts) == 5
    assert "candidate_ks:  # launch\n" in recorded_recipe(tmp_path, f"abl/{VARIANT}").read_text()


def test_all_parts_score_by_the_reward_that_the_ablation_began_with(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def score(data_source, solution_str, ground_truth, extra_info): return 1.0")
    given = {"cluster": read_profile("local"), "requested": {"reward": {"function": f"{file}:score"}}}
    plan_ablation("tiny", Grid(draft_lengths=(3, 5)), root=tmp_path / "runs", execution="abl", **given)
    file.write_text("def score(data_source, solution_str, ground_truth, extra_info): return 0.0")
    paths = [recorded_recipe(tmp_path / "runs", f"abl/{name}") for name in (VARIANT, OTHER, "baseline-rl_zero-seed0")]
    (function,) = {load_recipe(str(path)).reward.function for path in paths}
    assert "return 1.0" in Path(str(function).rpartition(":")[0]).read_text()


def test_a_variant_whose_package_is_not_here_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"draft\.method must do without the package arctic_inference"):
        plan(tmp_path, methods=(DraftMethod.SUFFIX,))


def test_an_ablation_does_not_start_beside_another_execution_on_gpu_nodes_without_a_queue(tmp_path: Path) -> None:
    alone = replace(read_profile("gb200"), queue=None)

    def begin(execution: str, cluster: ClusterProfile = alone) -> None:
        given = {"execution": execution, "requested": {"tracking": UNTRACKED}, "cluster": cluster}
        plan_ablation("qwen3_8b", Grid(draft_lengths=(3,)), root=tmp_path, **given)

    begin("first")
    begin("first")  # another attempt of the same
    with pytest.raises(ConfigError, match=r"must be alone on cluster gb200, which has no queue, got 'second, first'"):
        begin("second")
    executions = "GET /api/v1/executions/slipstream/development"
    ended = {"id": {"name": "first"}, "closure": {"phase": "ABORTED"}}
    answers: dict[str, Answer] = {executions: (200, {}), f"{executions}/first": (200, ended)}
    with serving(Cluster(answers=answers)) as (_, address):
        begin("second", replace(alone, flyte=FlyteServer(endpoint=address)))


def test_the_ablations_run_is_open_and_tracks_its_grid_with_the_recipes_axes(tmp_path: Path) -> None:
    plan(tmp_path, draft_inits=(DraftInit.IN_DOMAIN,))
    (opened,) = events(tmp_path)
    assert opened.header is not None
    assert opened.header.tags["slipstream.kind"] == "ablation"
    names = ("grid.draft_inits", "grid.draft_lengths", "grid.losses", "grid.seeds")
    assert [opened.header.params[name] for name in names] == ["in_domain", "3, 5", "the recipe's", "the recipe's"]


@pytest.mark.parametrize(
    ("cluster", "lengths", "message"),
    [
        ("local", (3, 99), r"^variant rl_zero-in_domain-eagle3-kl_div-k99-seed0: engine"),
        ("gb200", (3,), r"^placement\.gpus_per_node must be 1 to 4 on cluster gb200, got 0"),
    ],
)
def test_a_refused_variant_refuses_all_and_leaves_nothing(
    tmp_path: Path, cluster: str, lengths: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(tmp_path, cluster, draft_lengths=lengths)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("failed", "reason"),
    [
        ("", f"{DRAFT} left no record: its task was lost or never started"),
        ("ConfigError: too few prompts", f"{DRAFT} failed: ConfigError: too few prompts"),
    ],
)
def test_a_variant_is_not_tried_without_its_draft_and_says_why(tmp_path: Path, failed: str, reason: str) -> None:
    context = plan(tmp_path)[Kind.VARIANT][0]
    ended(tmp_path, "policy-rl_zero")
    ended(tmp_path, "baseline-rl_zero-seed0")
    if failed:
        ended(tmp_path, DRAFT, failed)
    with pytest.raises(apart.PartMissingError, match=reason):
        make_part(context)
    assert ending(tmp_path, "abl", VARIANT) == PartRecord(reason=f"PartMissingError: {reason}")
    own = [each.header for each in events(tmp_path) if each.header is not None and each.header.key == context.execution]
    kinds = {(header.parent_key, header.name, header.tags["slipstream.kind"]) for header in own}
    assert kinds == {("abl", VARIANT, "part")}
    assert [event.status for event in events(tmp_path) if event.kind == "end"] == ["FAILED"]


def test_a_variant_without_an_arm_fails_for_its_own_reason_else_that_of_what_it_needs(tmp_path: Path) -> None:
    plan(tmp_path)
    ended(tmp_path, VARIANT, "FloatingPointError: the loss is not finite")
    found = reasons(tmp_path)
    assert found[VARIANT] == "FloatingPointError: the loss is not finite"
    assert found[OTHER].startswith("it left no record")
    ended(tmp_path, "policy-rl_zero", "ConfigError: no such model")
    assert reasons(tmp_path)[OTHER] == "policy-rl_zero failed: ConfigError: no such model"


def test_an_arm_whose_baseline_has_none_is_no_result(tmp_path: Path) -> None:
    plan(tmp_path)
    for name, arm in ((VARIANT, Arm.SPECULATIVE), ("baseline-rl_zero-seed0", Arm.AUTOREGRESSIVE)):
        ended(tmp_path, name)
        missing = reasons(tmp_path)
        steps = tuple(step(i, generation_s=1.0, reward=0.5) for i in range(3))
        record = ArmRecord(arm=arm, num_speculative_tokens=0, steps=steps, machine="")
        write_record(record, tmp_path / "abl" / name / f"train_grpo_{arm.value}" / "arm.json")
    assert missing[VARIANT] == "its baseline is missing"
    assert [outcome.variant.name for outcome in collect(tmp_path, read_plan(tmp_path, "abl")).outcomes] == [VARIANT]


def test_a_failed_ablation_keeps_its_page_and_ends_its_runs(tmp_path: Path) -> None:
    plan(tmp_path)
    fail_ablation(tmp_path, "abl", message="every draft failed")
    page = tmp_path / "abl" / "rank_ablation" / "ablation.html"
    assert "No variant came to a result." in page.read_text()
    assert events(tmp_path)[-1].status == "FAILED"


def test_an_ablation_that_was_refused_has_no_page(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        fail_ablation(tmp_path, "abl", message="losses must name at least one value")
    assert "losses must name at least one value" in caplog.text
    assert list(tmp_path.iterdir()) == []
