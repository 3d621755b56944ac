"""scripts/setup.sh, with a stand-in for the environment's Python that notes what uv and pip are asked for."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CPU, PYPI = "requirements/cpu.lock", "requirements/cpu_pypi.lock"
NAMED, INDEX, FALLBACK = "uv torch==2.13.0+cpu", "uv --torch-backend cpu torch==2.13.0+cpu", "uv torch==2.13.0"

# Answers for `python -m uv` and `python -m pip`; a line that $REFUSED matches fails.
_PYTHON = f"""#!/bin/bash
case "$1 $2" in
    "-m uv") shift 2; asked="uv $*" ;;
    "-m pip") [[ $3 == config ]] && exit 1; shift 2; asked="pip $*" ;;
    "-m compileall") exit 0 ;;
    *) exec {sys.executable} "$@" ;;
esac
asked=$(sed 's/pip install --quiet --python [^ ]* --no-deps //' <<<"$asked")
echo "$asked" >>asked
if grep -qxE "$REFUSED" <<<"$asked"; then echo "error: $asked" >&2; exit 1; fi
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What the script reads, and an environment that is there already."""
    for name in ("requirements", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(_PYTHON)
    python.chmod(0o755)
    return tmp_path


def setup(checkout: Path, *arguments: str, refused: str = "", **environment: str) -> tuple[int, list[str], str]:
    """The exit status, what was asked for, but for uv itself, and what was said."""
    (checkout / "asked").unlink(missing_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_", "LOCK", "VENV"))}
    run = subprocess.run(
        ["bash", "scripts/setup.sh", *arguments],
        cwd=checkout,
        env={**kept, "REFUSED": refused or "nothing", **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    asked = (checkout / "asked").read_text().splitlines() if (checkout / "asked").exists() else []
    return run.returncode, [line for line in asked if "uv==" not in line], run.stderr


EDITABLE = "uv --no-build-isolation --editable ."


def test_where_the_cpu_build_is_found_nothing_else_is_asked_for_and_later_nothing_at_all(checkout: Path) -> None:
    status, asked, said = setup(checkout)
    assert (status, asked) == (0, [NAMED, f"uv -r {CPU}", EDITABLE])
    assert PYPI not in said
    assert setup(checkout) == (0, [], "")


def test_pytorchs_own_index_comes_second(checkout: Path) -> None:
    status, asked, said = setup(checkout, refused=re.escape(NAMED))
    assert (status, asked) == (0, [NAMED, INDEX, f"uv -r {CPU}", EDITABLE])
    assert "setup: torch==2.13.0+cpu is not in the configured sources; asking PyTorch's CPU index" in said
    assert PYPI not in said
    assert setup(checkout, refused=".*") == (0, [], "")


def test_on_a_host_that_reaches_pypi_alone_its_torch_is_installed_with_a_lock_of_its_own(checkout: Path) -> None:
    no_cpu_build = ".*[+]cpu"
    status, asked, said = setup(checkout, refused=no_cpu_build)
    assert (status, asked) == (0, [NAMED, INDEX, FALLBACK, f"uv -r {PYPI}", EDITABLE])
    instead = f"installing torch==2.13.0 with its CUDA libraries ({PYPI}): about 3 GB more"
    assert f"setup: no source has torch==2.13.0+cpu; {instead}\n" in said
    assert setup(checkout, refused=".*") == (0, [], "")
    lock = checkout / PYPI
    lock.write_text(lock.read_text() + "# another\n")
    assert setup(checkout, refused=no_cpu_build)[1] == asked


def test_without_the_cpu_build_an_image_falls_back_and_pip_takes_over_with_the_lock_of_the_torch_that_was_found(
    checkout: Path,
) -> None:
    status, asked, _ = setup(checkout, "--packages-only", refused=".*[+]cpu")
    assert (status, asked) == (0, [NAMED, INDEX, FALLBACK, f"uv -r {PYPI}"])
    assert not (checkout / ".venv" / "slipstream.stamp").exists()
    status, asked, _ = setup(checkout, refused=".*[+]cpu|uv -r .*")
    assert (status, asked[3:]) == (0, [f"uv -r {PYPI}", f"pip install --quiet --no-deps -r {PYPI}", EDITABLE])


def test_without_any_torch_the_end_says_what_was_looked_for_and_leaves_no_stamp(checkout: Path) -> None:
    status, asked, said = setup(checkout, refused=".*torch==.*")
    assert (status, asked) == (1, [NAMED, INDEX, FALLBACK])
    assert said.endswith(
        "setup: no source has torch==2.13.0+cpu or torch==2.13.0; set PIP_INDEX_URL to an index that has one of them, "
        "or PIP_FIND_LINKS to a directory that holds its wheel\n"
    )
    assert not (checkout / ".venv" / "slipstream.stamp").exists()


def test_a_lock_that_was_asked_for_by_name_is_the_one_that_counts(checkout: Path) -> None:
    status, asked, _ = setup(checkout, LOCK=PYPI)
    assert (status, asked) == (0, [FALLBACK, f"uv -r {PYPI}", EDITABLE])
    assert setup(checkout, LOCK=PYPI) == (0, [], "")
    assert setup(checkout, LOCK="requirements/gpu.lock")[1] == [FALLBACK, "uv -r requirements/gpu.lock", EDITABLE]
    # What holds another lock is no main environment, whichever of the two it may have.
    assert setup(checkout)[1] == [NAMED, f"uv -r {CPU}", EDITABLE]
