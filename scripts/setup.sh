#!/usr/bin/env bash
# Makes the virtual environment $VENV hold the packages of $LOCK and this checkout (editable). Does nothing when it
# already does: a stamp keeps the hash of all that decides the outcome, the lock that was installed among it.
#   scripts/setup.sh [--packages-only]     (an image installs the packages before the code is there)
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=${VENV:-.venv}
CPU_LOCK=requirements/cpu.lock
PYPI_LOCK=requirements/cpu_pypi.lock # the same with PyPI's torch, for hosts that reach no CPU build
LOCK=${LOCK:-$CPU_LOCK}
UV_VERSION=0.13.8
python=$VENV/bin/python
stamp=$VENV/slipstream.stamp
source scripts/package_sources.sh

say() { echo "setup: $*" >&2; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    say "needs Python 3.11 or 3.12, and found neither as ${PYTHON:-python3.11, python3.12 or python3};" \
        "install one or name it: PYTHON=/path/to/python make setup"
    return 1
}

make_venv() {
    "$python" -c '' 2>/dev/null && return
    local base
    base=$(find_python)
    say "making $VENV with $base"
    "$base" -m venv --clear "$VENV"
}

uv_install() { "$python" -m uv pip install --quiet --python "$python" --no-deps "$@"; }

# The CPU build of torch is a local version (+cpu) that the public index does not carry: it comes from where pip is
# told to look, or else from PyTorch's own index, which uv knows. That index is asked for torch alone. Where it cannot be
# asked either, PyPI's build serves, which computes on a CPU as well.
install_torch() {
    local torch pypi_torch
    torch=$(torch_of "$LOCK")
    uv_install "$torch" 2>/dev/null && return
    [[ $torch == *+cpu ]] || { uv_install "$torch"; return; }
    say "$torch is not in the configured sources; asking PyTorch's CPU index"
    uv_install --torch-backend cpu "$torch" && return
    if [[ $LOCK != "$CPU_LOCK" ]]; then
        say "no source has $torch; set PIP_FIND_LINKS to a directory that holds its wheel"
        return 1
    fi
    pypi_torch=$(torch_of "$PYPI_LOCK")
    say "no source has $torch; installing $pypi_torch with its CUDA libraries ($PYPI_LOCK): about 3 GB more"
    uv_install "$pypi_torch" && LOCK=$PYPI_LOCK && return
    say "no source has $torch or $pypi_torch; set PIP_INDEX_URL to an index that has one of them, or PIP_FIND_LINKS to" \
        "a directory that holds its wheel"
    return 1
}

torch_of() { grep -E '^torch==' "$1"; }

# uv cannot use every source that pip can; with --no-deps and exact pins pip is only slower, never different.
install_packages() {
    uv_install -r "$LOCK" && return
    say "uv could not install the lock file; trying pip"
    "$python" -m pip install --quiet --no-deps -r "$LOCK"
}

# What every process of a run imports. Without it the first of each kind would compile it, one file after another.
compile_bytecode() {
    local site
    site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    # It fails where a package ships files that are no Python of this version; those are not imported.
    "$python" -m compileall -q -j 0 "$site"/{flytekit,megatron,mlflow,ray,speculators,torch,transformers,vllm} \
        >/dev/null 2>&1 || true
}

stamp_of() {
    cat "$1" pyproject.toml scripts/setup.sh | "$python" -c 'import hashlib, os, sys
print(hashlib.sha256(sys.stdin.buffer.read() + os.getcwd().encode()).hexdigest())'
}

is_done() {
    [[ -f $stamp ]] || return
    [[ $(<"$stamp") == "$(stamp_of "$LOCK")" ]] && return
    [[ $LOCK == "$CPU_LOCK" && $(<"$stamp") == "$(stamp_of "$PYPI_LOCK")" ]]
}

make_venv
is_done && exit 0

started=$SECONDS
use_pip_settings
say "installing $(grep -c == "$LOCK") packages of $LOCK into $VENV"
"$python" -m pip install -qq --disable-pip-version-check "uv==$UV_VERSION"
install_torch
install_packages
compile_bytecode
if [[ ${1:-} != --packages-only ]]; then
    uv_install --no-build-isolation --editable .
    stamp_of "$LOCK" >"$stamp"
fi
say "done in $((SECONDS - started)) s"
