# SPDX-License-Identifier: Apache-2.0
"""Files of the kinds that people check: launch commands, argument files and manifests."""

from __future__ import annotations

from tests.deploy.documented_commands import COMMANDS

SPEC = '{"method": "dflash", "model": "z-lab/Qwen3-8B-DFlash-b16", "num_speculative_tokens": 15}'
IMAGE = "vllm/vllm-openai:v0.33.0"
ARRAY = f"""#!/bin/bash
set -e
export A=0
ARGS=(--max-num-seqs 64
  --speculative-config '{SPEC}')
vllm serve Qwen/Qwen3-8B "${{ARGS[@]}}" --max-num-batched-tokens 32768 > log 2>&1 &
"""
NAMED_FILE = """cat > serve.yaml <<EOF
port: 9000
speculative-config:
  method: dflash
  num_speculative_tokens: 24
EOF
vllm serve Qwen/Qwen3-8B --config serve.yaml --spec-model z-lab/Qwen3-8B-DFlash-b16
"""
ARGUMENTS = f"""model: Qwen/Qwen3-8B
no-enable-prefix-caching: true
speculative-config: '{SPEC}'
served-model-name: [a, b]
"""
COMPOSE = f"""services:
  llm:
    image: {IMAGE}
    environment: [A=1]
    command:
      - --model
      - Qwen/Qwen3-8B
      - --speculative-config
      - '{SPEC}'
"""
DEPLOYMENT = """apiVersion: apps/v1
kind: Deployment
spec:
  template:
    spec:
      containers:
        - name: vllm
          env: [{name: K, value: '4'}]
          command: [vllm, serve, Qwen/Qwen3-8B]
          args: ['--max-num-seqs=$(K)', '--speculative-config={"method":"dflash"}']
---
kind: ConfigMap
apiVersion: v1
data: {a.yaml: 'port: 1'}
"""
SGLANG = """python -m sglang.launch_server --model-path Qwen/Qwen3-8B --attention-backend fa3 \\
  --speculative-algorithm DFLASH --speculative-draft-model-path z-lab/Qwen3-8B-DFlash-b16 \\
  --speculative-eagle-topk 4 --mamba-scheduler-strategy x
"""
TRTLLM = """speculative_config:
  decoding_type: DFlash
  speculative_model: z-lab/gpt-oss-120b-DFlash
  max_draft_len: 7
  draft_len_schedule: {1: 7, 4: 3}
max_batch_size: 4
kv_cache_config: {dtype: fp8, enable_block_reuse: false}
"""
REFUSED = "context_servers: {num_instances: 1}\nport: 1\n"
"""A file of `trtllm-serve disaggregated`, which has no argument of a server."""
FILES: list[tuple[str, str]] = [
    ("vllm", f"docker run --gpus all -p 8000:8000 {IMAGE} --model Qwen/Qwen3-8B --speculative-config '{SPEC}'"),
    ("vllm", f"python -m dynamo.vllm --model Qwen/Qwen3-8B --endpoint a.b.c --speculative-config '{SPEC}'"),
    ("vllm", "bash -lc 'export X=1; exec vllm serve m --kv-cache-dtype fp8 --attention-backend FLASH_ATTN -tp 8 -O3'"),
    *(("vllm", text) for text in (ARRAY, NAMED_FILE, ARGUMENTS, COMPOSE, DEPLOYMENT)),
    ("sglang", SGLANG),
    ("sglang", "port: 1\ntp-size: 2\nspeculative-algorithm: DFLASH\nenable-metrics: true\n"),
    ("trtllm", TRTLLM),
    ("trtllm", "python3 -m dynamo.trtllm --model-path m --trtllm.kv_cache_config.dtype fp8 --max-batch-size 8"),
    ("trtllm", REFUSED),
    *((runtime, text) for runtime, text, _ in COMMANDS),
]
"""Runtime and text."""
