#!/usr/bin/env bash
# A draft of one's own checked, quantised and built, by a new user with the wheel alone, up to where a target is loaded:
#
#     bash own_draft.sh DRAFT TARGET
set -euo pipefail
draft=$1 target=$2
dflash-trt inspect "$draft" --target "$target"
dflash-trt quantize "$draft" --recipe nvfp4 -o draft-nvfp4
dflash-trt inspect draft-nvfp4 --target "$target"
dflash-trt build draft-nvfp4 --target "$target" -o engine
dflash-trt inspect engine
dflash-trt inspect engine --json > engine.json
dflash-trt serve-config "$draft" --target "$target" --gpus h100x1 --runtime vllm > vllm.sh
dflash-trt serve-config --runtime vllm --check vllm.sh --gpus h100x1
