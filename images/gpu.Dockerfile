# Learner and rollout engine, colocated on CUDA GPUs (linux/arm64 for GB200, linux/amd64 for x86 hosts).
#   docker buildx build --platform linux/arm64 --file images/gpu.Dockerfile --tag "$IMAGE" .
# Not built in CI, which has neither a Docker engine nor a GPU: requirements/gpu.lock was resolved for both platforms,
# and installed on neither. tests/unit/test_images.py checks pins, user and environment.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

# The headers and g++ serve kernels compiled at run time (Triton, FlashInfer); the verbs libraries serve NCCL on RDMA.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        ca-certificates g++ libgomp1 libibverbs1 libnuma1 librdmacm1 python3-dev python3-venv rdma-core \
    && rm -rf /var/lib/apt/lists/*

ENV DO_NOT_TRACK=1 \
    MLFLOW_DISABLE_TELEMETRY=true \
    RAY_USAGE_STATS_ENABLED=0 \
    PYTHONDONTWRITEBYTECODE= \
    VLLM_NO_USAGE_STATS=1 \
    PYTHONUNBUFFERED=1 \
    UV_COMPILE_BYTECODE=1 \
    LOCK=requirements/gpu.lock \
    VENV=/opt/venv \
    PATH=/opt/venv/bin:$PATH

# Flyte unpacks fast-registered code into the working directory: it belongs to the user, and comes first on the path.
# Ubuntu's image has a user of id 1000 already.
RUN userdel --remove ubuntu && useradd --create-home --uid 1000 flytekit \
    && chown flytekit:flytekit /root && chmod 755 /root
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
