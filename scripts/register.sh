#!/usr/bin/env bash
# Packages the workflows for one cluster profile and, where a Flyte server is named, registers them there.
#   IMAGE_CPU=… IMAGE_GPU=… [FLYTE_CONFIG=~/.flyte/config.yaml] scripts/register.sh gb200
# The images hold the code, so nothing else is uploaded; build and push them first. The version is the git commit.
set -euo pipefail
cd "$(dirname "$0")/.."

CLUSTER=${1:?name a cluster profile, as in: make register CLUSTER=gb200}
VENV=${VENV:-.venv}
PROJECT=${PROJECT:-slipstream}
DOMAIN=${DOMAIN:-development}
VERSION=${VERSION:-$(git describe --always --dirty)}
export SLIPSTREAM_CLUSTER=$CLUSTER PYTHONPATH=$PWD

# flytekit refuses a role that is missing, but only says which image the first such task wanted.
images=(--image "cpu=${IMAGE_CPU:?set IMAGE_CPU, built from Dockerfile}")
has_gpus=$("$VENV/bin/python" -c \
    'from slipstream.kubernetes.profile import active_profile; print(active_profile().gpu is not None)')
if [[ $has_gpus == True ]]; then
    images+=(--image "gpu=${IMAGE_GPU:?set IMAGE_GPU, built from images/gpu.Dockerfile}")
fi

mkdir -p build
package=build/slipstream-$(basename "$CLUSTER" .yaml).tgz
"$VENV/bin/pyflyte" --pkgs workflows package --force --output "$package" "${images[@]}"
echo "packaged for $CLUSTER: $package"

if [[ -z ${FLYTE_CONFIG:-} ]]; then
    echo "no server named, so nothing is registered; FLYTE_CONFIG=~/.flyte/config.yaml names one"
    exit
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! "$VENV/bin/pyflyte" --config "$FLYTE_CONFIG" register --copy none --project "$PROJECT" --domain "$DOMAIN" \
    --version "$VERSION" "${images[@]}" workflows 2>&1 | tee "$log"; then
    if grep -q "greater than *current limit set in the platform" "$log"; then
        echo "cause: Flyte's task_resources.limits must be 0 or at least what the profile's pods ask for;" \
            "set them as deploy/flyte/values.yaml does (docs/deploy.md, section 2)" >&2
    fi
    exit 1
fi
echo "registered in $PROJECT-$DOMAIN as $VERSION"
