# SPDX-License-Identifier: Apache-2.0
"""The drafter's context in TensorRT-LLM's managed pool: what its cache manager is told, and how the drafter binds it.

Read in NVIDIA/TensorRT-LLM: _torch/speculative/dflash.py at 414ba69f, 864a4300 and 8d62b3e5, and
_torch/pyexecutor/_util.py at 12a71fe4 (`_create_one_model_draft_kv_cache_manager`). None of it was run.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.drafter.executor import Executor
from dflash_trt.engine.graphs import PAGE_SIZES
from dflash_trt.errors import EngineError

LOG = logging.getLogger(__name__)
POOL_BACKEND = "TRTLLM"  # of attention_backend: with it the worker binds the pool
DENSE_BACKEND = "VANILLA"
# With AUTO, where a release has it, the worker takes the drafter's own choice.
BACKENDS = {DENSE_BACKEND: False, POOL_BACKEND: True, "AUTO": True}


def declare_pool(draft_config: Any, spec: DraftSpec) -> None:
    """Makes TensorRT-LLM's ModelConfig of the draft describe the rows that every rank keeps.

    The manager divides KV heads among the ranks, and `spec` has those of one: all, or its share. One pool holds all
    layers only if no layer has a window: windows are in the plans.
    """
    config, mapping = draft_config.pretrained_config, draft_config.mapping
    ranks = 1 if mapping.enable_attention_dp else mapping.tp_size
    config.num_key_value_heads = spec.num_key_value_heads * ranks
    config.use_sliding_window = False
    config.sliding_window = None
    config.layer_types = ["full_attention"] * spec.num_layers


class BoundPool:
    """Which pool the executor reads; the worker's manager is replaced while it sizes its memory."""

    def __init__(self, executor: Executor, spec: DraftSpec) -> None:
        self._executor = executor
        self._expected = (2, spec.num_key_value_heads, spec.head_dim)
        self._num_layers = len(spec.layers)
        self._key: tuple[object, ...] | None = None

    def forget(self) -> None:
        """The worker is about to replace its pool."""
        self._key = None

    def bind(self, layers: Sequence[Tensor], page_table: Tensor) -> None:
        """Before every pass: views [pages, 2, G, rows, D] of all layers, and the worker's table [slots, M] INT32.

        Raises EngineError for a pool of another draft, or one whose layers are not laid out alike.
        """
        key = (
            *((layer.data_ptr(), layer.stride(), layer.shape[3]) for layer in layers),
            *(page_table.data_ptr(), page_table.shape),
        )
        if key == self._key:
            return
        self._check(layers, page_table)
        if isinstance(layers, Tensor):
            LOG.warning(
                "engine mode: the worker set aside a private context arena in the place of the managed pool;"
                " its log says why"
            )
        self._executor.bind_pool(list(layers), page_table)
        self._key = key

    def _check(self, layers: Sequence[Tensor], page_table: Tensor) -> None:
        first = layers[0]
        found = (first.shape[1], first.shape[2], first.shape[4])
        if len(layers) != self._num_layers or found != self._expected or first.dtype != self._executor.cache_dtype:
            raise EngineError(
                f"engine mode: expected a pool of {self._num_layers} layers with K and V, heads and head_dim"
                f" {self._expected} in {self._executor.cache_dtype}, found {len(layers)} with {found} in {first.dtype}"
            )
        if first.shape[3] not in PAGE_SIZES:
            raise EngineError(
                f"engine mode: expected pages of 16, 32 or 64 tokens, found {first.shape[3]}",
                hint="set kv_cache_config.tokens_per_block to 32",
            )
        if any(layer.stride() != first.stride() for layer in layers) or first.stride(-1) != 1:
            raise EngineError("engine mode: expected a pool whose layers have the same strides, found others")
        if page_table.dtype != torch.int32 or not page_table.is_contiguous():
            raise EngineError(f"engine mode: expected a contiguous page table in torch.int32, found {page_table.dtype}")
