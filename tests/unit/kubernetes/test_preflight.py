"""A preflight against a server that speaks the Kubernetes API: what is missing, forbidden, silent or half there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli import main
from slipstream.config import ConfigError
from slipstream.kubernetes.kubernetes_api import Finding, State
from slipstream.kubernetes.preflight import (
    PreflightRecord,
    check,
    own_namespace,
    pod_manifests,
    probe_pod,
    require_ready,
)
from slipstream.kubernetes.profile import ClusterProfile, TrackingService, read_profile
from slipstream.records.files import read_record, write_record
from tests.unit.kubernetes.api_server import (
    CORE,
    HANGS,
    NAMESPACE,
    Answer,
    Cluster,
    api_groups,
    claim,
    crd,
    forbidden,
    node,
    node_list,
    other_node,
    pod,
    quotas,
    secret,
    serving,
    status,
    storage_class,
    whole_cluster,
)

NODES = "GET /api/v1/nodes"
CRDS = "GET /apis/apiextensions.k8s.io/v1/customresourcedefinitions"
CLAIM = f"GET {CORE}/persistentvolumeclaims/slipstream-runs"
CLASS = "GET /apis/storage.k8s.io/v1/storageclasses/lustre"
SECRET = f"GET {CORE}/secrets/slipstream-ray"
QUOTA = f"GET {CORE}/resourcequotas"
CREATE = f"POST {CORE}/pods"
PROBE = f"{CORE}/pods/slipstream-preflight-x1"
PROFILE = replace(read_profile("gb200"), queue=None, tracking=None, object_store=None)
DEPLOY = Path(__file__).parents[3] / "deploy"
IMAGE = "registry/slipstream-cpu:v1"


def found(
    cluster: Cluster, profile: ClusterProfile = PROFILE, *, timeout_s: float = 5.0, **options: Any
) -> PreflightRecord:
    with serving(cluster, timeout_s=timeout_s) as (api, _):
        return check(api, profile, namespace=NAMESPACE, **{"image": IMAGE, **options})


def missing(answers: dict[str, Answer], profile: ClusterProfile = PROFILE, **options: Any) -> list[Finding]:
    """Missing findings of a cluster that is whole but for `answers`."""
    cluster = whole_cluster()
    cluster.answers.update(answers)
    return [row for row in found(cluster, profile, **options).findings if row.state is State.MISSING]


def at(uri: str) -> ClusterProfile:
    """The profile with MLflow at an address."""
    return replace(PROFILE, tracking=TrackingService(uri=uri))


def test_a_whole_cluster_is_ready() -> None:
    cluster = whole_cluster()
    with serving(cluster) as (api, address):
        record = check(api, at(address), namespace=NAMESPACE, image=IMAGE)
    assert [row.what for row in record.findings if row.state is not State.FINE] == []
    assert record.num_missing == 0
    assert [row.what for row in record.findings] == [
        "GPU nodes",
        "nodes for Ray's head and submitter",
        "nodes for pods without GPUs",
        "custom resource rayjobs.ray.io",
        "custom resource computedomains.resource.nvidia.com",
        "claim template slipstream-channel",
        "volume claim slipstream-runs",
        "storage class lustre",
        "secret slipstream-ray",
        "service account slipstream",
        "quota",
        "pod cpu, dry run",
        "pod head, dry run",
        "pod worker, dry run",
        f"MLflow at {address}",
        "shared root",
    ]
    assert record.findings[0].found == "8 usable in clique a.0"
    asked = [path for path, _ in cluster.asked]
    assert asked.count("GET /api/v1/nodes") == 1
    assert (f"{CREATE}?dryRun=All", pod_manifests(at(address), IMAGE)["worker"]) in cluster.asked


def test_half_the_nodes_are_named_with_why_the_others_are_not_usable() -> None:
    nodes = [
        *[node(f"a{index}") for index in range(4)],
        node("b0", clique="b.1"),
        node("c0", ready=False),
        node("c1", cordoned=True),
        node("c2", allocatable={"nvidia.com/gpu": "3"}),
        node("c3", clique=None),
        node("c4", taints=[{"key": "maintenance", "effect": "NoSchedule"}]),
    ]
    (row,) = missing({NODES: node_list(*nodes)})
    assert row.found == (
        "4 usable in clique a.0, 1 usable in clique b.1, 1 not ready, 1 cordoned, 1 with nvidia.com/gpu 3, "
        "1 without label nvidia.com/gpu.clique, 1 with taint maintenance, which the pods do not tolerate"
    )
    assert row.needed == "8 in one clique, each cpu 120, memory 720Gi, ephemeral-storage 500Gi, nvidia.com/gpu 4"
    assert row.fix == "a cluster profile of at most 4 nodes, or more nodes ready in one clique"


def test_eight_nodes_of_two_cliques_are_not_eight_of_one_but_do_where_no_clique_is_asked_for() -> None:
    nodes = node_list(*[node(f"n{index}", clique=f"a.{index % 2}") for index in range(8)])
    (row,) = missing({NODES: nodes})
    assert row.found == "4 usable in clique a.0, 4 usable in clique a.1"
    assert PROFILE.gpu is not None
    assert missing({NODES: nodes}, replace(PROFILE, gpu=replace(PROFILE.gpu, clique_label=None))) == []


def test_tolerated_taints_and_exact_amounts_are_usable() -> None:
    taints = [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}, {"key": "slow", "effect": "PreferNoSchedule"}]
    nodes = [node(f"n{index}", taints=taints, allocatable={"cpu": "129000m"}) for index in range(8)]
    assert missing({NODES: node_list(*nodes)}) == []


def test_a_cluster_without_such_nodes_doubts_the_labels() -> None:
    row, head = missing({NODES: node_list()})
    assert head.found == "room on 0 of 0 nodes"
    assert row.found == "none with kubernetes.io/arch=arm64,nvidia.com/gpu.product=NVIDIA-GB200"
    assert row.fix.startswith("are the labels of the profile those of the nodes?")


def test_missing_custom_resources_name_what_installs_them() -> None:
    gone = {f"{CRDS}/rayjobs.ray.io": status(404, "not found")}
    old = {f"{CRDS}/computedomains.resource.nvidia.com": crd("computedomains.resource.nvidia.com", "v1alpha1")}
    rows = missing({**gone, **old})
    assert [(row.found, row.needed, row.fix) for row in rows] == [
        ("absent", "v1", "install KubeRay"),
        ("v1alpha1", "v1beta1", "install another version of NVIDIA's DRA driver"),
    ]


def test_the_claim_template_is_asked_for_in_the_version_that_the_cluster_has() -> None:
    older = f"GET /apis/resource.k8s.io/v1beta1/namespaces/{NAMESPACE}/resourceclaimtemplates/slipstream-channel"
    assert missing({"GET /apis/": api_groups("resource.k8s.io/v1beta1"), older: (200, {})}) == []
    (none,) = missing({"GET /apis/": api_groups("apps/v1")})
    assert none.found == "no API resource.k8s.io"
    (gone,) = missing({"GET /apis/": api_groups("resource.k8s.io/v1beta2")})
    assert gone.fix == "create the ComputeDomain of deploy/, which makes it"


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({CLAIM: claim("Pending")}, "kubectl describe pvc says why it is not bound"),
        ({CLAIM: claim("Bound", "ReadWriteOnce")}, "it needs the mode ReadWriteMany"),
        ({CLAIM: status(404, "gone")}, "create it in namespace slipstream: deploy/ has one to adapt"),
        ({CLASS: status(404, "gone")}, "name one of the cluster's own"),
        ({SECRET: secret(token="eA==")}, "add the keys auth_token"),
        ({SECRET: status(404, "gone")}, "create it in namespace slipstream, in the shape that deploy/ shows"),
        (
            {f"GET {CORE}/serviceaccounts/slipstream": status(404, "gone")},
            "create it in namespace slipstream: deploy/ has it",
        ),
        (
            {QUOTA: quotas(({"requests.nvidia.com/gpu": "64"}, {"requests.nvidia.com/gpu": "33"}))},
            "raise it, or wait for what uses it now",
        ),
        (
            {CREATE: status(422, 'Pod "w-" is invalid: spec.containers: Required value')},
            "change the cluster profile, or the policy that refuses the pod",
        ),
    ],
)
def test_each_lack_has_its_fix(answers: dict[str, Answer], said: str) -> None:
    assert {row.fix for row in missing(answers, image=None)} == {said}


def test_a_claim_may_wait_for_its_first_pod() -> None:
    assert missing({CLAIM: claim("Pending"), CLASS: storage_class("WaitForFirstConsumer")}) == []


def test_a_bound_claim_needs_no_right_to_see_storage_classes() -> None:
    cluster = whole_cluster()
    cluster.answers[CLASS] = forbidden("get", "storageclasses")
    record = found(cluster)
    assert record.num_missing == 0
    assert [row.what for row in record.findings if row.state is State.UNCHECKED] == ["storage class lustre"]


def test_a_refusal_is_quoted_with_the_right_that_is_lacking() -> None:
    (row,) = missing({NODES: forbidden("list", "nodes")})
    user = "system:serviceaccount:slipstream:default"
    assert row.found == f'403: nodes is forbidden: User "{user}" cannot list resource "nodes" in API group ""'
    assert row.fix == "let this account list nodes, or run the preflight as one that may"


def test_a_server_that_refuses_everything_gives_a_row_a_check_and_no_traceback() -> None:
    record = found(Cluster(answers={route: forbidden("do", "anything") for route in whole_cluster().answers}))
    unsaid = [row.what for row in record.findings if row.state is not State.MISSING]
    assert unsaid == ["shared root"]  # no pod is started for a claim that is not seen
    assert all(row.fix for row in record.findings)


def test_a_silent_server_is_waited_for_once_a_check() -> None:
    cluster = whole_cluster()
    cluster.answers[NODES] = HANGS
    rows = [row for row in found(cluster, timeout_s=0.5).findings if row.state is State.MISSING]
    assert [(row.what, row.found) for row in rows] == [("GPU nodes", "no answer within 0.5 s")]
    assert sum(path.startswith(NODES) for path, _ in cluster.asked) == 1


def test_no_server_at_all_is_a_finding() -> None:
    with serving(whole_cluster()) as (api, _):
        pass
    (row, *_) = check(api, PROFILE, namespace=NAMESPACE).findings
    assert row.found.startswith("no connection: ")
    assert row.fix == "is the API server's address right, and does a firewall let this host through?"


def test_mlflow_that_is_ill_or_away_is_missing() -> None:
    cluster = whole_cluster()
    cluster.answers["GET /health"] = status(503, "starting")
    with serving(cluster) as (api, address):
        ill = [row for row in check(api, at(address), namespace=NAMESPACE).findings if row.state is State.MISSING]
    assert [row.found for row in ill] == ["503 Service Unavailable"]
    with serving(whole_cluster()) as (api, _):
        away = [row for row in check(api, at(address), namespace=NAMESPACE).findings if row.state is State.MISSING]
    assert away[0].found.startswith("no answer: ")


@pytest.mark.parametrize(
    ("answer", "said", "fix"),
    [
        (
            pod("Failed", terminated={"exitCode": 1, "message": "sh: can't create /mnt: Permission denied\n"}),
            "failed: sh: can't create /mnt: Permission denied",
            "chown the volume's root",
        ),
        (pod("Pending", waiting={"reason": "ImagePullBackOff"}), "Pending after 1 s: ImagePullBackOff", "let the clus"),
        (forbidden("get", "pods"), "403: pods is forbidden", "let this account get pods"),
    ],
)
def test_a_root_that_no_pod_can_write_is_missing_and_the_pod_is_deleted(
    answer: Answer, said: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.kubernetes.preflight._PROBE_S", 1.0)
    cluster = whole_cluster()
    cluster.answers[f"GET {PROBE}"] = answer
    rows = [row for row in found(cluster).findings if row.state is State.MISSING]
    assert [row.what for row in rows] == ["shared root"]
    assert rows[0].found.startswith(said) and rows[0].fix.startswith(fix)
    assert [path for path, _ in cluster.asked if path.startswith("DELETE ")] == [f"DELETE {PROBE}?gracePeriodSeconds=0"]


def test_without_an_image_no_pod_is_started_and_the_root_is_not_checked() -> None:
    cluster = whole_cluster()
    rows = found(cluster, image=None).findings
    assert [(row.what, row.state) for row in rows if row.state is not State.FINE] == [("shared root", State.UNCHECKED)]
    assert [path for path, _ in cluster.asked if path.startswith("POST") and path.endswith("/pods")] == []


def test_the_table_puts_what_is_missing_first_and_fits_a_terminal() -> None:
    rows = (
        Finding.of("one", found="a", needed="a", fix=""),
        Finding.of("two", found="b " * 90, needed="c", fix="do it"),
    )
    lines = PreflightRecord(cluster="gb200", namespace=NAMESPACE, findings=rows).table.splitlines()
    assert lines[0] == "MISSING: two"
    assert lines[-3:] == ["  needed: c", "  fix:    do it", "fine: one: a"]
    assert max(map(len, lines)) <= 100 and lines[1].startswith("  found:  b b")


def test_a_worker_that_fills_its_node_leaves_none_to_the_head() -> None:
    full = [node(f"tray-{index}", allocatable={"cpu": "128"}) for index in range(8)]
    (row,) = missing({NODES: node_list(*full)})
    assert (row.what, row.found) == ("nodes for Ray's head and submitter", "room on 0 of 8 nodes")
    ninth = other_node(cpu="9")
    ninth["metadata"]["labels"]["kubernetes.io/arch"] = "arm64"
    assert missing({NODES: node_list(*full, ninth)}) == []


def test_pods_without_gpus_need_a_node_without_gpus_or_a_profile_that_says_otherwise() -> None:
    trays = (200, {"kind": "NodeList", "metadata": {}, "items": [node(f"tray-{index}") for index in range(8)]})
    (row,) = missing({NODES: trays})
    assert (row.what, row.found) == ("nodes for pods without GPUs", "room on 0 of 0 nodes")
    assert PROFILE.gpu is not None
    assert missing({NODES: trays}, replace(PROFILE, gpu=replace(PROFILE.gpu, takes_cpu_pods=True))) == []


def test_no_pod_is_started_for_a_claim_that_is_not_bound() -> None:
    cluster = whole_cluster()
    cluster.answers[CLAIM] = claim("Pending")
    rows = [row for row in found(cluster).findings if row.state is not State.FINE]
    assert [(row.what, row.state) for row in rows] == [
        ("volume claim slipstream-runs", State.MISSING),
        ("shared root", State.UNCHECKED),
    ]
    assert [path for path, _ in cluster.asked if path.startswith("POST") and "dryRun" not in path] == []


LOCAL_QUEUE = f"GET /apis/kueue.x-k8s.io/v1beta2/namespaces/{NAMESPACE}/localqueues/slipstream"
KUEUE = "GET /api/v1/namespaces/kueue-system/configmaps/kueue-manager-config"


def test_kueue_admits_nothing_without_an_active_queue_and_a_mapping_of_the_workers_claims() -> None:
    def configured(text: str) -> Answer:
        return 200, {"kind": "ConfigMap", "apiVersion": "v1", "metadata": {"name": "c"}, "data": {"config.yaml": text}}

    def queue(status: str, message: str) -> Answer:
        return 200, {"status": {"conditions": [{"type": "Active", "status": status, "message": message}]}}

    kueue = replace(PROFILE, queue=read_profile("gb200").queue)
    kind = {f"{CRDS}/localqueues.kueue.x-k8s.io": crd("localqueues.kueue.x-k8s.io", "v1beta2")}
    mapped = configured((DEPLOY / "kueue" / "manager_config.yaml").read_text())
    assert missing({**kind, LOCAL_QUEUE: queue("True", "fine"), KUEUE: mapped}, kueue) == []
    wrong = {LOCAL_QUEUE: queue("False", "ClusterQueue is inactive"), KUEUE: configured("resources: {}")}
    rows = missing({**kind, **wrong}, kueue)
    assert [(row.found, row.fix[:40]) for row in rows] == [
        ("ClusterQueue is inactive", "kubectl apply -k deploy/kueue, with the "),
        ("not mapped", "merge deploy/kueue/manager_config.yaml i"),
    ]


def test_volcanos_queue_is_open() -> None:
    path = "GET /apis/scheduling.volcano.sh/v1beta1/queues/slipstream"
    volcano = replace(PROFILE, queue=read_profile("h200").queue)
    kind = {f"{CRDS}/queues.scheduling.volcano.sh": crd("queues.scheduling.volcano.sh", "v1beta1")}
    assert missing({**kind, path: (200, {"status": {"state": "Open"}})}, volcano) == []
    (row,) = missing({**kind, path: (200, {"status": {"state": "Closed"}})}, volcano)
    assert (row.what, row.found) == ("queue slipstream", "Closed")


def test_the_root_is_written_to_here_and_no_pod_is_started_for_it(tmp_path: Path) -> None:
    cluster = whole_cluster()
    with serving(cluster) as (api, _):
        record = check(api, read_profile("gb200"), namespace=NAMESPACE, own_root=tmp_path / "runs")
    row = record.findings[-1]
    assert (row.state, row.found) == (State.FINE, "written, read and removed")
    assert list((tmp_path / "runs").iterdir()) == []
    created = [request for request, _ in cluster.asked if request.startswith("POST") and "/pods" in request]
    assert created and all("dryRun=All" in request for request in created)
    assert "localqueues.kueue.x-k8s.io" in record.table
    assert read_record(type(record), write_record(record, tmp_path / "findings.json")) == record
    with pytest.raises(ConfigError, match=r"cluster gb200 lacks \d of what its runs need:\n(.|\n)*install Kueue"):
        require_ready(record)


def test_a_root_that_this_user_cannot_write_to_is_missing_and_says_how_to_fix_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with serving(whole_cluster()) as (api, _):
        rows = check(api, PROFILE, namespace=NAMESPACE, own_root=tmp_path / "file" / "runs").findings

    row = rows[-1]
    assert (row.state, row.fix) == (State.MISSING, "chown the volume's root to group 1000, or set fsGroup to its group")
    assert "Not a directory" in row.found


def test_the_namespace_is_the_pods_own(tmp_path: Path) -> None:
    (tmp_path / "namespace").write_text("slipstream-development\n")
    assert own_namespace(tmp_path / "namespace") == "slipstream-development"
    with pytest.raises(ConfigError, match="preflight must run in a pod with a service account's token, got 'no "):
        own_namespace(tmp_path / "none")


def test_the_dry_run_gets_pods_as_flyte_makes_them() -> None:
    manifests = pod_manifests(read_profile("gb200"), "i:1")
    assert list(manifests) == ["cpu", "head", "worker"]
    worker = manifests["worker"]["spec"]
    (container,) = worker["containers"]
    assert (container["name"], container["image"]) == ("ray-worker", "i:1")
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/mnt/slipstream", "/dev/shm"}
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert worker["resourceClaims"] == [
        {"name": "compute-domain-channel", "resourceClaimTemplateName": "slipstream-channel"}
    ]
    assert worker["serviceAccountName"] == "slipstream"


def test_the_probe_is_a_small_pod_of_a_task_without_the_servers_credentials() -> None:
    profile = read_profile("gb200")
    task, probe = pod_manifests(profile, "i:1")["cpu"], probe_pod(profile, "i:1", 30.0)
    changed = {name for name in task["spec"] | probe["spec"] if task["spec"].get(name) != probe["spec"].get(name)}
    assert changed == {"containers", "activeDeadlineSeconds"}
    (container,) = probe["spec"]["containers"]
    assert "envFrom" in task["spec"]["containers"][0] and "envFrom" not in container
    assert container["resources"]["limits"] == {"cpu": "100m", "memory": "64Mi"}
    assert "/mnt/slipstream/.preflight-" in container["command"][-1]


def test_a_cluster_without_gpus_is_asked_for_none() -> None:
    what = [row.what for row in found(whole_cluster(), read_profile("cpu"), image=None).findings]
    assert what[0].startswith("volume claim ")
    assert [name for name in what if name.startswith(("pod ", "custom ", "GPU ", "claim template"))] == [
        "pod cpu, dry run"
    ]


def test_this_machine_has_nothing_to_ask(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["preflight", "--cluster", "local"]) == 2
    assert "--cluster must name a cluster of pods, got 'local'; as in gb200" in capsys.readouterr().err


def test_a_namespace_without_a_name_is_refused() -> None:
    with serving(whole_cluster(), timeout_s=5.0) as (api, _), pytest.raises(ConfigError, match="must name a namespace"):
        check(api, PROFILE, namespace="")


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
    text = "\n".join(printed)
    assert "MISSING: secret slipstream-mlflow\n" in text and "fix:    create it in namespace slipstream" in text
    assert "MISSING: custom resource localqueues.kueue.x-k8s.io\n" in text and "fix:    install Kueue" in text
    assert any(line.startswith("fine") and "claim template slipstream-channel" in line for line in printed)
    assert printed[-1] == f"{len(missing)} missing"
    assert "task_resources" in printed[-3]


def test_without_a_kubeconfig_the_command_says_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert main(["preflight", "--cluster", "gb200", "--context", "lab"]) == 2
    assert "set KUBECONFIG, or name a context of it with --context" in capsys.readouterr().err
