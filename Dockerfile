# The default image (linux/amd64 and linux/arm64): tasks without GPUs, and all tasks of the tiny recipe.
#   docker buildx build --platform linux/amd64,linux/arm64 --tag "$IMAGE" .
# CI has no Docker engine and does not build this image; tests/unit/test_images.py checks pins, user and environment. CI
# runs scripts/setup.sh on amd64; on arm64 the lock file was resolved but never installed.
FROM python:3.11.14-slim-bookworm

# g++ compiles the output of torch.compile; vLLM's CPU build loads numa and gomp; tests/cluster makes hosts with
# iproute2 if it runs as root.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates g++ iproute2 libgomp1 libnuma1 \
    && rm -rf /var/lib/apt/lists/*

ENV DO_NOT_TRACK=1 \
    MLFLOW_DISABLE_TELEMETRY=true \
    RAY_USAGE_STATS_ENABLED=0 \
    PYTHONDONTWRITEBYTECODE= \
    VLLM_NO_USAGE_STATS=1 \
    PYTHONUNBUFFERED=1 \
    UV_COMPILE_BYTECODE=1 \
    VENV=/opt/venv \
    PATH=/opt/venv/bin:$PATH

# Flyte unpacks fast-registered code into the working directory, so the directory belongs to the user and is first on
# the Python path.
RUN useradd --create-home --uid 1000 flytekit && chown flytekit:flytekit /root && chmod 755 /root
WORKDIR /root
ENV PYTHONPATH=/root

# The packages are a separate layer, so that a change of code does not reinstall them.
COPY pyproject.toml ./
COPY requirements ./requirements
COPY scripts ./scripts
RUN scripts/setup.sh --packages-only && rm -rf /root/.cache

# --build-arg GIT_COMMIT=$(git describe --always --dirty --abbrev=12) tags runs with the commit: an image has no
# repository.
ARG GIT_COMMIT=
ENV SLIPSTREAM_GIT_COMMIT=$GIT_COMMIT
# --build-arg IMAGE=<the image's own name> tags runs with it: nothing in a pod says from which image it was made.
ARG IMAGE=
ENV SLIPSTREAM_IMAGE=$IMAGE

COPY --chown=flytekit:flytekit . .
RUN python -m uv pip install --no-cache --no-deps --no-build-isolation --editable .

# The user flytekit by number, because a cluster that refuses root cannot check a name.
USER 1000
# Flyte passes the command of a task as arguments (pyflyte-execute ...), and KubeRay replaces it, so there is no entry
# point.
CMD ["slipstream", "--help"]
