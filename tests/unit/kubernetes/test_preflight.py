"""A preflight against a server that speaks the Kubernetes API: what is missing, forbidden, silent or half there."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli import main
from slipstream.config import ConfigError
from slipstream.kubernetes import preflight
from slipstream.kubernetes.kubernetes_api import Finding, State, delete_pod
from slipstream.kubernetes.preflight import PreflightRecord, check, pod_manifests
from slipstream.kubernetes.profile import ClusterProfile, Toleration, TrackingService, read_profile
from slipstream.records.files import read_record, write_record
from tests.unit.kubernetes import api_server as fake
from tests.unit.kubernetes.api_server import CORE, HANGS, NAMESPACE, Answer, Cluster

NODES = "GET /api/v1/nodes"
CRDS = "GET /apis/apiextensions.k8s.io/v1/customresourcedefinitions"
CLAIM = f"GET {CORE}/persistentvolumeclaims/slipstream-runs"
CLASS = "GET /apis/storage.k8s.io/v1/storageclasses/lustre"
SECRET = f"GET {CORE}/secrets/slipstream-ray"
CREATE = f"POST {CORE}/pods"
PROBE = f"{CORE}/pods/slipstream-preflight-x1"
PROFILE = replace(read_profile("gb200"), queue=None, tracking=None, object_store=None)
DEPLOY = Path(__file__).parents[3] / "deploy"
IMAGE = "registry/slipstream-cpu:v1"


def found(
    cluster: Cluster, profile: ClusterProfile = PROFILE, *, timeout_s: float = 5.0, **options: Any
) -> PreflightRecord:
    with fake.serving(cluster, timeout_s=timeout_s) as (api, _):
        return check(api, profile, namespace=NAMESPACE, **{"image": IMAGE, **options})


def not_fine(record: PreflightRecord) -> list[tuple[str, State]]:
    return [(row.what, row.state) for row in record.findings if row.state is not State.FINE]


def missing(record: PreflightRecord) -> list[Finding]:
    return [row for row in record.findings if row.state is State.MISSING]


def asked(cluster: Cluster, start: str) -> list[str]:
    """Requests that begin so, method and path, in their order."""
    return [request for request, _ in cluster.asked if request.startswith(start)]


def at(uri: str) -> ClusterProfile:
    """The profile with MLflow at an address."""
    return replace(PROFILE, tracking=TrackingService(uri=uri))


def with_gpu(**changes: Any) -> ClusterProfile:
    assert PROFILE.gpu is not None
    return replace(PROFILE, gpu=replace(PROFILE.gpu, **changes))


def test_a_whole_cluster_is_ready() -> None:
    cluster = fake.whole_cluster()
    with fake.serving(cluster) as (api, address):
        record = check(api, at(address), namespace=NAMESPACE, image=IMAGE)
    assert (not_fine(record), record.num_missing) == ([], 0)
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
        *(f"pod {kind}, dry run" for kind in ("cpu", "head", "worker")),
        f"MLflow at {address}",
        "shared root",
    ]
    assert record.findings[0].found == "8 usable in clique a.0"
    assert len(asked(cluster, NODES)) == 1
    assert (f"{CREATE}?dryRun=All", pod_manifests(at(address), IMAGE)["worker"]) in cluster.asked


def configured(text: str) -> Answer:
    return 200, {"kind": "ConfigMap", "apiVersion": "v1", "metadata": {"name": "c"}, "data": {"config.yaml": text}}


def queue(status: str, message: str) -> Answer:
    return 200, {"status": {"conditions": [{"type": "Active", "status": status, "message": message}]}}


def trays(name: str = "tray-{}", **changes: Any) -> list[dict[str, Any]]:
    return [fake.node(name.format(index), **changes) for index in range(8)]


MIXED = [
    *[fake.node(f"a{index}") for index in range(4)],
    fake.node("b0", clique="b.1"),
    fake.node("c0", ready=False),
    fake.node("c1", cordoned=True),
    fake.node("c2", allocatable={"nvidia.com/gpu": "3"}),
    fake.node("c3", clique=None),
    fake.node("c4", taints=[{"key": "maintenance", "effect": "NoSchedule"}]),
    fake.node("c5", taints=[{"key": "nvidia.com/gpu", "effect": "NoExecute"}]),  # tolerated for NoSchedule
]
CLIQUES = fake.node_list(*[fake.node(f"n{index}", clique=f"a.{index % 2}") for index in range(8)])
TAINTS = [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}, {"key": "slow", "effect": "PreferNoSchedule"}]
NO_OTHER_NODES = (200, {"kind": "NodeList", "metadata": {}, "items": trays()})
EXACT = trays(taints=TAINTS, allocatable={"cpu": "129000m"})  # as much as is asked for, behind tolerated taints
FULL, NINTH = trays(allocatable={"cpu": "128"}), fake.other_node(cpu="9")
NINTH["metadata"]["labels"]["kubernetes.io/arch"] = "arm64"
OLDER = f"GET /apis/resource.k8s.io/v1beta1/namespaces/{NAMESPACE}/resourceclaimtemplates/slipstream-channel"
LOCAL_QUEUE = f"GET /apis/kueue.x-k8s.io/v1beta2/namespaces/{NAMESPACE}/localqueues/slipstream"
KUEUE = "GET /api/v1/namespaces/kueue-system/configmaps/kueue-manager-config"
KUEUE_KIND = {f"{CRDS}/localqueues.kueue.x-k8s.io": fake.crd("localqueues.kueue.x-k8s.io", "v1beta2")}
MAPPED = configured((DEPLOY / "kueue" / "manager_config.yaml").read_text())
VOLCANO = "GET /apis/scheduling.volcano.sh/v1beta1/queues/slipstream"
VOLCANO_KIND = {f"{CRDS}/queues.scheduling.volcano.sh": fake.crd("queues.scheduling.volcano.sh", "v1beta1")}
BY_KUEUE, BY_VOLCANO = (replace(PROFILE, queue=read_profile(name).queue) for name in ("gb200", "h200"))
GONE, ACTIVE, CLOSED = fake.status(404, "gone"), queue("True", "fine"), (200, {"status": {"state": "Closed"}})
USED = fake.quotas(({"requests.nvidia.com/gpu": "64"}, {"requests.nvidia.com/gpu": "33"}))
SMALL_DISKS = fake.quotas(({"requests.ephemeral-storage": "4203Gi", "pods": "10"}, {}))
DRIVER = "computedomains.resource.nvidia.com"
OLD_DRIVER = {f"{CRDS}/{DRIVER}": fake.crd(DRIVER, "v1alpha1")}


@pytest.mark.parametrize(
    ("answers", "profile"),
    [
        ({NODES: CLIQUES}, with_gpu(clique_label=None)),
        ({NODES: fake.node_list(*EXACT)}, PROFILE),
        ({NODES: fake.node_list(*FULL, NINTH)}, PROFILE),
        ({NODES: NO_OTHER_NODES}, with_gpu(takes_cpu_pods=True)),
        ({"GET /apis/": fake.api_groups("resource.k8s.io/v1beta1"), OLDER: (200, {})}, PROFILE),
        ({CLAIM: fake.claim("Pending"), CLASS: fake.storage_class("WaitForFirstConsumer")}, PROFILE),
        ({**KUEUE_KIND, LOCAL_QUEUE: ACTIVE, KUEUE: MAPPED}, BY_KUEUE),
        ({**VOLCANO_KIND, VOLCANO: (200, {"status": {"state": "Open"}})}, BY_VOLCANO),
        ({f"GET {CORE}/resourcequotas": fake.quotas(({"pods": "0"}, {}), scopes=["BestEffort"])}, PROFILE),
    ],
)
def test_what_does_is_no_lack(answers: dict[str, Answer], profile: ClusterProfile) -> None:
    assert found(fake.whole_cluster(answers), profile).num_missing == 0


@pytest.mark.parametrize(("tolerated", "value", "lacks"), [(None, "a", False), ("a", "a", False), ("a", "b", True)])
def test_a_taint_is_tolerated_with_its_value_or_with_any(tolerated: str | None, value: str, lacks: bool) -> None:
    nodes = fake.node_list(*trays(taints=[{"key": "pool", "value": value, "effect": "NoSchedule"}]))
    profile = replace(PROFILE, tolerations=(Toleration(key="pool", value=tolerated), *PROFILE.tolerations))
    assert (found(fake.whole_cluster({NODES: nodes}), profile).num_missing > 0) == lacks


def lack(answers: dict[str, Answer], profile: ClusterProfile = PROFILE, **said: str) -> Any:
    """Answers, and how the one thing that is missing with them begins to say so."""
    return answers, profile, said


@pytest.mark.parametrize(
    ("answers", "profile", "said"),
    [
        lack(
            {NODES: fake.node_list(*MIXED)},
            found="4 usable in clique a.0, 1 usable in clique b.1, 1 not ready, 1 cordoned, 1 with nvidia.com/gpu 3, "
            "1 without label nvidia.com/gpu.clique, "
            "1 with taint maintenance:NoSchedule, which the pods do not tolerate, "
            "1 with taint nvidia.com/gpu:NoExecute, which the pods do not tolerate",
            needed="8 in one clique, each cpu 120, memory 720Gi, ephemeral-storage 500Gi, nvidia.com/gpu 4",
            fix="a cluster profile of at most 4 nodes, or more nodes ready in one clique",
        ),
        lack({NODES: CLIQUES}, found="4 usable in clique a.0, 4 usable in clique a.1"),
        lack({NODES: fake.node_list(*FULL)}, what="nodes for Ray's head and submitter", found="room on 0 of 8 nodes"),
        lack({NODES: NO_OTHER_NODES}, what="nodes for pods without GPUs", found="room on 0 of 0 nodes"),
        lack({f"{CRDS}/rayjobs.ray.io": GONE}, found="absent", needed="v1", fix="install KubeRay"),
        lack(OLD_DRIVER, found="v1alpha1", needed="v1beta1", fix="install another version of NVIDIA's DRA driver"),
        lack({"GET /apis/": fake.api_groups("apps/v1")}, found="no API resource.k8s.io"),
        lack({"GET /apis/": fake.api_groups("resource.k8s.io/v1beta2")}, fix="create the ComputeDomain of deploy/, "),
        lack(
            {NODES: fake.forbidden("list", "nodes")},
            found='403: nodes is forbidden: User "system:serviceaccount:slipstream:default" cannot list resource '
            '"nodes" in API group ""',
            fix="let this account list nodes, or run the preflight as one that may",
        ),
        lack(
            {**KUEUE_KIND, LOCAL_QUEUE: queue("False", "ClusterQueue is inactive"), KUEUE: MAPPED},
            BY_KUEUE,
            found="ClusterQueue is inactive",
            fix="kubectl apply -k deploy/kueue, with the ",
        ),
        lack(
            {**KUEUE_KIND, LOCAL_QUEUE: ACTIVE, KUEUE: configured("resources: {}")},
            BY_KUEUE,
            found="not mapped",
            fix="merge deploy/kueue/manager_config.yaml i",
        ),
        lack({**VOLCANO_KIND, VOLCANO: CLOSED}, BY_VOLCANO, what="queue slipstream", found="Closed"),
        lack({CLAIM: fake.claim("Pending")}, fix="kubectl describe pvc says why it is not bound"),
        lack({CLAIM: fake.claim("Bound", "ReadWriteOnce")}, fix="it needs the mode ReadWriteMany"),
        lack({CLAIM: GONE}, fix="create it in namespace slipstream: deploy/ has one to adapt"),
        lack({CLASS: GONE}, fix="name one of the cluster's own"),
        lack({SECRET: fake.secret(token="eA==")}, fix="add the keys auth_token"),
        lack({SECRET: GONE}, fix="create it in namespace slipstream, in the shape that deploy/ shows"),
        lack({f"GET {CORE}/serviceaccounts/slipstream": GONE}, fix="create it in namespace slipstream: deploy/ has it"),
        lack({f"GET {CORE}/resourcequotas": USED}, fix="raise it, or wait for what uses it now"),
        *(
            lack({f"GET {CORE}/resourcequotas": fake.quotas(({name: "9"}, {}))}, found=f"team: 0 of 9 {name} used")
            for name in ("cpu", "requests.cpu", "limits.cpu", "memory", "limits.memory", "pods", "count/pods")
        ),
        lack({f"GET {CORE}/resourcequotas": SMALL_DISKS}, found="team: 0 of 4203Gi requests.ephemeral-storage used"),
    ],
)
def test_a_lack_is_named_alone_and_has_its_fix(
    answers: dict[str, Answer], profile: ClusterProfile, said: dict[str, str]
) -> None:
    (row,) = missing(found(fake.whole_cluster(answers), profile, image=None))
    assert {name: asdict(row)[name][: len(words)] for name, words in said.items()} == said


def test_a_cluster_without_such_nodes_doubts_the_labels_and_a_refused_pod_the_profile() -> None:
    row, head = missing(found(fake.whole_cluster({NODES: fake.node_list()})))
    assert head.found == "room on 0 of 0 nodes"
    assert row.found == "none with kubernetes.io/arch=arm64,nvidia.com/gpu.product=NVIDIA-GB200"
    assert row.fix.startswith("are the labels of the profile those of the nodes?")
    invalid = fake.status(422, 'Pod "w-" is invalid: spec.containers: Required value')
    fixes = {row.fix for row in missing(found(fake.whole_cluster({CREATE: invalid}), image=None))}
    assert fixes == {"change the cluster profile, or the policy that refuses the pod"}


def test_a_bound_claim_needs_no_right_to_see_storage_classes() -> None:
    record = found(fake.whole_cluster({CLASS: fake.forbidden("get", "storageclasses")}))
    assert not_fine(record) == [("storage class lustre", State.UNCHECKED)]


def test_a_server_that_refuses_everything_gives_a_row_a_check_and_no_traceback() -> None:
    record = found(Cluster(answers={route: fake.forbidden("do", "anything") for route in fake.whole_cluster().answers}))
    unsaid = [row.what for row in record.findings if row.state is not State.MISSING]
    assert unsaid == ["shared root"]  # no pod is started for a claim that is not seen
    assert all(row.fix for row in record.findings)


def test_a_silent_server_is_waited_for_once_a_check_and_no_server_at_all_is_a_finding() -> None:
    cluster = fake.whole_cluster({NODES: HANGS})
    record = found(cluster, timeout_s=0.5)
    assert not_fine(record) == [("nodes", State.MISSING)]
    assert record.findings[0].found == "no answer within 0.5 s"
    assert len(asked(cluster, NODES)) == 1
    with fake.serving(fake.whole_cluster()) as (api, _):
        pass
    (row, *_) = check(api, PROFILE, namespace=NAMESPACE).findings
    assert row.found.startswith("no connection: ")
    assert row.fix == "is the API server's address right, and does a firewall let this host through?"


def test_mlflow_that_is_ill_or_away_is_missing() -> None:
    with fake.serving(fake.whole_cluster({"GET /health": fake.status(503, "starting")})) as (api, address):
        ill = check(api, at(address), namespace=NAMESPACE)
    with fake.serving(fake.whole_cluster()) as (api, _):
        away = check(api, at(address), namespace=NAMESPACE)
    assert [row.found for row in missing(ill)] == ["503 Service Unavailable"]
    assert missing(away)[0].found.startswith("no answer: ")
    with fake.serving(fake.whole_cluster({"GET /health": fake.NO_HTTP})) as (api, address):
        assert "BadStatusLine" in missing(check(api, at(address), namespace=NAMESPACE))[0].found


@pytest.mark.parametrize(
    ("answer", "said", "fix"),
    [
        (
            fake.pod("Failed", terminated={"exitCode": 1, "message": "sh: can't create /mnt: Permission denied\n"}),
            "failed: sh: can't create /mnt: Permission denied",
            "chown the volume's root",
        ),
        (fake.pod("Pending", waiting={"reason": "ImagePullBackOff"}), "Pending after 1 s: ImagePull", "let the cl"),
        (fake.forbidden("get", "pods"), "403: pods is forbidden", "let this account get pods"),
    ],
)
def test_a_root_no_pod_writes_is_missing(answer: Answer, said: str, fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_PROBE_S", 1.0)
    cluster = fake.whole_cluster({f"GET {PROBE}": answer})
    (row,) = missing(found(cluster))
    assert row.what == "shared root"
    assert row.found.startswith(said) and row.fix.startswith(fix)
    assert asked(cluster, "DELETE ") == [f"DELETE {PROBE}?gracePeriodSeconds=0"]


def test_without_an_image_or_a_bound_claim_no_pod_is_started_and_the_root_is_not_checked() -> None:
    unchecked, unbound = ("shared root", State.UNCHECKED), ("volume claim slipstream-runs", State.MISSING)
    for claim, image, expected in (("Bound", None, [unchecked]), ("Pending", IMAGE, [unbound, unchecked])):
        cluster = fake.whole_cluster({CLAIM: fake.claim(claim)})
        assert not_fine(found(cluster, image=image)) == expected
        assert [request for request in asked(cluster, "POST") if "dryRun" not in request] == []


def test_the_table_puts_what_is_missing_first_and_fits_a_terminal() -> None:
    fine = Finding.of("one", found="a", needed="a", fix="")
    rows = (fine, Finding.of("two", found="b " * 90, needed="c", fix="do it"))
    lines = PreflightRecord(cluster="gb200", namespace=NAMESPACE, findings=rows).table.splitlines()
    assert lines[0] == "MISSING: two"
    assert lines[-3:] == ["  needed: c", "  fix:    do it", "fine: one: a"]
    assert max(map(len, lines)) <= 100 and lines[1].startswith("  found:  b b")


def test_the_root_is_written_to_here_and_no_pod_is_started_for_it(tmp_path: Path) -> None:
    cluster = fake.whole_cluster()
    with fake.serving(cluster) as (api, _):
        record = check(api, read_profile("gb200"), namespace=NAMESPACE, own_root=tmp_path / "runs")
    row = record.findings[-1]
    assert (row.state, row.found) == (State.FINE, "written, read and removed")
    assert list((tmp_path / "runs").iterdir()) == []
    created = asked(cluster, CREATE)
    assert created and all("dryRun=All" in request for request in created)
    assert "localqueues.kueue.x-k8s.io" in record.table
    assert read_record(type(record), write_record(record, tmp_path / "findings.json")) == record
    with pytest.raises(ConfigError, match=r"cluster gb200 lacks \d of what its runs need:\n(.|\n)*install Kueue"):
        preflight.require_ready(record)


def test_a_root_that_this_user_cannot_write_to_is_missing_and_says_how_to_fix_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    row = found(fake.whole_cluster(), image=None, own_root=tmp_path / "file" / "runs").findings[-1]
    assert (row.state, row.fix) == (State.MISSING, "chown the volume's root to group 1000, or set fsGroup to its group")
    assert "Not a directory" in row.found


def test_the_namespace_is_the_pods_own_and_has_a_name(tmp_path: Path) -> None:
    (tmp_path / "namespace").write_text("slipstream-development\n")
    assert preflight.own_namespace(tmp_path / "namespace") == "slipstream-development"
    with pytest.raises(ConfigError, match="preflight must run in a pod with a service account's token, got 'no "):
        preflight.own_namespace(tmp_path / "none")
    with fake.serving(fake.whole_cluster()) as (api, _), pytest.raises(ConfigError, match="must name a namespace"):
        check(api, PROFILE, namespace="")


def test_the_dry_run_gets_pods_as_flyte_makes_them() -> None:
    manifests = pod_manifests(read_profile("gb200"), "i:1")
    assert list(manifests) == ["cpu", "head", "worker"]
    worker = manifests["worker"]["spec"]
    (container,) = worker["containers"]
    assert (container["name"], container["image"]) == ("ray-worker", "i:1")
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/mnt/slipstream", "/dev/shm"}
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    channel = {"name": "compute-domain-channel", "resourceClaimTemplateName": "slipstream-channel"}
    assert worker["resourceClaims"] == [channel]
    assert worker["serviceAccountName"] == "slipstream"


def test_the_probe_is_a_small_pod_of_a_task_without_the_servers_credentials() -> None:
    profile = read_profile("gb200")
    task, probe = pod_manifests(profile, "i:1")["cpu"], preflight.probe_pod(profile, "i:1", 30.0)
    changed = {name for name in task["spec"] | probe["spec"] if task["spec"].get(name) != probe["spec"].get(name)}
    assert changed == {"containers", "activeDeadlineSeconds"}
    (container,) = probe["spec"]["containers"]
    assert "envFrom" in task["spec"]["containers"][0] and "envFrom" not in container
    assert container["resources"]["limits"] == {"cpu": "100m", "memory": "64Mi"}
    assert "/mnt/slipstream/.preflight-" in container["command"][-1]


def test_a_cluster_without_gpus_is_asked_for_none() -> None:
    small = fake.found("NodeList", items=[fake.other_node(cpu="3")])
    record = found(fake.whole_cluster({NODES: small}), read_profile("cpu"), image=None)
    what = [row.what for row in record.findings]
    assert missing(record)[0].fix == "add one without GPUs, or lower the profile's cpu"
    of_gpus = ("pod ", "custom ", "GPU ", "claim template")
    assert [name for name in what if name.startswith(of_gpus)] == ["pod cpu, dry run"]


def test_the_command_prints_the_table_and_ends_with_1_where_something_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake.serving(fake.whole_cluster()) as (_, address):
        config = {
            **{"apiVersion": "v1", "kind": "Config", "current-context": "lab"},
            "clusters": [{"name": "c", "cluster": {"server": address}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "lab", "context": {"cluster": "c", "user": "u"}}],
        }
        (tmp_path / "kubeconfig").write_text(json.dumps(config))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        assert main(["preflight", "--cluster", "gb200", "--namespace", "slipstream", "--timeout-s", "2"]) == 1
    text = capsys.readouterr().out
    printed = text.splitlines()
    missing = [line for line in printed if line.startswith("MISSING")]
    assert "MISSING: secret slipstream-mlflow\n" in text and "fix:    create it in namespace slipstream" in text
    assert "MISSING: custom resource localqueues.kueue.x-k8s.io\n" in text and "fix:    install Kueue" in text
    assert any(line.startswith("fine") and "claim template slipstream-channel" in line for line in printed)
    assert printed[-1] == f"{len(missing)} missing"
    assert "task_resources" in printed[-3]


def test_without_a_cluster_of_pods_or_a_kubeconfig_the_command_says_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["preflight", "--cluster", "local"]) == 2
    assert "--cluster must name a cluster of pods, got 'local'; as in gb200" in capsys.readouterr().err
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert main(["preflight", "--cluster", "gb200", "--context", "lab"]) == 2
    assert "set KUBECONFIG, or name a context of it with --context" in capsys.readouterr().err


def test_a_smoke_test_has_deleted_a_pod_if_it_ran_and_the_server_let_it() -> None:
    running, waiting = (fake.pod(phase)[1] for phase in ("Running", "Pending"))
    for pods, answer, expected in (
        ([running, waiting], (200, {}), True),
        ([running], fake.forbidden("delete", "pods"), False),
        ([waiting], (200, {}), False),
    ):
        cluster = Cluster(answers={f"GET {CORE}/pods": fake.found("PodList", items=pods), f"DELETE {PROBE}": answer})
        with fake.serving(cluster) as (api, _):
            assert delete_pod(api, NAMESPACE, "e", "train") is expected
        assert asked(cluster, "GET") == [f"GET {CORE}/pods?labelSelector=execution-id%3De%2Cnode-id%3Dtrain"]
