#!/usr/bin/env bash
# Gathers, on a machine with a network, what a GPU host without one needs: every wheel of requirements/gpu.lock, uv, and a
# standalone Python 3.12 with its headers. docs/gpu.md says what to copy and type then.
#   scripts/wheelhouse.sh x86_64|aarch64 [--dry-run] [--only NAME] [--output DIR]
# --dry-run lists names and sizes; --only takes one package. A download that broke off goes on where it stopped.
set -euo pipefail
cd "$(dirname "$0")/.."

platform=${1:-}
dry=
only=
output=
shift || true
while (($#)); do
    case $1 in
        --dry-run) dry=yes ;;
        --only) only=$2 && shift ;;
        --output) output=$2 && shift ;;
        *) platform= ;;
    esac
    shift
done
if [[ $platform != x86_64 && $platform != aarch64 ]]; then
    echo "usage: scripts/wheelhouse.sh x86_64|aarch64 [--dry-run] [--only NAME] [--output DIR]" >&2
    exit 2
fi
output=${output:-build/wheelhouse-$platform}
python=${VENV:-.venv}/bin/python
[[ -x $python ]] || { echo "wheelhouse: run make setup first: uv and packaging of .venv are used" >&2 && exit 1; }
source scripts/package_sources.sh
use_pip_settings
unset UV_FIND_LINKS PIP_FIND_LINKS # they may hold a CPU build of torch

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
grep -E "^${only:-[a-z0-9._-]+}==" requirements/gpu.lock >"$work/wanted" ||
    { echo "wheelhouse: requirements/gpu.lock has no $only" >&2 && exit 2; }
[[ -n $only ]] || "$python" -m pip freeze | grep -E '^uv==' >>"$work/wanted" # it installs the rest
"$python" -m uv pip compile --quiet --no-deps --universal --format pylock.toml --python-version 3.12 \
    -o "$work/pylock.toml" "$work/wanted"

# One line a wheel: size, SHA-256, address. Of several wheels the one is taken that pip would install on that machine.
"$python" - "$platform" "$work/pylock.toml" >"$work/wheels" <<'PYTHON'
import sys
import tomllib
from pathlib import Path

from packaging.tags import compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

platform, lock = sys.argv[1], tomllib.loads(Path(sys.argv[2]).read_text())
platforms = [f"manylinux_2_{minor}_{platform}" for minor in range(39, 4, -1)]
platforms += [f"manylinux2014_{platform}", f"manylinux2010_{platform}", f"manylinux1_{platform}", f"linux_{platform}"]
tags = [*cpython_tags((3, 12), platforms=platforms), *compatible_tags((3, 12), "cp312", platforms)]
rank = {tag: place for place, tag in enumerate(tags)}
missing = []
for package in lock["packages"]:
    ranked = []
    for wheel in package.get("wheels", []):
        found = [rank[tag] for tag in parse_wheel_filename(wheel["url"].rpartition("/")[2])[3] if tag in rank]
        ranked += [(min(found), wheel)] if found else []
    if not ranked:
        missing.append(f"{package['name']}=={package['version']}")
        continue
    wheel = min(ranked, key=lambda pair: pair[0])[1]
    print(wheel["size"], wheel["hashes"]["sha256"], wheel["url"])
if missing:
    print(f"wheelhouse: no wheel for {platform}, built here if it is pure Python: {' '.join(missing)}", file=sys.stderr)
    Path(sys.argv[2]).with_name("missing").write_text("\n".join(missing) + "\n")
PYTHON

awk '{name = $3; sub(".*/", "", name); printf "%10.1f MB  %s\n", $1 / 1e6, name; sum += $1}
     END {printf "%10.1f MB  %d wheels\n", sum / 1e6, NR}' "$work/wheels"
if [[ -n $dry ]]; then
    echo "            Python 3.12, standalone: uv python install cpython-3.12-linux-$platform-gnu, about 35 MB"
    exit
fi

mkdir -p "$output/wheels"
while read -r _ digest address; do
    file=$output/wheels/${address##*/}
    echo "$digest  $file" | sha256sum --check --status 2>/dev/null ||
        curl --fail --location --silent --show-error --retry 3 --continue-at - --output "$file" "$address"
    echo "$digest  $file" | sha256sum --check --status ||
        { echo "wheelhouse: $file is not what the index promised; remove it and start again" >&2 && exit 1; }
done <"$work/wheels"
if [[ -s $work/missing ]]; then
    "$python" -m pip wheel --quiet --no-deps --wheel-dir "$work/built" --requirement "$work/missing"
    for file in "$work"/built/*; do
        [[ $file == *-none-any.whl ]] || { echo "wheelhouse: $file is for this machine alone" >&2 && exit 1; }
        cp "$file" "$output/wheels"
    done
fi
[[ -n $only ]] || "$python" -m uv python install --quiet --no-bin --install-dir "$output/python" \
    "cpython-3.12-linux-$platform-gnu"
cp requirements/gpu.lock "$output"
echo "wheelhouse: $output; copy it and this repository to the GPU host: docs/gpu.md"
