# SPDX-License-Identifier: Apache-2.0
"""Command lines that start a server with a draft, with the flags that runtimes' and drafts' own pages use (2026-11).

Rewritten to the flags alone: model names are facts, paths are made up. The third entry names flags of other releases.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_trt.deploy.conversion import Conversion, convert


def vllm(spec: str, more: str = "", *, model: str = "Qwen/Qwen3-8B") -> str:
    """`vllm serve` with a JSON speculative_config."""
    return f"vllm serve {model} --speculative-config '{{{spec}}}' {more}"


DRAFT = "--speculative-draft-model-path d"


def sglang(algorithm: str, more: str, *, start: str = "python3 -m sglang.launch_server") -> str:
    """SGLang with a speculative algorithm."""
    return f"{start} --speculative-algorithm {algorithm} {more}"


DFLASH = '"method": "dflash", "model": "z-lab/Qwen3.5-27B-DFlash", "num_speculative_tokens": 15'
EAGLE = '"method": "eagle3", "model": "RedHatAI/Qwen3-8B-speculator.eagle3", "num_speculative_tokens": 3'
STEPS = "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
TRTLLM = (
    "cat > c.yaml <<EOF\nspeculative_config:\n  decoding_type: {}\n  max_draft_len: 3\n{}EOF\n"
    "trtllm-serve m {} c.yaml {}"
)

COMMANDS: list[tuple[str, str, tuple[str, ...]]] = [
    # z-lab's drafts
    ("vllm", vllm(DFLASH, "--attention-backend flash_attn --max-num-batched-tokens 32768"), ()),
    ("vllm", "docker run --rm -it --gpus all --ipc=host --shm-size=16g -p 8000:8000 -v ~/.cache/hf:/root/.cache"
     " ghcr.io/z-lab/vllm-openai:gemma4-dflash-cu130 google/gemma-4-26B-A4B-it --host 0.0.0.0 --port 8000"
     " --speculative-config '{\"method\": \"dflash\", \"model\": \"z-lab/gemma-4-26B-A4B-it-DFlash\","
     " \"num_speculative_tokens\": 15, \"attention_backend\": \"flash_attn\"}' --attention-backend triton_attn"
     " --max-num-batched-tokens 32768 --trust-remote-code", ()),
    ("sglang", "export SGLANG_ENABLE_SPEC_V2=1\npython -m sglang.launch_server --model-path Qwen/Qwen3.5-27B \\\n"
     "  --speculative-algorithm DFLASH --speculative-draft-model-path z-lab/Qwen3.5-27B-DFlash \\\n"
     "  --speculative-num-draft-tokens 16 --tp-size 1 --attention-backend fa3 --mem-fraction-static 0.75 \\\n"
     "  --trust-remote-code", ()),
    ("sglang", sglang("DFLASH", f"--model-path m {DRAFT} --mamba-scheduler-strategy extra_buffer"),
     ("mamba_scheduler_strategy",)),
    ("sglang", sglang("DFLASH", f"--model m {DRAFT} --speculative-dflash-draft-window-size 4096"),
     ("speculative_dflash_draft_window_size",)),
    # vLLM's pages on speculative decoding, its recipes and Speculators'
    ("vllm", f"vllm serve Qwen/Qwen3-8B -tp 1 --speculative-config '{{\n  {EAGLE}\n}}'", ()),
    ("vllm", "vllm serve ./checkpoints/checkpoint_best", ()),
    ("vllm", vllm('"method": "mtp", "num_speculative_tokens": 1', "--tensor-parallel-size 8"), ()),
    ("vllm", vllm('"method":"ngram","num_speculative_tokens":5,"prompt_lookup_max":4', "--port 8001"), ()),
    ("vllm", vllm('"method": "suffix", "num_speculative_tokens": 32'), ()),
    ("vllm", vllm('"method": "draft_model", "model": "Qwen/Qwen3-0.6B", "num_speculative_tokens": 5'), ()),
    ("vllm", vllm('"model": "facebook/opt-125m", "num_speculative_tokens": 5', "--seed 42 -tp 1"
     " --gpu_memory_utilization 0.8"), ()),
    ("vllm", vllm('"method": "dflash", "model": "RedHatAI/Qwen3-8B-speculator.dflash"'), ()),
    ("vllm", vllm('"method": "dspark", "num_speculative_tokens": 5, "draft_sample_method": "greedy"',
     "--kv-cache-dtype fp8 --block-size 256 --max-num-seqs 64"), ()),
    ("vllm", vllm(DFLASH + ', "num_speculative_tokens_per_batch_size": [[1, 8, 15], [9, 64, 7]]'), ()),
    ("vllm", vllm(DFLASH + ', "enable_adaptive_verification": true', "--async-scheduling"), ()),
    ("vllm", vllm(DFLASH, "--no-enable-prefix-caching --enforce-eager --gpu-memory-util 0.9"), ()),
    ("vllm", vllm('"method": "qwen3_next_mtp", "num_speculative_tokens": 2', "--reasoning-parser qwen3"
     " --enable-auto-tool-choice --tool-call-parser qwen3_coder --language-model-only"), ()),
    ("vllm", vllm('"method": "dflash", "model": "d", "num_speculative_tokens": 7,"draft_tensor_parallel_size": 1'), ()),
    ("vllm", "CUDA_VISIBLE_DEVICES=0,1 vllm serve m -tp 2 --speculative-config.method mtp"
     " --speculative-config.num_speculative_tokens 2", ()),
    ("vllm", "python -m vllm.entrypoints.openai.api_server --model m --speculative_config"
     " '{\"method\": \"eagle\", \"model\": \"d\", \"num_speculative_tokens\": 2}' --compilation_config"
     " '{\"cudagraph_mode\": \"FULL_DECODE_ONLY\"}'", ()),
    ("vllm", "vllm serve m --data-parallel-size 4 --enable-expert-parallel --speculative-config"
     " '{\"method\": \"deepseek_mtp\", \"num_speculative_tokens\": 1}' --max-model-len 32768 -O3", ()),
    ("vllm", "docker run --runtime nvidia --gpus all --env HF_TOKEN=x --ipc=host vllm/vllm-openai:latest --model m"
     f" --speculative-config '{{{EAGLE}}}'", ()),
    ("vllm", "python3 -m vllm.entrypoints.cli.main serve m --kv-cache-dtype fp8 --max-num-seqs 16 --max-model-len 8192"
     f" --speculative-config '{{{DFLASH}}}'", ()),
    ("vllm", "vllm serve m --trust-remote-code --speculative-config '{\"method\": \"dflash\", \"model\":"
     " \"nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4-DFlash\", \"num_speculative_tokens\": 6}'", ()),
    ("vllm", "vllm serve m --speculative-model d --num-speculative-tokens 5 --use-v2-block-manager",
     ("speculative_model", "num_speculative_tokens", "use_v2_block_manager")),
    # SGLang's pages and cookbook
    ("sglang", sglang("EAGLE3", f"--model m {DRAFT} {STEPS} --mem-fraction 0.7 --dtype float16"), ()),
    ("sglang", sglang("EAGLE", f"--model m --speculative-draft-model d {STEPS} --cuda-graph-max-bs-decode 2"), ()),
    ("sglang", sglang("EAGLE", f"--model m {STEPS} --speculative-token-map x.pt --tp 8 --trust-remote-code"), ()),
    ("sglang", sglang("EAGLE", "--model m --tp 8 --tool-call-parser hunyuan --reasoning-parser hunyuan"
     " --served-model-name n", start="sglang serve"), ()),
    ("sglang", sglang("NEXTN", f"--model-path m --tp 8 --dp 8 {STEPS}", start="sglang serve"), ()),
    ("sglang", sglang("STANDALONE", f"--model-path m {DRAFT} {STEPS}"), ()),
    ("sglang", sglang("NGRAM", "--model-path m --speculative-num-draft-tokens 16"), ()),
    ("sglang", sglang("DSPARK", "--model-path m --host 0.0.0.0 --port 30010 --mem-fraction-static 0.82 --tp 8 --ep 8"
     " --speculative-draft-model-path AQ-MedAI/Ling-3.1-flash-DSpark --speculative-dspark-block-size 5"), ()),
    ("sglang", sglang("DFLASH", f"--model m {DRAFT} --speculative-dflash-block-size 6"
     " --speculative-draft-attention-backend flashinfer --speculative-moe-runner-backend marlin"), ()),
    ("sglang", sglang("DFLASH", f"--model m {DRAFT} --speculative-draft-window-size 4096"
     " --speculative-draft-kv-cache-dtype bf16 --page-size 64 --disable-radix-cache"), ()),
    ("sglang", "docker run --gpus all --shm-size 32g -p 30000:30000 lmsysorg/sglang:latest python3 -m"
     " sglang.launch_server --model-path m --tp 2 --speculative-algorithm EAGLE3 --speculative-draft-model-path d"
     " --host 0.0.0.0", ()),
    ("sglang", sglang("DFLASH", f"--model-path m {DRAFT} --speculative-adaptive"
     " --speculative-eagle-topk 1 --enable-metrics"), ()),
    # TensorRT-LLM's
    ("trtllm", TRTLLM.format("Eagle3", "  speculative_model: d\n", "--config", "--tp_size 8 --ep_size 4"), ()),
    ("trtllm", TRTLLM.format("MTP", "", "--extra_llm_api_options", "--max_batch_size 1 --trust_remote_code"), ()),
    ("trtllm", TRTLLM.format("DFlash", "  speculative_model: d\nmax_seq_len: 8192\n", "--config", "--port 8000"), ()),
    ("trtllm", TRTLLM.format("NGram", "  max_matching_ngram_size: 2\n", "--config", "--backend pytorch"), ()),
]  # fmt: skip
QWEN = "z-lab/Qwen3-8B-DFlash-b16"
DRAFTS = {"Qwen3.5-27B ": "z-lab/Qwen3.5-27B-DFlash", "google/gemma": "z-lab/gemma-4-26B-A4B-it-DFlash"}


def converted(text: str, **options: Any) -> Conversion:
    """`text` with a draft of its target, Qwen3-8B's unless another is known."""
    draft = next((draft for words, draft in DRAFTS.items() if words in text), QWEN)
    return convert(text, Path("run.sh"), **{"draft": draft, **options})
