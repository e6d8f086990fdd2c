# Coalign for machines without GPUs, and for the clusters of `coalign launch`:
#   docker build -f docker/cpu.Dockerfile -t coalign:cpu .
FROM python:3.11-slim-bookworm

# git: recipes and rewards of people's own; wget: KubeRay's probes; ip: the network between the nodes; the others: Sky.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git wget iproute2 procps openssh-client rsync gcc g++ \
    && rm -rf /var/lib/apt/lists/*

ENV VIRTUAL_ENV=/opt/coalign PATH=/opt/coalign/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /src
COPY docker/pylock.cpu.toml docker/
# The lock has the hash of every file; torch is the build without CUDA.
RUN python3 -m venv /opt/coalign \
    && pip install --no-cache-dir "pip>=26.1" "setuptools>=77" \
    && pip install --no-cache-dir --requirement docker/pylock.cpu.toml

COPY pyproject.toml README.md LICENSE ./
COPY coalign coalign
COPY packages packages
RUN pip install --no-cache-dir --no-deps --no-build-isolation ./packages/* . \
    && rm -rf /src/coalign /src/packages \
    && coalign --version

WORKDIR /work
CMD ["coalign", "--help"]
