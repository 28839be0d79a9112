# SPDX-License-Identifier: Apache-2.0
"""Arguments that select DFlash, DSpark, EAGLE-3, MTP or n-grams in each runtime, with the runtime's name of K.

DSpark: vLLM 0.33 (config/speculative.py, v1/worker/gpu/spec_decode/dspark): method dspark, K rows of an anchor-first
block or 1 + K. SGLang (server_args.py): speculative_dspark_block_size is the number of proposals, whatever the block's
layout. TensorRT-LLM (DSparkDecodingConfig): max_draft_len is the block of an anchor-first draft; it reads everything
else from the draft. Written from sources, not run.

MTP: vLLM 0.33.0 (config/speculative.py): method mtp, and the target stands for the model. SGLang 0.5.23
(arg_groups/speculative_hook.py, configs/model_config.py): NEXTN without a draft loads the target's layers.
TensorRT-LLM 1.4.0rc1 (llm-api/reference/MTPDecodingConfig.html): max_draft_len. Not run.

N-grams: vLLM 0.33.0 (config/speculative.py; v1/worker/gpu/spec_decode): the methods ngram and ngram_gpu are one on
CUDA. SGLang 0.5.23 (arg_groups/speculative_hook.py, _handle_ngram): NGRAM, by default a tree, which most attention
backends refuse with pages of several tokens; with a breadth of 1 it is a chain, as in the others. TensorRT-LLM
1.4.0rc1 (llm-api/reference/NGramDecodingConfig.html; _torch/speculative/ngram.py): NGram, whose common pool keeps what
all requests said for good, so that it grows without end. Not run.
"""

from __future__ import annotations

from typing import Any, Literal

from dflash_trt.deploy.gpus import GpuSpec
from dflash_trt.deploy.schema import PACKAGES, Runtime
from dflash_trt.deploy.sizes import DraftSizes
from dflash_trt.errors import ConfigError

HERE = "serve it here: dflash-trt serve"


GB10 = (12, 1)
"""Compute capability where vLLM 0.26 chooses FlashAttention for a DFlash draft and ends in an assertion (vllm#50707);
DFlash was served there with triton_attn (z-lab/dflash#129)."""
TRTLLM_NAMES = {"dflash": "DFlash", "dspark": "DSpark", "eagle3": "Eagle3", "mtp": "MTP", "ngram": "NGram"}
TRTLLM_ATTENTION = ((10, 0), (10, 3))
"""GPUs that TensorRT-LLM's generated draft attention kernels exist for."""


def draft_arguments(
    sizes: DraftSizes, runtime: Runtime, draft: str, num_draft_tokens: int, name: str, *, gpu: GpuSpec | None,
    attention: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Arguments that select and describe the draft; ConfigError if the runtime does not serve it.

    `draft` is the name to load it by, `name` the deployment in errors, `attention` TensorRT-LLM's kernel, None for its
    own choice.
    """
    if sizes.spec.is_dspark:
        _check_dspark(sizes, runtime, name)
        return selection("dspark", runtime, draft, num_draft_tokens)
    arguments = selection("dflash", runtime, draft, num_draft_tokens)
    if runtime == "vllm" and gpu is not None and gpu.compute_capability == GB10:
        arguments["attention_backend"] = "TRITON_ATTN"
    if runtime == "trtllm":
        kernel = {} if attention is None else {"attention_backend": attention}
        arguments["speculative_config"] |= kernel | _draft_facts(sizes)
    return arguments


def selection(
    method: Literal["dflash", "dspark", "eagle3", "mtp", "ngram"],
    runtime: Runtime,
    draft: str | None,
    num_draft_tokens: int,
) -> dict[str, Any]:
    """Method, draft and draft length, K, in the runtime's words; MTP and n-grams have no draft of their own."""
    match runtime:
        case "vllm":
            model = {} if draft is None else {"model": draft}
            return {"speculative_config": {"method": method, **model, "num_speculative_tokens": num_draft_tokens}}
        case "sglang":
            # SGLang counts the verify window, the last verified token included.
            window = {"speculative_num_draft_tokens": num_draft_tokens + 1}
            lengths = {
                "dflash": window,
                "dspark": {"speculative_dspark_block_size": num_draft_tokens},
                "ngram": window | {"speculative_ngram_max_bfs_breadth": 1},
            }
            chain = {"speculative_num_steps": num_draft_tokens, "speculative_eagle_topk": 1, **window}
            algorithm = "NEXTN" if method == "mtp" else method.upper()
            model = {} if draft is None else {"speculative_draft_model_path": draft}
            return {"speculative_algorithm": algorithm, **model, **lengths.get(method, chain)}
        case _:
            model = {} if draft is None else {"speculative_model": draft}
            pool = {"is_public_pool": False} if method == "ngram" else {}
            section = {"decoding_type": TRTLLM_NAMES[method], **model, "max_draft_len": num_draft_tokens, **pool}
            return {"speculative_config": section}


def native_attention(sizes: DraftSizes, gpu: GpuSpec) -> str:
    """TensorRT-LLM's kernel for a native drafter on a GPU.

    Its generated kernels have no finite windows that are not causal, which DFlash2 drafts have (pull request 18155).
    """
    has_kernels = gpu.compute_capability in TRTLLM_ATTENTION and sizes.spec.candidate_selector is None
    return "TRTLLM" if has_kernels else "VANILLA"


def _draft_facts(sizes: DraftSizes) -> dict[str, Any]:
    """Facts that TensorRT-LLM reads from the draft's config.json, for a draft that it has yet to download.

    Without target_layer_ids by then it silently captures no hidden states (DFlashDecodingConfig @ 7c7504c0). An unknown
    mask token is left out: TensorRT-LLM reads it from the draft later.
    """
    spec = sizes.spec
    mask = {} if spec.mask_token_id is None else {"mask_token_id": spec.mask_token_id}
    return {"target_layer_ids": list(spec.target_layer_ids), **mask}


def _check_dspark(sizes: DraftSizes, runtime: Runtime, name: str) -> None:
    if (problem := _problem(sizes, runtime)) is not None:
        raise ConfigError(
            f"{name}: draft: expected {problem}, found {sizes.spec.kind} {sizes.name}, which {PACKAGES[runtime]} is not"
            " known to serve",
            hint=f"give --runtime vllm, or {HERE}" if _dialect(sizes) == "speculators" else HERE,
        )


def _problem(sizes: DraftSizes, runtime: Runtime) -> str | None:
    """Property that the runtime needs and the draft lacks; the files of published drafts are not known."""
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
