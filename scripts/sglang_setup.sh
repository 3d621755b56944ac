#!/usr/bin/env bash
# Makes $SGLANG hold the packages of requirements/sglang.lock: an environment of its own, as SGLang pins another torch
# than vLLM does. Does nothing when it already does.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=${VENV:-.venv}
SGLANG=${SGLANG:-.venv-sglang}
LOCK=requirements/sglang.lock
python=$VENV/bin/python
stamp=$SGLANG/slipstream.stamp
source scripts/package_sources.sh

wanted=$(cat "$LOCK" scripts/sglang_setup.sh | sha256sum)
[[ -f $stamp && $(<"$stamp") == "$wanted" ]] && exit 0

use_pip_settings
"$python" -m uv venv --quiet --clear --python "$python" "$SGLANG"
# Our own overrides in pyproject.toml would leave torchvision out.
"$python" -m uv pip install --quiet --no-config --python "$SGLANG/bin/python" --no-deps -r "$LOCK"

# SGLang imports its compiled kernels, which are for GPUs and CPUs with AMX, also where it calls none of them. This module
# stands in their place, and a call of any of them is an error.
site=$("$SGLANG/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir -p "$site/sgl_kernel"
cat >"$site/sgl_kernel/__init__.py" <<'PYTHON'
"""Stands in for SGLang's compiled kernels, which are not installed: a call of any of them is an error."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} is a compiled kernel that is not installed")

    return absent
PYTHON
echo "$wanted" >"$stamp"
