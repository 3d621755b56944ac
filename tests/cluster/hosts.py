"""Hosts made on one machine: each a process tree with its own network, mounts, processes, /dev/shm and /tmp.

A host is a shell in namespaces of its own; it is that host's init, and with it the kernel ends every process of the
host, removes its network and forgets its file systems. The network between them is a bridge in one more namespace, so
nothing is ever created in the machine's own: no names that two runs could share, and nothing to clean up after a run
that was killed. Needs the right to make namespaces, util-linux and iproute2.
"""

from __future__ import annotations

import getpass
import json
import os
import queue
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from slipstream.workers.forked_workers import FORKING

ROOT = Path(__file__).resolve().parents[2]
_UNSHARE = ("unshare", "--mount", "--net", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc")
_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL", "--")  # who is killed takes along what it runs on a host
_SHM_MIB, _TMP_MIB = 64, 1024  # /dev/shm as a pod has it by default; Ray's object store then lies in /tmp
_OBJECT_STORE_BYTES = 80 << 20  # just above Ray's least
_PORT, _NUM_GPUS = 6379, 4  # of Ray's head; of each host, logical
_CALL = """
import importlib, json, sys
module, function, arguments = sys.argv[1:]
answer = getattr(importlib.import_module(module), function)(*json.loads(arguments))
sys.stdout.write("\\nanswer: " + json.dumps(answer) + "\\n")
"""
# A bash that reaps what becomes an orphan on its host. What it keeps of the machine's /tmp, it keeps by open files.
# There is no name server, and who asks for a name is told so at once: else every lookup would wait for its timeout.
_INIT = """
set -e
mount --make-rprivate /
fds=()
for path in $KEPT; do exec {fd}<"$path"; fds+=("$fd:$path"); done
mount -t tmpfs -o size=${TMP_MIB}m tmpfs /tmp
mount -t tmpfs -o size=${SHM_MIB}m tmpfs /dev/shm
for kept in "${fds[@]}"; do
  path=${kept#*:}; mkdir -p "$path"; mount --no-canonicalize --bind "/proc/$$/fd/${kept%%:*}" "$path"
done
echo nameserver 127.0.0.1 > /tmp/resolv.conf; mount --bind /tmp/resolv.conf /etc/resolv.conf
hostname "$NAME"
ip link set lo up
echo ready
while :; do sleep 1000 & wait; done
"""


@cache
def why_not() -> str:
    """Why no hosts can be made here, and what would help; empty if they can."""
    try:
        done = subprocess.run([*_UNSHARE, "ip", "-Version"], capture_output=True, text=True, timeout=20)
    except FileNotFoundError:
        return "making hosts needs unshare (Debian's util-linux)"
    if done.returncode == 0:
        return ""
    said = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
    if "ip" in said[0] and "No such file" in said[0]:
        return f"making hosts needs ip (apt-get install iproute2): {said[0]}"
    return f"making hosts needs root with CAP_SYS_ADMIN and CAP_NET_ADMIN (sudo make test): {said[0]}"


@dataclass(frozen=True)
class Host:
    """A host; `pid` is the number of its init on the machine."""

    name: str
    address: str
    pid: int
    environment: Mapping[str, str] = field(repr=False)

    def command(self, *argv: str) -> list[str]:
        """`argv` as run on this host, in the repository's root."""
        enter = ("nsenter", "--target", str(self.pid), "--mount", "--net", "--pid", "--uts", "--ipc", f"--wd={ROOT}")
        return [*enter, "--", *_WITH_PARENT, *argv]

    def run(self, *argv: str, timeout_s: float = 120) -> str:
        """Run to the end; returns what was printed.

        Raises:
            AssertionError: it failed, with the end of what it printed.
        """
        done = subprocess.run(
            self.command(*argv), env=dict(self.environment), capture_output=True, text=True, timeout=timeout_s
        )
        said = f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        assert done.returncode == 0, f"{self.name}: {argv} ended with {done.returncode}: {said}"
        return done.stdout

    def pids(self, word: str = "") -> list[int]:
        """The host's processes whose command line has `word` in it, as the machine counts them."""
        own = _net(self.pid)
        pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
        return [pid for pid in pids if own and _net(pid) == own and word in _command_line(pid)]

    def freeze(self) -> None:
        """Stop every process of the host; the host's network stack still answers."""
        for pid in self.pids():
            os.kill(pid, signal.SIGSTOP)

    def unplug(self) -> None:
        """Take its network away: packets to it are lost without an answer."""
        self.run("ip", "link", "set", "eth0", "down")

    def kill(self) -> None:
        """End the host with all its processes, network and file systems."""
        with suppress(ProcessLookupError):  # it is dead already
            os.kill(self.pid, signal.SIGKILL)


class Network(ExitStack):
    """A bridge in a namespace of its own, and hosts on it. Use it in a `with` block."""

    def __enter__(self) -> Network:
        self._environment, self._num_hosts = _host_environment(), 0
        self._switch = self.enter_context(_init("switch", self._environment))
        self._on_switch("ip", "link", "add", "br0", "type", "bridge")
        self._on_switch("ip", "link", "set", "br0", "up")
        return self

    def add(self) -> Host:
        number = self._num_hosts = self._num_hosts + 1
        name, address = f"host{number}", f"10.77.0.{10 + number}"
        pid = self.enter_context(_init(name, self._environment))
        host = Host(name=name, address=address, pid=pid, environment=self._environment)
        peer = ("peer", "name", "eth0", "netns", str(pid))
        self._on_switch("ip", "link", "add", name, "type", "veth", *peer)
        self._on_switch("ip", "link", "set", name, "master", "br0", "up")
        host.run("ip", "address", "add", f"{address}/24", "dev", "eth0")
        host.run("ip", "link", "set", "eth0", "up")
        host.run("ip", "route", "add", "default", "dev", "eth0")  # as others have: Ray asks for the way out
        return host

    def _on_switch(self, *argv: str) -> None:
        # The mounts stay the machine's, whose /proc knows the hosts by the numbers that we use.
        subprocess.run(["nsenter", "--target", str(self._switch), "--net", "--", *argv], check=True)


@dataclass(frozen=True)
class Cluster:
    """Hosts with a Ray node on each, the first its head."""

    network: Network
    hosts: list[Host] = field(default_factory=list)

    def add(self, num_hosts: int) -> list[Host]:
        hosts = [self.network.add() for _ in range(num_hosts)]
        with ThreadPoolExecutor() as pool:
            joined = list(pool.map(self._join, hosts))
        self.hosts.extend(joined)
        return joined

    def _join(self, host: Host) -> Host:
        ray = [str(Path(sys.executable).with_name("ray")), "start", "--disable-usage-stats"]
        ray += ["--num-cpus=1"]  # actors ask for none, and Ray starts an idle process for each
        ray += [f"--node-ip-address={host.address}", f"--num-gpus={_NUM_GPUS}"]
        ray += [f"--object-store-memory={_OBJECT_STORE_BYTES}"]
        if self.hosts:
            ray += [f"--address={self.hosts[0].address}:{_PORT}"]
        else:
            ray += ["--head", f"--port={_PORT}", "--include-dashboard=false"]
        host.run(*ray, timeout_s=180)
        return host

    def start(self, script: str, function: str, *arguments: Any) -> Driver:
        """Begin to call a function of a module under `tests/cluster` on the first host, as the driver of a run."""
        argv = (sys.executable, "-c", _CALL, f"tests.cluster.{script}", function, json.dumps(arguments))
        host = self.hosts[0]
        return Driver(host.command(*argv), {**host.environment, "RAY_ADDRESS": f"{host.address}:{_PORT}"})

    def call(self, script: str, function: str, *arguments: Any, timeout_s: float = 180) -> Any:
        return self.start(script, function, *arguments).read("answer", timeout_s=timeout_s)


class Driver:
    """A process that drives a run on the first host, and tells how it is going in lines of a word and JSON."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # it lives as long as this object
        self._process = subprocess.Popen(
            command, env=dict(environment), stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._pump, daemon=True).start()

    def read(self, word: str, *, timeout_s: float) -> Any:
        """Read the JSON of the next line that begins with `word`; skip the lines before it.

        Raises:
            AssertionError: none came in time, or the driver ended; with the end of what it printed to stderr.
        """
        end_s = time.monotonic() + timeout_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, end_s - time.monotonic()))
            except queue.Empty:
                self.end()
                raise AssertionError(f"no {word!r} within {timeout_s} s: {self._said()}") from None
            if line.startswith(f"{word}: "):
                return json.loads(line.partition(": ")[2])
            assert line, f"the driver ended without {word!r}: {self._said()}"

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _pump(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _said(self) -> str:
        self._process.wait(timeout=10)
        self._errors.seek(0)
        return self._errors.read()[-6000:]


def split_over(gpus_per_node: int) -> dict[str, Any]:
    """Placement of a recipe whose learner has two hosts, and whose engines have one."""
    nodes = {"nodes": 3, "generation_nodes": 1, "training_nodes": 2}
    return {"placement": {"mode": "split", **nodes, "gpus_per_node": gpus_per_node, "logical_gpus": True}}


def seen_by_all() -> tempfile.TemporaryDirectory[str]:
    """A directory that all hosts see; on one that hung somebody may still write there at the end."""
    return tempfile.TemporaryDirectory(dir="/var/tmp", prefix="slipstream-cluster-", ignore_cleanup_errors=True)


@contextmanager
def ray_cluster(num_hosts: int) -> Iterator[Cluster]:
    """`num_hosts` hosts with Ray running; all of it is gone after the block."""
    with Network() as network:
        cluster = Cluster(network)
        cluster.add(1)
        cluster.add(num_hosts - 1)
        yield cluster


@contextmanager
def _init(name: str, environment: Mapping[str, str]) -> Iterator[int]:
    """The first process of a host for the span of the block; the kernel ends it too if this process is killed."""
    argv = [*_WITH_PARENT, *_UNSHARE, "bash", "-c", _INIT]
    process = subprocess.Popen(
        argv, env={**environment, "NAME": name}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise AssertionError(f"{name} did not start: {process.communicate(timeout=5)[1][-2000:]}")
        (init,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        yield int(init)
    finally:
        process.kill()
        process.communicate()


def _host_environment() -> dict[str, str]:
    """Environment of every process of a run's hosts, which names no Ray and no place of the machine itself."""
    # What vLLM has torch compile, 20 s an engine, is kept there; else every engine of every host would compile it anew.
    compiled = Path("/tmp") / f"torchinductor_{getpass.getuser()}"
    compiled.mkdir(exist_ok=True)
    kept = sorted({str(path) for path in (ROOT, Path(sys.prefix).resolve(), compiled) if path.is_relative_to("/tmp")})
    passed_on = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTEST_"))}
    passed_on.pop("TMPDIR", None)
    return {
        **passed_on,
        "KEPT": " ".join(kept),
        "SHM_MIB": str(_SHM_MIB),
        "TMP_MIB": str(_TMP_MIB),
        "TORCHINDUCTOR_CACHE_DIR": str(compiled),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        **{name: os.environ[name] for name in FORKING if name in os.environ},
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        # A host that is gone is noticed after 6 s instead of a minute.
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_timeout_ms": "2000",
        "RAY_health_check_failure_threshold": "3",
    }


def _net(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:  # it has ended
        return ""


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""
