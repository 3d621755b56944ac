"""A real MLflow server, a PostgreSQL server of its own for it, and an execution to log there."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slipstream.drafts.length import DraftLength
from slipstream.recipe import load_recipe, parameters
from slipstream.records.files import write_record
from slipstream.records.run import DriftRecord
from slipstream.report.page import write_report
from slipstream.stages.runs import end_reported_execution, tracked
from slipstream.stages.start_run import start_run
from slipstream.stages.train_grpo import arm_labels
from slipstream.train.metrics import metrics_of
from tests.forked.ranks import free_ports
from tests.unit.report.handmade import RECORD

_USER = "slipstream"
_START_S = 150.0  # importing MLflow's server takes 10 s alone, and 50 on a busy machine


@contextmanager
def served(root: Path, store: str) -> Iterator[str]:
    """Address of MLflow's server on `store`, for as long as it is needed; its log and artifacts lie under `root`."""
    (port,) = free_ports(1)
    address, log = f"http://127.0.0.1:{port}", root / "server.log"
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", store]
    with log.open("wb") as file:
        how: dict[str, Any] = {"stdout": file, "stderr": subprocess.STDOUT, "start_new_session": True}
        server = subprocess.Popen(command, cwd=root, **how)

        def answers() -> bool:
            try:
                with urllib.request.urlopen(f"{address}/health", timeout=5):
                    return True
            except OSError:
                return False

        try:
            _wait_for(answers, server, log.read_text)
            yield address
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGKILL)  # the server's own workers too
            server.wait(30)


def log_execution(root: Path, name: str, seed: int) -> None:
    """The handmade record, logged by the functions that the tasks call into the SQLite store under `root`."""
    overrides = {"tracking": {"replay_every_s": 0.1, "close_wait_s": 120.0}, "grpo": {"seed": seed}}
    context, path = start_run("tiny", root=root, execution=name, overrides=overrides)
    recipe = load_recipe(str(path))
    for record in RECORD.arms:
        length = DraftLength(num_speculative_tokens=record.num_speculative_tokens, schedule=record.schedule)
        labels = arm_labels(recipe, record.arm, length)
        title, params = f"{name} {record.arm.value}", {**parameters(recipe), **labels}
        with tracked(context, recipe, f"train_grpo_{record.arm.value}", labels, name=title, params=params) as tracker:
            for step in record.steps:
                tracker.log(metrics_of(step), step.step)
    write_record(RECORD, root / name / "report" / "run.json")
    write_report(RECORD, root / name / "report")
    end_reported_execution(context, recipe, RECORD, root / name / "report", DriftRecord(summary="Not compared."))


def postgres_programs() -> Path | None:
    """The folder of PostgreSQL's programs, None where they are not installed. Debian keeps them out of the path."""
    found = shutil.which("postgres")
    folders = [Path(found).resolve().parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in folders if (folder / "initdb").is_file()), None)


@contextmanager
def postgres_server() -> Iterator[str]:
    """Its address as SQLAlchemy takes it, driver included: its default is another one. The data are gone afterwards.

    It is on the loopback interface, and run by an unprivileged user: PostgreSQL refuses to run as root.
    """
    folder = postgres_programs()
    assert folder is not None
    owner: dict[str, Any] = {}
    if os.geteuid() == 0:
        nobody = pwd.getpwnam("nobody")
        owner = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
    with tempfile.TemporaryDirectory(prefix="slipstream-postgres-") as directory:  # pytest's are closed to other users
        if owner:
            os.chown(directory, owner["user"], owner["group"])
        data, (port,) = f"{directory}/data", free_ports(1)
        create = [str(folder / "initdb"), "-D", data, "-U", _USER, "--auth=trust", "--no-sync"]
        subprocess.run(create, check=True, capture_output=True, cwd=directory, timeout=_START_S, **owner)
        options = {"listen_addresses": "127.0.0.1", "port": port, "unix_socket_directories": "", "fsync": "off"}
        command = [str(folder / "postgres"), "-D", data]
        command += [word for option, value in options.items() for word in ("-c", f"{option}={value}")]
        server = subprocess.Popen(command, cwd=directory, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **owner)
        ask = [str(folder / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(port)]
        try:
            _wait_for(lambda: subprocess.run(ask, check=False).returncode == 0, server, str)
            yield f"postgresql+psycopg2://{_USER}@127.0.0.1:{port}/postgres"
        finally:
            server.send_signal(signal.SIGINT)  # a fast shutdown: clients are cut off
            server.wait(30)


def _wait_for(answers: Callable[[], bool], server: subprocess.Popen[Any], log: Callable[[], str]) -> None:
    deadline_s = time.monotonic() + _START_S
    while not answers():
        assert server.poll() is None, f"the server ended with status {server.returncode}:\n{log()[-2000:]}"
        assert time.monotonic() < deadline_s, f"the server did not answer within {_START_S} s"
        time.sleep(0.2)
