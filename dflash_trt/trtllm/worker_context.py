# SPDX-License-Identifier: Apache-2.0
"""The context cache of TensorRT-LLM's DFlash worker, dense or a pool of pages, as an executor reads it.

The context in the managed pool was read in NVIDIA/TensorRT-LLM: _torch/speculative/dflash.py at 414ba69f, 864a4300 and
8d62b3e5, and _torch/pyexecutor/_util.py at 12a71fe4 (`_create_one_model_draft_kv_cache_manager`). None of it was run.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.engine.executor import Executor
from dflash_trt.engine.signatures import PAGE_SIZES
from dflash_trt.errors import EngineError

LOG = logging.getLogger(__name__)


def declare_pool(draft_config: Any, spec: DraftSpec) -> None:
    """Make TensorRT-LLM's ModelConfig of the draft describe the rows that every rank keeps.

    The manager divides KV heads among the ranks, and `spec` has those of one: all, or its share. One pool holds all
    layers only if no layer has a window: windows are in the plans.
    """
    config, mapping = draft_config.pretrained_config, draft_config.mapping
    ranks = 1 if mapping.enable_attention_dp else mapping.tp_size
    config.num_key_value_heads = spec.num_key_value_heads * ranks
    config.use_sliding_window = False
    config.sliding_window = None
    config.layer_types = ["full_attention"] * spec.num_layers


class BoundContext:
    """Binds the executor to the worker's context; the worker replaces its manager once, after it has sized its memory.

    Wrong addresses, shapes and strides are refused. Wrong contents of the pool or the table (a page of another request,
    a length beyond the written rows) are not: reading them back would stall every step. Drafts are then worse, and the
    target's tokens unchanged.
    """

    def __init__(self, executor: Executor, spec: DraftSpec) -> None:
        self._executor = executor
        self._layers, self._heads, self._head_dim = len(spec.layers), spec.num_key_value_heads, spec.head_dim
        self._key: tuple[object, ...] | None = None

    def forget(self) -> None:
        """The worker is about to replace its context."""
        self._key = None

    def bind_caches(self, k_cache: Tensor, v_cache: Tensor) -> None:
        """Bind dense caches [slots, L, C, G, D] before every pass; EngineError for those of another draft."""
        key = _addresses(k_cache, v_cache)
        if key == self._key:
            return
        for cache in (k_cache, v_cache):
            self._expect("a context cache", (cache.shape[1], *cache.shape[3:]), cache.dtype)
        if (k_cache.shape, k_cache.stride()) != (v_cache.shape, v_cache.stride()):
            raise EngineError(
                "engine mode: expected K and V of the same shape and strides, found"
                f" {tuple(k_cache.shape)}, {k_cache.stride()} and {tuple(v_cache.shape)}, {v_cache.stride()}"
            )
        self._executor.bind(k_cache, v_cache)
        self._key = key

    def bind_pool(self, layers: Sequence[Tensor], page_table: Tensor) -> None:
        """Bind views [pages, 2, G, rows, D] of all layers and the worker's table [slots, M] INT32 before every pass.

        Raises EngineError for a pool of another draft, or of an unknown layout.
        """
        key = _addresses(*layers, page_table)
        if key == self._key:
            return
        for layer in layers:
            found = (len(layers), layer.shape[2], layer.shape[4])
            self._expect("a pool", found, layer.dtype)
        self._check_pages(layers)
        if page_table.dtype != torch.int32 or not page_table.is_contiguous():
            raise EngineError(f"engine mode: expected a contiguous page table in torch.int32, found {page_table.dtype}")
        if isinstance(layers, Tensor):
            LOG.warning(
                "engine mode: the worker set aside a private context arena in the place of the managed pool;"
                " its log says why"
            )
        self._executor.bind_pool(list(layers), page_table.shape[1])
        self._key = key

    def _expect(self, what: str, found: tuple[int, ...], dtype: torch.dtype) -> None:
        expected = (self._layers, self._heads, self._head_dim)
        if found != expected or dtype != self._executor.cache_dtype:
            raise EngineError(
                f"engine mode: expected {what} of layers, heads and head_dim {expected} in"
                f" {self._executor.cache_dtype}, found {found} in {dtype}"
            )

    def _check_pages(self, layers: Sequence[Tensor]) -> None:
        """A layer's page is K [G, rows, D], then V; pages are contiguous (V2) or interleaved by layer (V1)."""
        rows, first = layers[0].shape[3], min(layer.data_ptr() for layer in layers)
        if rows not in PAGE_SIZES:
            raise EngineError(
                f"engine mode: expected pages of 16, 32 or 64 tokens, found {rows}",
                hint="set kv_cache_config.tokens_per_block to 32",
            )
        page = 2 * self._heads * rows * self._head_dim
        inner = (page // 2, rows * self._head_dim, self._head_dim, 1)
        expected = {"V2": (page, *inner), "V1": (self._layers * page, *inner)}
        offsets = [layer.data_ptr() - first for layer in layers]
        for index, layer in enumerate(layers):
            if layer.shape[3] != rows or layer.stride() not in expected.values():
                raise EngineError(
                    f"engine mode: expected a pool whose pages of {rows} tokens have the strides"
                    f" {' or '.join(f'{strides} ({name})' for name, strides in expected.items())}, found"
                    f" {layer.stride()} with {layer.shape[3]} tokens in layer {index}"
                )
            if layer.stride() != layers[0].stride():
                raise EngineError("engine mode: expected a pool whose layers have the same strides, found others")
        if len(set(offsets)) < self._layers or any(offset % (page * layers[0].itemsize) for offset in offsets):
            raise EngineError(
                f"engine mode: expected layers whole pages of {page * layers[0].itemsize} bytes apart, found them"
                f" {offsets} bytes after the first"
            )


def _addresses(*tensors: Tensor) -> tuple[object, ...]:
    return tuple((tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in tensors)
