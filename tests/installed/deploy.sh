#!/usr/bin/env bash
# A deployment chosen, written and checked for a GPU machine, by a new user with the wheel alone, up to where the GPU
# begins. Needs neither weights nor network.
set -euo pipefail
name=gpt-oss-120b.b300x8.latency
dflash-trt --version
dflash-trt doctor
dflash-trt drafts openai/gpt-oss-120b
dflash-trt serve-config --list
dflash-trt estimate "$name"
dflash-trt serve-config "$name" --runtime trtllm -o serve.yaml > steps.sh
bash -n steps.sh
dflash-trt serve-config "$name" --runtime trtllm --check serve.yaml
for runtime in vllm sglang; do
    dflash-trt serve-config "$name" --runtime "$runtime" > "$runtime.sh"
    bash -n "$runtime.sh"
    dflash-trt serve-config "$name" --runtime "$runtime" --check "$runtime.sh"
done
dflash-trt serve-config "$name" --runtime trtllm --launcher slurm > job.sbatch
bash -n job.sbatch
dflash-trt serve-config "$name" --runtime trtllm --launcher kubernetes > server.yaml
dflash-trt serve-config "$name" --runtime dynamo-trtllm > graph.yaml
