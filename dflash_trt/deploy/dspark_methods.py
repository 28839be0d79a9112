# SPDX-License-Identifier: Apache-2.0
"""DSpark drafts in the runtimes that have a method of their own for them, and its words for K.

vLLM 0.33 (config/speculative.py, v1/worker/gpu/spec_decode/dspark): method dspark, K rows of an anchor-first block or
1 + K. SGLang (server_args.py): speculative_dspark_block_size is the number of proposals, whatever the block's layout.
TensorRT-LLM (DSparkDecodingConfig): max_draft_len is the block of an anchor-first draft; it reads all else from the
draft. Written from sources, not run.
"""

from __future__ import annotations

from typing import Any

from dflash_trt.deploy.schema import PACKAGES, Runtime
from dflash_trt.deploy.sizes import DraftSizes
from dflash_trt.errors import ConfigError

HERE = "serve it here: dflash-trt serve"


def dspark_method(sizes: DraftSizes, runtime: Runtime, draft: str, num_draft_tokens: int, name: str) -> dict[str, Any]:
    """What selects and describes the draft in the runtime's arguments; ConfigError where it does not serve it."""
    if (problem := _problem(sizes, runtime)) is not None:
        raise ConfigError(
            f"{name}: draft: expected {problem}, found {sizes.spec.kind} {sizes.name}, which {PACKAGES[runtime]} is not"
            " known to serve",
            hint=f"give --runtime vllm, or {HERE}" if _dialect(sizes) == "speculators" else HERE,
        )
    match runtime:
        case "vllm":
            config = {"method": "dspark", "model": draft, "num_speculative_tokens": num_draft_tokens}
            return {"speculative_config": config}
        case "sglang":
            return {
                "speculative_algorithm": "DSPARK",
                "speculative_draft_model_path": draft,
                "speculative_dspark_block_size": num_draft_tokens,
            }
        case _:
            config = {"decoding_type": "DSpark", "speculative_model": draft, "max_draft_len": num_draft_tokens}
            return {"speculative_config": config}


def _problem(sizes: DraftSizes, runtime: Runtime) -> str | None:
    """What the runtime needs and the draft is not; a published draft's file is not known."""
    dialect = _dialect(sizes)
    if dialect not in (None, "dspark", *(["speculators"] if runtime == "vllm" else [])):
        return "an architecture of DSpark's (Qwen3DSparkModel, DSparkDraftModel)"
    if runtime == "vllm" and sizes.spec.markov_head is not None and sizes.spec.markov_head.is_gated:
        return "a vanilla Markov head"  # qwen3_dspark.py has no gate
    if runtime == "trtllm" and not sizes.spec.sample_from_anchor:
        return "an anchor-first block"
    if runtime != "vllm" and sizes.spec.markov_head is None:
        return "a Markov head"
    return None


def _dialect(sizes: DraftSizes) -> str | None:
    return None if sizes.checkpoint is None else sizes.checkpoint.dialect.name
