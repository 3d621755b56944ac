"""What the shipped profiles ask of their clusters."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.cli import main
from slipstream.config import ConfigError
from slipstream.kubernetes.cluster_needs import SecretNeed, laid_over, needs_of
from slipstream.kubernetes.profile import read_profile
from tests.unit.kubernetes.api_server import serving, whole_cluster


def test_the_gb200_profile_asks_for_its_nodes_driver_queue_and_secrets() -> None:
    needs = needs_of(read_profile("gb200"), namespace="slipstream-development", image="i:1")
    assert needs.gpu_nodes is not None
    assert (needs.gpu_nodes.nodes, needs.gpu_nodes.clique_label) == (8, "nvidia.com/gpu.clique")
    assert needs.gpu_nodes.labels == {"kubernetes.io/arch": "arm64", "nvidia.com/gpu.product": "NVIDIA-GB200"}
    assert needs.gpu_nodes.allocatable == {
        "cpu": "128",
        "memory": "800Gi",
        "ephemeral-storage": "500Gi",
        "nvidia.com/gpu": "4",
    }
    assert [crd.name for crd in needs.crds] == [
        "rayjobs.ray.io",
        "computedomains.resource.nvidia.com",
        "localqueues.kueue.x-k8s.io",
    ]
    assert needs.claim_template == "slipstream-channel"
    assert needs.secrets == (
        SecretNeed(name="slipstream-mlflow"),
        SecretNeed(name="slipstream-object-store"),
        SecretNeed(name="slipstream-ray", keys=("auth_token",)),
    )
    # 8 x 128 + 16 cores, 8 x 800 + 128 GiB, 8 x 4 GPUs
    assert needs.quota == {"requests.cpu": "1040", "requests.memory": "6528Gi", "requests.nvidia.com/gpu": "32"}


def test_the_dry_run_gets_pods_as_flyte_makes_them() -> None:
    needs = needs_of(read_profile("gb200"), namespace="n", image="i:1")
    assert list(needs.pods) == ["cpu", "head", "worker"]
    worker = needs.pods["worker"]["spec"]
    (container,) = worker["containers"]
    assert (container["name"], container["image"]) == ("ray-worker", "i:1")
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/mnt/slipstream", "/dev/shm"}
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert worker["resourceClaims"] == [
        {"name": "compute-domain-channel", "resourceClaimTemplateName": "slipstream-channel"}
    ]
    assert worker["serviceAccountName"] == "slipstream"


def test_maps_merge_lists_are_appended_and_what_is_set_wins() -> None:
    base = {"containers": [{"name": "a", "env": [1], "resources": {"x": 1}}], "volumes": [1], "user": {"id": 1}}
    overlay = {"containers": [{"name": "b", "env": [2], "resources": {"y": 2}}], "volumes": [2], "user": {"id": 2}}
    assert laid_over(base, overlay) == {
        "containers": [{"name": "b", "env": [1, 2], "resources": {"x": 1, "y": 2}}],
        "volumes": [1, 2],
        "user": {"id": 2},
    }


def test_a_cluster_without_gpus_is_asked_for_none() -> None:
    needs = needs_of(read_profile("cpu"), namespace="n", image=None)
    assert (needs.gpu_nodes, needs.crds, needs.claim_template, list(needs.pods)) == (None, (), None, ["cpu"])
    assert "requests.nvidia.com/gpu" not in needs.quota


def test_this_machine_has_nothing_to_ask() -> None:
    with pytest.raises(ConfigError, match="--cluster must name a cluster of pods, got 'local'; as in gb200"):
        needs_of(read_profile("local"), namespace="n", image=None)


def test_the_command_prints_the_table_and_ends_with_1_where_something_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(whole_cluster()) as (_, address):
        config = tmp_path / "kubeconfig"
        config.write_text(
            f"""
apiVersion: v1
kind: Config
clusters: [{{name: c, cluster: {{server: "{address}"}}}}]
users: [{{name: u, user: {{token: t}}}}]
contexts: [{{name: lab, context: {{cluster: c, user: u}}}}]
current-context: lab
"""
        )
        monkeypatch.setenv("KUBECONFIG", str(config))
        assert main(["preflight", "--cluster", "gb200", "--namespace", "slipstream", "--timeout-s", "2"]) == 1
    printed = capsys.readouterr().out.splitlines()
    missing = [line for line in printed if line.startswith("MISSING")]
    assert any("secret slipstream-mlflow" in line and "create it in namespace slipstream" in line for line in missing)
    assert any("localqueues.kueue.x-k8s.io" in line and "install Kueue" in line for line in missing)
    assert any(line.startswith("fine") and "claim template slipstream-channel" in line for line in printed)
    assert printed[-1] == f"{len(missing)} missing"


def test_without_a_kubeconfig_the_command_says_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert main(["preflight", "--cluster", "gb200", "--context", "lab"]) == 2
    assert "set KUBECONFIG, or name a context of it with --context" in capsys.readouterr().err
