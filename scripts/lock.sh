#!/usr/bin/env bash
# Writes requirements/*.lock from pyproject.toml. Pins that still fit stay as they are; `make lock UPGRADE=1` renews all.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=${VENV:-.venv}
python=$VENV/bin/python
source scripts/package_sources.sh
use_pip_settings

compile() {
    "$python" -m uv pip compile --quiet --no-annotate --custom-compile-command "make lock" \
        ${UPGRADE:+--upgrade} "$@" pyproject.toml
}

mark_intel() { sed -i -E "s/^(intel-[a-z-]+==[^ ]+)$/\1 ; platform_machine == 'x86_64'/" "$1"; }

# The main environment, on x86-64 and on arm64 alike but for Intel's runtime, which the resolver pins without a marker.
compile --python-version 3.11 --python-platform x86_64-manylinux_2_28 --extra cpu --extra dev -o requirements/cpu.lock
mark_intel requirements/cpu.lock

# What is laid over the main environment: an extra, and whatever it needs that is not there already.
layer=$(mktemp)
rest=$(mktemp)
trap 'rm -f "$layer" "$rest"' EXIT
for extra in bench mutants lm; do
    compile --python-version 3.11 --python-platform x86_64-manylinux_2_28 --extra cpu --extra dev --extra "$extra" \
        --constraints requirements/cpu.lock -o "$layer"
    {
        echo "# Laid over requirements/cpu.lock by \`make $extra-setup\`; written by \`make lock\`."
        grep == "$layer" | cut -d' ' -f1 | grep -vxFf <(cut -d' ' -f1 requirements/cpu.lock)
    } >"requirements/$extra.lock"
    : >"$layer"
done

# What follows is resolved without pip's own wheel directories: they may hold a CPU build of torch.
unset UV_FIND_LINKS PIP_FIND_LINKS

# The main environment for hosts that reach PyPI alone: torch as it is there, and its libraries, beside the same rest.
# vLLM's CPU build asks for torch's CPU build by name, and runs on this one too.
grep -vE '^(torch|triton)==' requirements/cpu.lock >"$rest"
grep -oE '^torch==[0-9.]+' requirements/cpu.lock >"$layer"
compile --python-version 3.11 --python-platform x86_64-manylinux_2_28 --extra cpu --extra dev --constraints "$rest" \
    --overrides "$layer" -o requirements/cpu_pypi.lock
mark_intel requirements/cpu_pypi.lock

# The CUDA image.
compile --python-version 3.12 --python-platform aarch64-manylinux_2_28 --extra gpu -o requirements/gpu.lock

# SGLang's own environment, of PyPI alone and without our overrides. Its wheels ask for a newer C library than ours.
"$python" -m uv pip compile --quiet --no-config --no-annotate --custom-compile-command "make lock" \
    ${UPGRADE:+--upgrade} --python-version 3.11 --python-platform x86_64-manylinux_2_35 --overrides requirements/sglang.overrides \
    requirements/sglang.in -o requirements/sglang.lock
