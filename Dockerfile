# The default image (linux/amd64 and linux/arm64): every task that needs no GPU, and the tiny recipe whole.
#   docker buildx build --platform linux/amd64,linux/arm64 --tag "$IMAGE" .
# CI has no Docker engine and does not build it; tests/unit/test_images.py checks pins, user and environment. On amd64
# scripts/setup.sh is what CI runs; on arm64 the lock file was resolved but never installed.
FROM python:3.11.14-slim-bookworm

# g++ compiles what torch.compile writes; numa and gomp are loaded by vLLM's CPU build; tests/cluster makes its hosts
# with iproute2, if it runs as root.
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

# Flyte unpacks fast-registered code into the working directory: it belongs to the user, and comes first on the path.
RUN useradd --create-home --uid 1000 flytekit && chown flytekit:flytekit /root && chmod 755 /root
WORKDIR /root
ENV PYTHONPATH=/root

# The packages are a layer of their own: a change of code does not install them again.
COPY pyproject.toml ./
COPY requirements ./requirements
COPY scripts ./scripts
RUN scripts/setup.sh --packages-only && rm -rf /root/.cache

# --build-arg GIT_COMMIT=$(git describe --always --dirty --abbrev=12): runs are tagged with it, for an image holds no repository.
ARG GIT_COMMIT=
ENV SLIPSTREAM_GIT_COMMIT=$GIT_COMMIT

COPY --chown=flytekit:flytekit . .
RUN python -m uv pip install --no-cache --no-deps --no-build-isolation --editable .

# flytekit, by its number: a cluster that refuses root cannot tell from a name.
USER 1000
# Flyte gives the command of a task as arguments (pyflyte-execute ...), KubeRay replaces it: so no entry point here.
CMD ["slipstream", "--help"]
