#!/usr/bin/env bash
# Write what TensorRT-LLM and Triton need to serve a deployment, and check the configuration again after editing it.
#
#     bash docs/examples/deploy.sh [DEPLOYMENT [DIRECTORY]]
#
# DEPLOYMENT is a YAML file or a name that `dflash-trt serve-config --list` shows. Needs neither weights nor a GPU.
set -euo pipefail
deployment=${1:-gpt-oss-120b.b300x8.latency}
output=${2:-deployment}
mkdir -p "$output"

dflash-trt serve-config "$deployment" --runtime trtllm > "$output/serve.yaml"
sed -i 's/^\( *free_gpu_memory_fraction:\).*/\1 0.7/' "$output/serve.yaml"
dflash-trt serve-config "$deployment" --runtime trtllm --check "$output/serve.yaml"
dflash-trt triton-repo "$deployment" -o "$output/models"
dflash-trt serve-config "$deployment" --runtime trtllm --launcher kubernetes > "$output/kubernetes.yaml"
