"""An HTTP server that speaks the part of the Kubernetes API that a preflight asks for.

Shapes: Kubernetes 1.34's API reference, KubeRay 1.5 and NVIDIA's DRA driver 25.8; what nobody reads is left out.
"""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kubernetes import client as k8s

from slipstream.kubernetes.kubernetes_api import Api, api_of

Answer = tuple[int, dict[str, Any]]
HANGS: Answer = (0, {})
NO_HTTP: Answer = (-1, {})  # a port that speaks gRPC
NAMESPACE = "slipstream"
CORE = f"/api/v1/namespaces/{NAMESPACE}"


@dataclass
class Cluster:
    """Answers by `METHOD path`, what was asked, and how long a client waits."""

    answers: dict[str, Answer]
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)  # (method and path with query, body)
    released: threading.Event = field(default_factory=threading.Event)


def found(kind: str, name: str | None = None, *, version: str = "v1", **rest: Any) -> Answer:
    """Answer with an object of this name, or with a list."""
    metadata = {} if name is None else {"name": name}
    return 200, {"kind": kind, "apiVersion": version, "metadata": metadata, **rest}


def status(code: int, message: str) -> Answer:
    """Answer of an API server that refuses."""
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}
    return code, body


def forbidden(verb: str, resource: str) -> Answer:
    """As a cluster with RBAC says it."""
    user = "system:serviceaccount:slipstream:default"
    return status(403, f'{resource} is forbidden: User "{user}" cannot {verb} resource "{resource}" in API group ""')


def node(name: str, *, clique: str | None = "a.0", **changes: Any) -> dict[str, Any]:
    """A compute tray of a GB200 NVL72."""
    labels = {"kubernetes.io/arch": "arm64", "nvidia.com/gpu.product": "NVIDIA-GB200"}
    if clique is not None:
        labels["nvidia.com/gpu.clique"] = clique
    allocatable = {"cpu": "143500m", "memory": "1004Gi", "ephemeral-storage": "1Ti", "nvidia.com/gpu": "4"}
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": {"unschedulable": changes.get("cordoned", False), "taints": changes.get("taints", [])},
        "status": {
            "allocatable": allocatable | changes.get("allocatable", {}),
            "conditions": [{"type": "Ready", "status": "True" if changes.get("ready", True) else "Unknown"}],
        },
    }


def other_node(**allocatable: str) -> dict[str, Any]:
    """A node without GPUs, of the usual architecture."""
    found = node("other", allocatable=allocatable)
    found["metadata"]["labels"] = {"kubernetes.io/arch": "amd64"}
    return found


def node_list(*nodes: dict[str, Any]) -> Answer:
    """These nodes, and one for pods without GPUs."""
    return found("NodeList", items=[*nodes, other_node()])


def crd(name: str, *served: str) -> Answer:
    plural, _, group = name.partition(".")
    names = {"plural": plural, "kind": plural.title()}
    versions = [{"name": version, "served": True, "storage": version == served[0]} for version in served]
    return found(
        *("CustomResourceDefinition", name),
        version="apiextensions.k8s.io/v1",
        spec={"group": group, "names": names, "scope": "Namespaced", "versions": versions},
        status={"conditions": [{"type": "Established", "status": "True"}], "acceptedNames": names},
    )


def claim(phase: str = "Bound", mode: str = "ReadWriteMany") -> Answer:
    spec = {"accessModes": [mode], "storageClassName": "lustre"}
    return found("PersistentVolumeClaim", "slipstream-runs", spec=spec, status={"phase": phase})


def storage_class(binding: str = "Immediate") -> Answer:
    own = {"provisioner": "lustre.csi.storage", "volumeBindingMode": binding}
    return found("StorageClass", "lustre", version="storage.k8s.io/v1", **own)


def secret(**values: str) -> Answer:
    return found("Secret", "s", data=values)


def api_groups(*groups: str) -> Answer:
    """Names in the form `group/version`."""
    items = []
    for group in groups:
        name, _, version = group.partition("/")
        entry = {"groupVersion": group, "version": version}
        items.append({"name": name, "versions": [entry], "preferredVersion": entry})
    return 200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": items}


def quotas(*items: tuple[dict[str, str], dict[str, str]], scopes: Sequence[str] = ()) -> Answer:
    """Pairs of (hard, used)."""
    own = {"metadata": {"name": "team"}, "spec": {"scopes": list(scopes)}}
    listed = [{**own, "status": {"hard": hard, "used": used}} for hard, used in items]
    return found("ResourceQuotaList", items=listed)


def pod(phase: str, **container_state: Any) -> Answer:
    probe = {"name": "probe", "image": "i", "imageID": "", "ready": False, "restartCount": 0, "state": container_state}
    status = {"phase": phase, "containerStatuses": [probe] if container_state else []}
    return found("Pod", "slipstream-preflight-x1", status=status)


def whole_cluster(changes: dict[str, Answer] | None = None) -> Cluster:
    """Eight trays in one clique, and everything installed, but for these answers."""
    crds = "GET /apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    templates = f"GET /apis/resource.k8s.io/v1/namespaces/{NAMESPACE}/resourceclaimtemplates"
    used = ({"requests.nvidia.com/gpu": "64"}, {"requests.nvidia.com/gpu": "32"})
    return Cluster(
        answers={
            "GET /api/v1/nodes": node_list(*[node(f"tray-{index}") for index in range(8)]),
            f"{crds}/rayjobs.ray.io": crd("rayjobs.ray.io", "v1"),
            f"{crds}/computedomains.resource.nvidia.com": crd("computedomains.resource.nvidia.com", "v1beta1"),
            "GET /apis/": api_groups("apps/v1", "resource.k8s.io/v1"),
            f"{templates}/slipstream-channel": found("ResourceClaimTemplate", "slipstream-channel"),
            f"GET {CORE}/persistentvolumeclaims/slipstream-runs": claim(),
            "GET /apis/storage.k8s.io/v1/storageclasses/lustre": storage_class(),
            f"GET {CORE}/secrets/slipstream-ray": secret(auth_token="eA=="),
            f"GET {CORE}/serviceaccounts/slipstream": found("ServiceAccount", "slipstream"),
            f"GET {CORE}/resourcequotas": quotas(used),
            f"POST {CORE}/pods": pod("Pending"),
            f"GET {CORE}/pods/slipstream-preflight-x1": pod("Succeeded"),
            f"DELETE {CORE}/pods/slipstream-preflight-x1": pod("Succeeded"),
            "GET /health": (200, {}),
            **(changes or {}),
        }
    )


@contextmanager
def serving(cluster: Cluster, *, timeout_s: float = 5.0) -> Iterator[tuple[Api, str]]:
    """A client of the cluster, and the server's address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else every answer waits 40 ms, between its head and its body

        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            body = json.loads(self.rfile.read(length)) if length else {}
            route = f"{self.command} {self.path.partition('?')[0]}"
            cluster.asked.append((f"{self.command} {self.path}", body))
            code, answer = cluster.answers.get(route, status(404, f"no {route}"))
            if code == 0:
                cluster.released.wait(30)
                return
            if code < 0:
                self.wfile.write(b"\0\0\6\4\0\0\0\0\0\r\n")
                return
            data = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_DELETE = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield api_of(k8s.Configuration(host=address), timeout_s=timeout_s), address
    finally:
        cluster.released.set()
        server.shutdown()
        server.server_close()
