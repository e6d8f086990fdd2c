# Coalign for NVIDIA GPUs, with vLLM:
#   docker build -f docker/cuda.Dockerfile -t coalign:cuda .
# The compiler of CUDA is in it: vLLM's and torch's kernels are compiled where they run.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

# git: recipes and rewards of people's own; wget: KubeRay's probes; ip: the network between the nodes; the others: Sky.
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        python3 python3-dev python3-venv git wget iproute2 procps openssh-client rsync gcc g++ \
    && rm -rf /var/lib/apt/lists/*

ENV VIRTUAL_ENV=/opt/coalign PATH=/opt/coalign/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /src
COPY docker/pylock.cuda.toml docker/
# The lock has the hash of every file.
RUN python3 -m venv /opt/coalign \
    && pip install --no-cache-dir "pip>=26.1" "setuptools>=77" \
    && pip install --no-cache-dir --requirement docker/pylock.cuda.toml

COPY pyproject.toml README.md LICENSE ./
COPY coalign coalign
COPY packages packages
RUN pip install --no-cache-dir --no-deps --no-build-isolation ./packages/* . \
    && rm -rf /src/coalign /src/packages \
    && coalign --version

WORKDIR /work
CMD ["coalign", "--help"]
