# syntax=docker/dockerfile:1.7
# Engine and trainer on a machine without a GPU; it holds the light services too.
#   docker build -f deploy/docker/cpu.Dockerfile -t headrace:cpu .
# Give PYTHON_IMAGE with a digest (python@sha256:…) for a build that cannot change.
ARG PYTHON_IMAGE=python:3.11.13-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
WORKDIR /opt/headrace
# Packages first: they change less often than the sources.
COPY requirements requirements
COPY scripts/install.sh scripts/install.sh
COPY pyproject.toml README.md LICENSE ./
RUN scripts/install.sh cpu packages
COPY benchmarks benchmarks
COPY protos protos
COPY services services
COPY gym_svc gym_svc
COPY reward_svc reward_svc
COPY rollout_svc rollout_svc
COPY refit_bridge refit_bridge
COPY trainer_svc trainer_svc
RUN scripts/install.sh cpu

FROM ${PYTHON_IMAGE} AS run
# vLLM compiles kernels as it runs (a compiler) and asks where memory lies (numa).
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/*
# The same uid in every image: services share volumes.
RUN groupadd --gid 10001 headrace \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/lib/headrace headrace \
    && install -d -o 10001 -g 10001 /var/lib/headrace /data
COPY --from=build /opt/headrace /opt/headrace
ENV PATH=/opt/headrace/.venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HEADRACE_HOME=/var/lib/headrace
WORKDIR /data
USER 10001:10001
ENTRYPOINT ["headrace"]
# Overridden by compose for each service; this one fits the default command.
HEALTHCHECK --interval=10s --timeout=6s --start-period=30s --retries=3 \
    CMD ["headrace", "health", "127.0.0.1:7007"]
CMD ["serve", "engine"]
