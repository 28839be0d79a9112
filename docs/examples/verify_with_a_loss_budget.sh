#!/usr/bin/env bash
# Quantise a draft to NVFP4 and accept it only while it loses at most a share of tau, as a step of CI would.
#
#     bash docs/examples/verify_with_a_loss_budget.sh [DRAFT TARGET PROMPTS [BUDGET]]
#
# Exits with 1 when the loss exceeds the budget. Without arguments: a small trained pair of this repository.
set -euo pipefail
fixtures=$(cd "$(dirname "$0")/../../tests/fixtures" && pwd)
draft=${1:-$fixtures/tiny-qwen3-dflash}
target=${2:-$fixtures/tiny-qwen3}
prompts=${3:-$fixtures/prompts.jsonl}
budget=${4:-10%}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The target's own answers and hidden states, captured once, judge any number of recipes.
dflash-trt capture "$draft" --target "$target" --prompts "$prompts" --max-tokens 32 -o "$work/features.safetensors"
dflash-trt build "$draft" --target "$target" -o "$work/reference"
dflash-trt build "$draft" --target "$target" -o "$work/nvfp4" --recipe nvfp4
dflash-trt verify "$work/nvfp4" --features "$work/features.safetensors" --reference "$work/reference" \
    --max-tau-loss "$budget"
