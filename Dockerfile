# Images for CPU and GPU: docker build --target cpu -t cua_rl:cpu . ; docker build --target gpu -t cua_rl:gpu .
# Torch and vLLM bring CUDA's libraries with them; the driver comes from the host (NVIDIA Container Toolkit).
ARG DEBIAN=docker.io/library/debian:12.12-slim@sha256:d5d3f9c23164ea16f31852f95bd5959aad1c5e854332fe00f7b3a20fcc9f635c

# what both need of the system: Python 3.11 with headers and a C compiler, with which Triton compiles when vLLM starts
FROM ${DEBIAN} AS system
# Debian removes old versions of packages from its mirrors: a pinned one could not be installed next month
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bubblewrap ca-certificates gcc libc6-dev libgomp1 libnuma1 python3 python3-dev python3-venv tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home cua \
    && install --directory --owner cua --group cua /app /app/runs /models
ENV PATH=/app/.venv/bin:$PATH PYTHONUNBUFFERED=1 HF_HOME=/models
WORKDIR /app
USER 1000:1000
RUN python3 -m venv .venv

# the packages, a layer that changes only with these files
FROM system AS cpu-packages
# builds of torch without CUDA, which PyPI does not have
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY --chown=1000:1000 pyproject.toml README.md LICENSE ./
COPY --chown=1000:1000 constraints/cpu-torch.txt constraints/cpu-image.txt constraints/
COPY --chown=1000:1000 scripts/repair_imports.py scripts/
RUN mkdir cua_rl && touch cua_rl/__init__.py \
    && pip install --no-cache-dir --no-deps --require-hashes --only-binary :all: --index-url "${TORCH_INDEX}" -r constraints/cpu-torch.txt \
    && pip install --no-cache-dir --no-deps --require-hashes --only-binary :all: -r constraints/cpu-image.txt \
    && pip install --no-cache-dir --no-deps --no-build-isolation --no-index --editable . \
    && python scripts/repair_imports.py

FROM system AS gpu-packages
COPY --chown=1000:1000 pyproject.toml README.md LICENSE ./
COPY --chown=1000:1000 constraints/gpu-image.txt constraints/
RUN mkdir cua_rl && touch cua_rl/__init__.py \
    && pip install --no-cache-dir --no-deps --require-hashes --only-binary :all: -r constraints/gpu-image.txt \
    && pip install --no-cache-dir --no-deps --no-build-isolation --no-index --editable .

FROM cpu-packages AS cpu
COPY --chown=1000:1000 cua_rl cua_rl
COPY --chown=1000:1000 configs configs
COPY --chown=1000:1000 scripts/train_single.sh scripts/train_multi.sh scripts/
ENV PYTHON=/app/.venv/bin/python
EXPOSE 8720
# healthy: the last step or evaluation of a run, or the container's start, is less than two hours ago
HEALTHCHECK --interval=60s --timeout=10s --retries=3 \
    CMD ["sh", "-c", "find /etc/hostname runs/*/metrics.jsonl -mmin -120 | grep -q ."]
# tini passes signals on and collects what vLLM's processes leave behind
ENTRYPOINT ["tini", "--"]
CMD ["python", "-m", "cua_rl.recipes.train"]

FROM gpu-packages AS gpu
COPY --chown=1000:1000 cua_rl cua_rl
COPY --chown=1000:1000 configs configs
COPY --chown=1000:1000 scripts/train_single.sh scripts/train_multi.sh scripts/
ENV PYTHON=/app/.venv/bin/python NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
EXPOSE 8720
HEALTHCHECK --interval=60s --timeout=10s --retries=3 \
    CMD ["sh", "-c", "find /etc/hostname runs/*/metrics.jsonl -mmin -120 | grep -q ."]
ENTRYPOINT ["tini", "--"]
CMD ["python", "-m", "cua_rl.recipes.train"]
