"""A PostgreSQL server of its own for a test, as an unprivileged user, on the loopback interface."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.forked.ranks import free_ports

_USER = "slipstream"
_START_S = 60.0


def programs() -> Path | None:
    """The folder of PostgreSQL's programs, None where they are not installed. Debian keeps them out of the path."""
    found = shutil.which("postgres")
    folders = [Path(found).resolve().parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in folders if (folder / "initdb").is_file()), None)


@contextmanager
def postgres_server() -> Iterator[str]:
    """Its address as SQLAlchemy takes it, driver included: its default is another one. The data are gone afterwards."""
    folder = programs()
    assert folder is not None
    with tempfile.TemporaryDirectory(prefix="slipstream-postgres-") as name:  # pytest's are closed to other users
        directory, owner = Path(name), _owner()
        if owner:
            os.chown(directory, owner["user"], owner["group"])
        data, (port,) = directory / "data", free_ports(1)
        create = [str(folder / "initdb"), "-D", str(data), "-U", _USER, "--auth=trust", "--no-sync"]
        subprocess.run(create, check=True, capture_output=True, cwd=directory, timeout=_START_S, **owner)
        options = {"listen_addresses": "127.0.0.1", "port": port, "unix_socket_directories": "", "fsync": "off"}
        command = [str(folder / "postgres"), "-D", str(data)]
        command += [word for option, value in options.items() for word in ("-c", f"{option}={value}")]
        server = subprocess.Popen(command, cwd=directory, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **owner)
        try:
            _wait_for(folder, server, port)
            yield f"postgresql+psycopg2://{_USER}@127.0.0.1:{port}/postgres"
        finally:
            server.send_signal(signal.SIGINT)  # a fast shutdown: clients are cut off
            server.wait(30)


def _owner() -> dict[str, Any]:
    """Whom to run as: PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def _wait_for(folder: Path, server: subprocess.Popen[Any], port: int) -> None:
    ask = [str(folder / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(port)]
    deadline_s = time.monotonic() + _START_S
    while subprocess.run(ask, check=False).returncode != 0:
        assert server.poll() is None, f"PostgreSQL ended with status {server.returncode}"
        assert time.monotonic() < deadline_s, f"PostgreSQL did not answer within {_START_S} s"
        time.sleep(0.2)
