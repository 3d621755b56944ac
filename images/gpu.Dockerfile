# The image of tasks with GPUs: learner and engines on CUDA (linux/arm64 for GB200, linux/amd64 for x86 hosts).
#   docker buildx build --platform linux/arm64 --file images/gpu.Dockerfile --tag "$IMAGE" .
# CI has neither a Docker engine nor a GPU and does not build this image: requirements/gpu.lock was resolved for both
# platforms and installed on neither. tests/unit/test_images.py checks pins, user and environment.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

# Kernels that are compiled at run time (Triton, FlashInfer) need the headers and g++; NCCL on RDMA needs the verbs
# libraries. KubeRay probes a Ray whose version it is not told with wget.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        ca-certificates g++ libgomp1 libibverbs1 libnuma1 librdmacm1 python3-dev python3-venv rdma-core wget \
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

# Flyte unpacks fast-registered code into the working directory, so the directory belongs to the user and is first on
# the Python path. Ubuntu's image already has a user with id 1000.
RUN userdel --remove ubuntu && useradd --create-home --uid 1000 flytekit \
    && chown flytekit:flytekit /root && chmod 755 /root
WORKDIR /root
ENV PYTHONPATH=/root

# The packages are a separate layer, so that a change of code does not reinstall them.
COPY pyproject.toml ./
COPY requirements ./requirements
COPY scripts ./scripts
RUN scripts/setup.sh --packages-only && rm -rf /root/.cache
# Without these kernels FlashInfer downloads or compiles its own for minutes, at the first start on every node.
RUN vllm download-kernels && rm -rf /root/.cache

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
