# syntax=docker/dockerfile:1
# The embedded runtime on a CPU: docker build -f docs/deploy/runtime.Dockerfile --target runtime -t dflash-trt .
# --target gpu -t dflash-trt:gpu: with CUDA's torch and our kernels; docker run --gpus all (driver 580 or newer).
# --target dynamo -t dflash-trt:dynamo: NVIDIA Dynamo's worker and frontend.
# --build-arg DFLASH_COMMIT=$(git rev-parse HEAD) is what `dflash-trt --version` then says.
# Never built as it stands: python:3.12-slim was out of reach. In November 2026 buildah built it on Debian 12 with Python
# 3.11, with torch's wheel from a file (gpu: 2.14.1, 6.9 GB), and its images ran on a CPU, none on a GPU.
ARG TORCH=torch==2.13.0

FROM python:3.12-slim AS source
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .

FROM source AS wheel
ARG DFLASH_COMMIT
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM source AS wheel-gpu
# nvcc and its libraries, all of one release; the wheels have them in lib, where nvcc looks in lib64.
RUN pip install --no-cache-dir "nvidia-cuda-nvcc==13.0.*" "nvidia-nvvm==13.0.*" "nvidia-cuda-crt==13.0.*" \
    "nvidia-cuda-runtime==13.0.*" "nvidia-cuda-cccl==13.0.*"
ARG DFLASH_COMMIT
RUN cuda=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia/cu13 \
    && CUDACXX=$cuda/bin/nvcc LIBRARY_PATH=$cuda/lib \
    pip wheel --no-cache-dir --no-deps --wheel-dir /wheels -C cmake.define.DFLASH_CUDA=ON .

FROM python:3.12-slim AS server
RUN useradd --uid 1000 --create-home dflash
ENV HF_HOME=/models HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /models
EXPOSE 8000
HEALTHCHECK --start-period=120s --interval=15s --timeout=5s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["dflash-trt"]
CMD ["serve", "/models/engine", "--target", "/models/target", "--host", "0.0.0.0"]

FROM server AS gpu
# torch.compile's kernels are launched by what Triton compiles with gcc.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
ARG TORCH
# hadolint ignore=DL3013
RUN pip install --no-cache-dir "${TORCH}"
# serve,tensorrt or serve,rtx: to build and run plans, too.
ARG EXTRAS=serve
COPY --from=wheel-gpu /wheels /wheels
# hadolint ignore=DL3013
RUN wheel=$(echo /wheels/*.whl) && pip install --no-cache-dir "${wheel}[${EXTRAS}]"
USER 1000
CMD ["serve", "/models/engine", "--target", "/models/target", "--host", "0.0.0.0", "--device", "cuda"]

FROM server AS runtime
ARG TORCH
# Without CUDA: 0.2 GB in the place of several.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu "${TORCH}"
COPY --from=wheel /wheels /wheels
# hadolint ignore=DL3013
RUN wheel=$(echo /wheels/*.whl) && pip install --no-cache-dir "${wheel}[serve]"
USER 1000

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
