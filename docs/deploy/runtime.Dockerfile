# syntax=docker/dockerfile:1
# The embedded runtime on a CPU: docker build -f docs/deploy/runtime.Dockerfile -t dflash-trt .
# With NVIDIA Dynamo's worker and frontend: --target dynamo -t dflash-trt:dynamo.
# --build-arg DFLASH_COMMIT=$(git rev-parse HEAD) is what `dflash-trt --version` then says.
# Built and run with Debian 12's Python 3.11 in the place of python:3.12-slim, and torch's wheel from a file.
FROM python:3.12-slim AS wheel
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
ARG DFLASH_COMMIT
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim AS runtime
# torch without CUDA: 0.2 GB in the place of several.
COPY --from=wheel /wheels /wheels
# hadolint ignore=DL3013
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu "torch==2.13.0" \
    && wheel=$(echo /wheels/*.whl) && pip install --no-cache-dir "${wheel}[serve]" \
    && useradd --uid 1000 --create-home dflash
USER 1000
ENV HF_HOME=/models HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /models
EXPOSE 8000
HEALTHCHECK --start-period=120s --interval=15s --timeout=5s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["dflash-trt"]
CMD ["serve", "/models/engine", "--target", "/models/target", "--host", "0.0.0.0"]

FROM runtime AS dynamo
USER 0
# hadolint ignore=DL3013
RUN wheel=$(echo /wheels/*.whl) && pip install --no-cache-dir "${wheel}[serve,dynamo]" \
    && pip install --no-cache-dir --no-deps "ai-dynamo==1.6.1" \
    && install --directory --owner=1000 /discovery
USER 1000
HEALTHCHECK --start-period=120s --interval=15s --timeout=5s \
    CMD ["python", "-c", "import socket, urllib.request; urllib.request.urlopen(f'http://{socket.gethostname()}:9090/health', timeout=4)"]
CMD ["dynamo", "/models/engine", "--target", "/models/target", "--metrics-port", "9090"]
