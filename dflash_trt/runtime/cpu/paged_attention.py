# SPDX-License-Identifier: Apache-2.0
"""Attention on a CPU, in C++ (cpp/paged_attention): one call a layer stores the new rows and reads the pages in place.

A row's sum, and its order, depends on its own sequence alone.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from dflash_trt._C import TOKENS_PER_PAGE, VALUE_ALIGNMENT, PassRows
from dflash_trt.engine import signatures
from dflash_trt.runtime.cpu.linear_layers import openmp_team
from dflash_trt.runtime.targets.packed_pass import AttentionRule, RaggedPass

IS_BF16 = {torch.float32: False, torch.bfloat16: True}


class PagedPass(RaggedPass):
    """Pass over K [G, pages, D, 32] and V [G, pages, 32, E], whose rows are padded to a multiple of VALUE_ALIGNMENT."""

    attention = "C++ attention"

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """Computes attention as `Pass` says; float32 or bfloat16, all three alike."""
        assert query.dtype == key.dtype == value.dtype, "one type for query, key and value"
        num_heads, num_rows, head_dim = query.shape
        num_kv_heads, value_dim = len(value), value.shape[-1]
        assert signatures.TOKENS_PER_PAGE == TOKENS_PER_PAGE, "C++ is compiled for one size of a page"
        v_page = TOKENS_PER_PAGE, -(-value_dim // VALUE_ALIGNMENT) * VALUE_ALIGNMENT
        k_cache, v_cache = self._cache.layer(layer, num_kv_heads, (head_dim, TOKENS_PER_PAGE), v_page, key.dtype)
        query, key, value = _dense(query), _dense(key), _dense(value)
        sinks = None if rule.sinks is None else rule.sinks.float().contiguous()
        threads, start = openmp_team()
        out = query.new_empty(num_rows, num_heads, value_dim)
        self._rows.attend(
            _place(query),
            _place(key),
            _place(value),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            out.data_ptr(),
            (num_heads, num_kv_heads, head_dim, value_dim, k_cache.shape[1]),
            is_bf16=IS_BF16[query.dtype],
            scale=rule.scale,
            softcap=rule.softcap or 0.0,
            window=rule.window or 0,
            sinks=0 if sinks is None else sinks.data_ptr(),
            threads=threads,
            start=start,
        )
        return out

    @cached_property
    def _rows(self) -> PassRows:
        return PassRows(self._begins, self._counts, [self._table.pages[slot] for slot in self._slots])


def _dense(rows: Tensor) -> Tensor:
    """One whose rows are dense; heads and rows may lie anywhere."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _place(rows: Tensor) -> tuple[int, int, int]:
    """Address, and strides of a head and of a row in elements."""
    return rows.data_ptr(), rows.stride(0), rows.stride(1)
