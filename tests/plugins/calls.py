# SPDX-License-Identifier: Apache-2.0
"""The bindings, called with a case's tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from dflash_trt import _C
from tests.plugins.cases import Case
from tests.plugins.tensors import Tensors

GUARD_BYTES = 128  # before and behind what a call writes
UNTOUCHED = 0xFF  # NaN in every format


def attributes(case: Case) -> _C.KVInjectionAttributes:
    return _C.KVInjectionAttributes(**case.attributes())


def inputs(case: Case, tensors: Tensors) -> dict[str, torch.Tensor]:
    """The node's inputs by name, in its order. The caches live as long as the pointers into them."""
    pool, offsets, layout, table = tensors.context(case)
    pointers = torch.tensor([pool.data_ptr() + offset for offset in offsets], device=pool.device)
    pointers.pool = pool, tensors  # type: ignore[attr-defined]
    values = {
        "qkv": tensors.qkv,
        "q_norm": tensors.q_norm,
        "k_norm": tensors.k_norm,
        "rope": tensors.rope,
        "context_pointers": pointers,
        "context_layout": torch.tensor(layout, device=pool.device),
        "page_table": table,
        "slot_ids": tensors.slot_ids,
        "context_lengths": tensors.context_lengths,
        "sinks": tensors.sinks,
    }
    return {name: value for name, value in values.items() if value is not None}


class Guarded:
    """A tensor that a call may write, of NaN, between bytes that it may not."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> None:
        size = math.prod(shape) * dtype.itemsize
        self._bytes = torch.full((size + 2 * GUARD_BYTES,), UNTOUCHED, dtype=torch.uint8, device=device)
        self.tensor = self._bytes[GUARD_BYTES : GUARD_BYTES + size].view(dtype).view(shape)

    def assert_guarded(self) -> None:
        for where, guard in (("before", self._bytes[:GUARD_BYTES]), ("behind", self._bytes[-GUARD_BYTES:])):
            assert (guard == UNTOUCHED).all(), f"the guard {where} the tensor was overwritten"


def output(tensors: Tensors) -> Guarded:
    """Room for the call's output [B, S, N*D]."""
    return Guarded(tensors.q.shape, tensors.q.dtype, tensors.q.device)


def reference(case: Case, tensors: Tensors) -> torch.Tensor:
    """The CPU reference's output [B, S, N*D]."""
    out = output(tensors)
    _C.kv_injection_attention_reference(attributes(case), list(inputs(case, tensors).values()), out.tensor)
    out.assert_guarded()
    return out.tensor
