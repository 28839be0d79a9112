# SPDX-License-Identifier: Apache-2.0
"""Replaces transformers' layers and torch's operators of a target on a CPU.

Attention is C++ (cpp/paged_attention): one call a layer stores the new rows and reads the pages in place. A row's sum,
and its order, depends on its own sequence alone.
"""

from __future__ import annotations

import inspect
import logging
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dflash_trt import _C
from dflash_trt._C import TOKENS_PER_PAGE, VALUE_ALIGNMENT, PassRows
from dflash_trt.engine import signatures
from dflash_trt.runtime.cpu.linear_layers import (
    group_experts,
    lay_out_linear_layers,
    openmp_team,
    replace_linear_layers,
)
from dflash_trt.runtime.targets.packed_pass import AttentionRule, RaggedPass
from dflash_trt.runtime.targets.packed_target import Acceleration

log = logging.getLogger("dflash_trt.runtime.cpu")
PROBE_ROWS, TOLERANCE = 4, 1e-5
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


@torch.inference_mode()
def fuse_norms(model: PreTrainedModel) -> None:
    """Replaces the `forward` of an FP32 model's norms that compute what `normed` does, of their weight or of 1 more."""
    if model.dtype != torch.float32:
        return
    for norm in (module for module in model.modules() if type(module).__name__.endswith("RMSNorm")):
        weights = [parameter.data for parameter in norm.parameters()]
        is_plain = [(type(weight), weight.dtype, weight.ndim) for weight in weights] == [(Tensor, torch.float32, 1)]
        if is_plain and len(inspect.signature(type(norm).forward).parameters) == 2:
            _fuse_norm(norm, weights[0])


def _fuse_norm(norm: nn.Module, weight: Tensor) -> None:
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    rows = torch.randn(PROBE_ROWS, len(weight), generator=torch.Generator().manual_seed(0))
    expected = norm(rows)
    for factor in (weight, 1 + weight):
        if isinstance(eps, float) and torch.allclose(normed(factor, eps, rows), expected, TOLERANCE, TOLERANCE):
            norm.forward = partial(normed, factor, eps)
            return


def normed(weight: Tensor, eps: float, rows: Tensor) -> Tensor:
    """rows [..., D] / sqrt(mean(rows^2) + eps) * weight [D], all FLOAT."""
    rows = rows.contiguous()
    out = torch.empty_like(rows)
    dim = len(weight)
    _C.rms_norm(rows.data_ptr(), rows.numel() // dim, dim, weight.data_ptr(), eps, out.data_ptr(), *openmp_team())
    return out


def accelerate(model: PreTrainedModel) -> Acceleration:
    """Replaces layers of a packed target in place; a model on another device stays as it is.

    Norms go first, because a norm's formula is determined from the original norm. Linear layers, experts and attention
    sum each row in one order, however many rows there are. Layers without a fast kernel for this CPU are logged once.
    """
    if model.device.type != "cpu":
        return Acceleration()
    for reason in slow_parts(model.dtype):
        log.warning("%s: %s", model.name_or_path, reason)
    fuse_norms(model)
    has_all_bfloat16 = replace_linear_layers(model)
    lay_out_linear_layers(model)
    group_experts(model)
    return Acceleration(pass_type=PagedPass, pads_rows=model.dtype == torch.bfloat16 and not has_all_bfloat16)


def slow_parts(dtype: torch.dtype) -> list[str]:
    """Reasons why this CPU, or this build of torch, computes slower than it could."""
    features = _C.cpu_features()
    reasons = []
    if features[0] == "scalar":
        reasons.append("this CPU has neither AVX-512 nor AVX2: layers are computed without vectors")
    elif dtype == torch.bfloat16 and not (features[0] == "avx512" and torch.cpu._is_avx512_bf16_supported()):
        reasons.append(
            f"this CPU lacks AVX512-BF16 (it has {features[0]}): BF16 weights are widened to FP32 when they are read,"
            " and torch's own layers may be slow; --dtype float32 may be faster"
        )
    threads, start = openmp_team()
    if threads > 1 and not start:
        reasons.append(f"this torch does not use OpenMP: only one of {threads} threads is used")
    return reasons
