# An image of the server: two stages, not root, a health check. docs/deploy.md says how to build and run it.
# TORCH_INDEX: the package index with the wanted build of torch (PyTorch's install selector names it); empty: pip's own,
# whose torch has CUDA and is gigabytes larger.
ARG PYTHON_VERSION=3.12

FROM python:${PYTHON_VERSION}-slim-bookworm AS build
ARG TORCH_INDEX=""
ARG EXTRAS="otel"
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/jettison
ENV PATH=/opt/jettison/bin:$PATH
WORKDIR /source
COPY pyproject.toml setup.py README.md LICENSE ./
COPY src ./src
# torch comes first, from its own index; the second command finds it there. Ranges of versions are pyproject.toml's. A build
# that misses the C kernels fails.
# hadolint ignore=DL3013
RUN PIP_INDEX_URL="${TORCH_INDEX}" pip install --no-cache-dir "torch>=2.9,<=2.13.0" \
    && pip install --no-cache-dir ".[${EXTRAS}]" \
    && test -n "$(find /opt/jettison -name 'libjettison_kernels.so')"

FROM python:${PYTHON_VERSION}-slim-bookworm
LABEL org.opencontainers.image.title="jettison" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --uid 10001 --user-group --create-home jettison \
    && install -d -o jettison -g jettison /models /var/lib/jettison
COPY --from=build /opt/jettison /opt/jettison
ENV PATH=/opt/jettison/bin:$PATH \
    JETTISON_CACHE=/models \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /var/lib/jettison
VOLUME ["/models", "/var/lib/jettison"]
EXPOSE 8000
STOPSIGNAL SIGTERM
# Ready, not only alive: `docker ps` shows "healthy" once requests are taken. Loading may take as long as the start period.
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["jettison"]
CMD ["serve", "/models/model", "--host", "0.0.0.0", "--batch-dir", "/var/lib/jettison/batches"]
