# SPDX-License-Identifier: Apache-2.0
"""Random inputs of a case, and the bindings called with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch

from dflash_trt import _C
from tests.plugins.cases import Case, Context, dense, paged

GUARD_BYTES = 128  # guard bytes before and after each output
UNTOUCHED = 0xFF  # NaN in every format


def attributes(case: Case) -> _C.KVInjectionAttributes:
    return _C.KVInjectionAttributes(**case.attributes())


def inputs(case: Case, tensors: Tensors) -> dict[str, torch.Tensor]:
    """The node's inputs by name, in its order. The caches live as long as the pointers into them."""
    pool, offsets, layout, table = tensors.context(case)
    addresses = [pool.data_ptr() + offset for offset in offsets]
    context_pointers = torch.tensor(pointers(addresses, layout), device=pool.device)
    context_pointers.pool = pool, tensors  # type: ignore[attr-defined]
    values = {
        "qkv": tensors.qkv, "q_norm": tensors.q_norm, "k_norm": tensors.k_norm, "rope": tensors.rope,
        "context_pointers": context_pointers, "context_layout": torch.tensor(layout, device=pool.device),
        "page_table": table,
        "slot_ids": tensors.slot_ids, "context_lengths": tensors.context_lengths, "qkv_bias": tensors.qkv_bias,
        "sinks": tensors.sinks,
    }  # fmt: skip
    return {name: value for name, value in values.items() if value is not None}


def pointers(addresses: Sequence[int], layout: Sequence[int]) -> list[tuple[int, int]]:
    """Each layer's address with its checksum."""
    return [(address, ~(address + sum(layout))) for address in addresses]


class Guarded:
    """A tensor that a call may write, of NaN, between bytes that it may not."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> None:
        size = math.prod(shape) * dtype.itemsize
        self._bytes = torch.full((size + 2 * GUARD_BYTES,), UNTOUCHED, dtype=torch.uint8, device=device)
        self.tensor = self._bytes[GUARD_BYTES : GUARD_BYTES + size].view(dtype).view(shape)

    def assert_guarded(self) -> None:
        for where, guard in (("before", self._bytes[:GUARD_BYTES]), ("behind", self._bytes[-GUARD_BYTES:])):
            assert (guard == UNTOUCHED).all(), f"the guard {where} the tensor was overwritten"


def output(case: Case, tensors: Tensors) -> Guarded:
    """Room for the call's output [B, S, N*D]."""
    dtype = case.out_dtype if case.output_scale else tensors.q.dtype  # the case may be invalid on purpose
    return Guarded(tensors.q.shape, dtype, tensors.q.device)


def reference(case: Case, tensors: Tensors) -> torch.Tensor:
    """The CPU reference's output [B, S, N*D]."""
    out = output(case, tensors)
    _C.kv_injection_attention_reference(attributes(case), list(inputs(case, tensors).values()), out.tensor)
    out.assert_guarded()
    return out.tensor


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """The inputs of a call: the node's, but for its context, which `context` makes of the caches."""

    qkv: torch.Tensor  # [B, S, (N + 2G)*D]: query heads, key heads, value heads
    q_norm: torch.Tensor  # [D]
    k_norm: torch.Tensor  # [D]
    rope: torch.Tensor  # [B, S, D] FP32: cos, then sin
    k_cache: torch.Tensor  # [slots, L, C_max, G, D]
    v_cache: torch.Tensor  # [slots, L, C_max, G, D]
    slot_ids: torch.Tensor  # [B] INT32
    context_lengths: torch.Tensor  # [B] INT32
    qkv_bias: torch.Tensor | None  # [(N + 2G)*D]
    sinks: torch.Tensor | None  # [N] FP32

    @property
    def q(self) -> torch.Tensor:
        """A view [B, S, N*D] of qkv."""
        return self._parts[0]

    @property
    def k(self) -> torch.Tensor:
        """A view [B, S, G*D] of qkv."""
        return self._parts[1]

    @property
    def v(self) -> torch.Tensor:
        """A view [B, S, G*D] of qkv."""
        return self._parts[2]

    @property
    def _parts(self) -> tuple[torch.Tensor, ...]:
        kv_width = self.k_cache.shape[-2] * self.k_cache.shape[-1]
        return self.qkv.split([self.qkv.shape[-1] - 2 * kv_width, kv_width, kv_width], dim=-1)

    def each(self) -> list[torch.Tensor]:
        """The tensors that the call has."""
        return [value for field in fields(self) if (value := getattr(self, field.name)) is not None]

    def context(self, case: Case) -> Context:
        """The caches as the case has them; of pages, with no more rows than the requests read."""
        if case.pages is None:
            return dense(self.k_cache, self.v_cache)
        lengths: dict[int, int] = {}
        for slot, length in zip(case.slot_of, case.context_lengths, strict=True):
            lengths[slot] = max(length, lengths.get(slot, 0))
        return paged(self.k_cache, self.v_cache, lengths, case.pages, case.seed)


def draw(case: Case, device: str = "cpu") -> Tensors:
    """Random inputs, the same for the same case and device.

    Memory that the call must not read (rows from context_length on, other layers, other slots) is NaN.
    """
    generator = torch.Generator(device).manual_seed(case.seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32)

    def cache(scale: float) -> torch.Tensor:
        dtype = case.cache_dtype
        nan = torch.full((), torch.nan).to(dtype).to(device)
        rows = nan.expand(case.cache_shape).clone()
        for slot, length in zip(case.slot_of, case.context_lengths, strict=True):
            rows[slot, case.layer, :length] = (normal(length, case.G, case.D) / scale).to(dtype)
        return rows

    S, D, heads = case.S, case.D, (case.N, case.G, case.G)
    q, k, v = (normal(case.B, S, n * D) for n in heads)
    bias = [normal(n * D) for n in heads] if case.bias else []
    q_norm, k_norm = ((case.norm + 0.2 * normal(D)).to(case.dtype) for _ in "qk")
    lengths = torch.tensor(case.context_lengths, dtype=torch.int32, device=device)
    return Tensors(
        qkv=torch.cat([q * case.size, k * case.size, v], dim=-1).to(case.dtype), q_norm=q_norm, k_norm=k_norm,
        rope=rotary_rows(lengths, S, D) * case.rope_factor, k_cache=cache(case.k_scale), v_cache=cache(case.v_scale),
        slot_ids=torch.tensor(case.slot_of, dtype=torch.int32, device=device), context_lengths=lengths,
        sinks=normal(case.N) + 2 if case.sinks else None, qkv_bias=torch.cat(bias).to(case.dtype) if bias else None,
    )  # fmt: skip


# For `out_of_range`; the cases have 7 slots of 300 rows.
BAD = {"slot_ids": (7, -1, 2**31 - 1, -(2**31)), "context_lengths": (301, -1, 2**31 - 1, -(2**31))}


def out_of_range(tensors: Tensors, name: str, value: int) -> Tensors:
    """The inputs with this value of request 1."""
    values = getattr(tensors, name).clone()
    values[1] = value
    return replace(tensors, **{name: values})


def rotary_rows(lengths: torch.Tensor, S: int, D: int) -> torch.Tensor:
    """[B, S, D] FP32: cos, then sin, of the block's positions; theta is Qwen3's million."""
    positions = lengths.double()[:, None] + torch.arange(S, device=lengths.device)
    frequencies = 1e6 ** (-torch.arange(0, D, 2, device=lengths.device).double() / D)
    angles = positions[:, :, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1).float()
