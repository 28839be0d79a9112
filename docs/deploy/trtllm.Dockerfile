# syntax=docker/dockerfile:1
# Engine mode: docker build -f docs/deploy/trtllm.Dockerfile -t dflash-trt:trtllm .
# On NVIDIA's image of TensorRT-LLM, with sshd for a LeaderWorkerSet. Never built: only hadolint has read it. For Dynamo:
# --build-arg BASE=nvcr.io/nvidia/ai-dynamo/tensorrtllm-runtime:1.6.1 --build-arg USER=1000
ARG BASE=nvcr.io/nvidia/tensorrt-llm/release:1.4.0rc1
FROM ${BASE}
ARG USER=0
USER 0
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends openssh-server && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
ARG DFLASH_COMMIT
# The image's own torch, transformers and numpy stay: what TensorRT-LLM pins is what runs. TensorRT is that of the extra
# `trtllm`: it builds the plans, and runs none that another release has built. nvcc of the image compiles the kernels.
RUN pip install --no-cache-dir --no-deps -C cmake.define.DFLASH_CUDA=ON . \
    && pip install --no-cache-dir "click>=8.1" "jsonschema>=4.23" "msgspec>=0.22" "onnx>=1.20" "rich>=13" \
    "tensorrt-cu13==11.4.0.106"
USER ${USER}
WORKDIR /models
ENV HF_HOME=/models HF_HUB_OFFLINE=1
CMD ["python", "-m", "dflash_trt.trtllm", "trtllm-serve", "--help"]
