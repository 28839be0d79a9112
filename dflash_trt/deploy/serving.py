# SPDX-License-Identifier: Apache-2.0
"""Models on GPUs: the facts that a configuration alone has, and the sizes that decide memory.

A resolved deployment (resolve.py) is both; checks and estimates read it through these types.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from dflash_trt.deploy.deployment_file import DEFAULT_SHARE
from dflash_trt.deploy.gpus import Gpus
from dflash_trt.deploy.sizes import DraftSizes, TargetSizes


class ServedModels(msgspec.Struct, frozen=True, kw_only=True):
    """Models, GPUs and mode of a server; None for what is not known."""

    target: str | None = None
    """Directory or repository id."""
    checkpoint: str | None = None
    """Repository id of the draft, even where a directory has it."""
    gpus: Gpus | None = None
    draft_sizes: DraftSizes | None = None
    target_sizes: TargetSizes | None = None
    algorithms: dict[str, str] = {}
    """Quantisation algorithm by linear layer of the served drafter."""
    mode: Literal["native", "engine"] = "native"
    num_ranks: int = 1
    """Ranks that share the drafter; natively all ranks unless attention is data-parallel."""
    asked_prefix_reuse: bool | None = None
    """Whether the deployment asks for a prefix cache, or for none."""


class ServingLoad(ServedModels, frozen=True, kw_only=True):
    """Models on known GPUs, with the sizes that decide memory; no draft is plain decoding."""

    gpus: Gpus
    tensor_parallel: int
    enable_attention_dp: bool = False
    """Whether each rank has whole attention layers and requests of its own; then experts alone are divided."""
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    num_draft_tokens: int
    draft_attention: str = ""
    """TensorRT-LLM's attention kernel of the drafter."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    kv_cache_fraction: float = DEFAULT_SHARE
    """Share of the free memory that TensorRT-LLM's cache pool takes."""
