# SPDX-License-Identifier: Apache-2.0
"""Test cases of KV-injection attention, for both the CPU and the GPU, in four named lists.

B requests, S block, N query heads, G key/value heads, D head_dim, L draft layers, C_max cache rows a slot. A call finds
its context in a dense cache, or in pages of a pool in TensorRT-LLM's two layouts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import torch

UNALLOCATED = 2**31 - 1
"""A page table entry that must not be followed."""


@dataclass(frozen=True)
class Pages:
    """A pool of pages [P, L, 2, G, size, D], in a random order, between pages of NaN.

    Layer l's view begins with its part of the first page. With V1 its pages are whole pages apart and entries count
    pages; with V2 they are parts apart, and entries count parts.
    """

    size: int
    version: str = "V2"
    first: int = 0
    """Pages of the pool before those that are used."""


class Context(NamedTuple):
    """The node's inputs, and the memory that they lead to."""

    pool: torch.Tensor
    offsets: list[int]
    """[L], of the pool."""
    layout: list[int]
    """Page size; strides of page, K to V, row and head in bytes; number of pages that entries may name."""
    table: torch.Tensor  # [slots, M] INT32


def paged(k_cache: torch.Tensor, v_cache: torch.Tensor, lengths: dict[int, int], pages: Pages, seed: int) -> Context:
    """The first `lengths[slot]` rows of both caches [slots, L, C_max, G, D] in pages; nothing else is in them.

    Equal pages are one page, as those of a prefix that requests share.
    """
    slots, L, C_max, G, D = k_cache.shape
    size, itemsize, device = pages.size, k_cache.element_size(), k_cache.device
    M = -(-C_max // size)
    used = {slot: -(-length // size) for slot, length in lengths.items()}
    num_pages = pages.first + sum(used.values()) + 2
    raw = torch.full((num_pages - pages.first, L, 2, G, size, D * itemsize), 0xFF, dtype=torch.uint8, device=device)
    order = torch.randperm(len(raw), generator=torch.Generator().manual_seed(seed)).tolist()
    written: dict[bytes, int] = {}
    table = torch.full((slots, M), UNALLOCATED, dtype=torch.int32)
    for slot, count in used.items():
        for column in range(count):
            begin = column * size
            rows = min(size, lengths[slot] - begin)
            content = torch.full_like(raw[0], 0xFF)
            for kv, cache in enumerate((k_cache, v_cache)):
                part = cache[slot, :, begin : begin + rows].transpose(1, 2).contiguous().view(torch.uint8)
                content[:, kv, :, :rows] = part.view(L, G, rows, D * itemsize)
            key = content.cpu().numpy().tobytes()
            page = written.setdefault(key, order[-1])
            if page == order[-1]:
                raw[order.pop()] = content
            table[slot, column] = (page + pages.first) * (L if pages.version == "V2" else 1)
    part_bytes = 2 * G * size * D * itemsize
    row = D * itemsize
    page_stride = part_bytes * (L if pages.version == "V1" else 1)
    parts = L if pages.version == "V2" else 1
    layout = [size, page_stride, part_bytes // 2, row, size * row, num_pages * parts - (parts - 1)]
    return Context(
        raw, [layer * part_bytes - pages.first * L * part_bytes for layer in range(L)], layout, table.to(device)
    )


def dense(k_cache: torch.Tensor, v_cache: torch.Tensor) -> Context:
    """Both caches [slots, L, C_max, G, D] where they lie: a page a slot. The pool is K."""
    slots, L, C_max, G, D = k_cache.shape
    row = D * k_cache.element_size()
    plane = C_max * G * row
    layout = [C_max, L * plane, v_cache.data_ptr() - k_cache.data_ptr(), G * row, row, slots]
    table = torch.arange(slots, dtype=torch.int32, device=k_cache.device)[:, None]
    return Context(k_cache, [layer * plane for layer in range(L)], layout, table)


BF16, F16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
SHORT = {BF16: "bf16", F16: "f16", FP8: "fp8"}
EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call: sizes, attributes, and what `tests.plugins.tensors.draw` needs for its data."""

    name: str
    why: str = ""
    S: int = 8
    N: int = 8
    G: int = 2
    D: int = 64
    L: int = 1
    C_max: int = 0  # 0: the longest context of the batch, at least 1
    context_lengths: tuple[int, ...] = (100,)
    slots: int = 0  # 0: as many as slot_ids need
    slot_ids: tuple[int, ...] = ()  # none: request b has slot b
    layer: int = 0
    window: int = 0
    causal: bool = False
    sinks: bool = False
    bias: bool = False
    dtype: torch.dtype = BF16
    cache_dtype: torch.dtype = BF16
    k_scale: float = 1.0
    v_scale: float = 1.0
    output_scale: float = 0.0  # scale of an FP8 output; 0: the output has the block's dtype
    softmax_scale: float = 0.0  # 0: D ** -0.5
    size: float = 1.0  # factor of q and the block's k, before their norm
    norm: float = 1.5  # q_norm and k_norm lie about it; their product sharpens the softmax
    rope_factor: float = 1.0  # YaRN's, in the table
    pages: Pages | None = None  # none: a dense cache
    seed: int = 0

    @property
    def B(self) -> int:
        return len(self.context_lengths)

    @property
    def slot_of(self) -> tuple[int, ...]:
        """The slot of each request."""
        return self.slot_ids or tuple(range(self.B))

    @property
    def cache_shape(self) -> tuple[int, int, int, int, int]:
        slots = self.slots or max(self.slot_of, default=0) + 1
        return slots, self.L, self.C_max or max((1, *self.context_lengths)), self.G, self.D

    @property
    def cache_nbytes(self) -> int:
        """Bytes of K, which are those of V."""
        return math.prod(self.cache_shape) * self.cache_dtype.itemsize

    def attributes(self) -> dict[str, float | int]:
        """The node's attributes, by name."""
        return {
            "layer": self.layer, "num_heads": self.N, "num_kv_heads": self.G, "head_dim": self.D, "rms_norm_eps": EPS,
            "softmax_scale": self.softmax_scale or self.D**-0.5, "sliding_window": self.window,
            "causal": int(self.causal), "k_scale": self.k_scale, "v_scale": self.v_scale,
            "fp8_cache": int(self.cache_dtype is FP8), "has_qkv_bias": int(self.bias),
            "fp8_output": int(self.out_dtype is FP8), "output_scale": self.output_scale or 1.0,
        }  # fmt: skip

    @property
    def out_dtype(self) -> torch.dtype:
        return FP8 if self.output_scale else self.dtype


def wgmma_rows(case: Case) -> int:
    """Query rows that the attention of sm_90a is compiled for, of those that hold the case's; 0 if it is not for it."""
    needed, most = case.S * case.N // case.G, {64: 80, 128: 64}.get(case.D, 0)
    return min((rows for rows in (32, 64, 80) if needed <= rows <= most), default=0)


def ahead_fits(case: Case) -> bool:
    """Whether that is compiled for the case with products ahead, too."""
    return case.cache_dtype is FP8 and wgmma_rows(case) > 32


GPT_OSS = Case(name="gpt-oss", N=64, G=8, D=64, S=10)  # z-lab's drafters for gpt-oss
QWEN3_8B = Case(name="qwen3-8b", N=32, G=8, D=128, S=16)
RAGGED = Case(name="ragged", C_max=200, context_lengths=(150, 73))
FP8_CACHE = replace(RAGGED, name="fp8", cache_dtype=FP8, k_scale=0.02, v_scale=0.03)

# Rows that the attention of sm_90a is chosen for, which rounds queries there. With few ranges one ends a request and
# begins the next.
GPT_OSS_FP8 = Case(name="gpt-oss-fp8", N=8, G=1, S=10, cache_dtype=FP8, k_scale=0.02, v_scale=0.03, norm=4.0,
                   sinks=True, context_lengths=(300, 3, 130))  # fmt: skip
MANY_ROWS_FP8 = [
    GPT_OSS_FP8,
    replace(GPT_OSS_FP8, name="qwen3-8b-fp8", N=4, S=16, D=128, norm=2.0, sinks=False),
    replace(GPT_OSS_FP8, name="gpt-oss-bias-fp8-output", bias=True, output_scale=0.02),
    replace(GPT_OSS_FP8, name="rows-56-f16-fp8", S=7, dtype=F16, window=90, causal=True),
]

REGULAR = [
    replace(draft, name=f"{draft.name}-B{len(lengths)}", context_lengths=lengths, C_max=512, L=2, layer=1)
    for draft, lengths in product((GPT_OSS, QWEN3_8B), ((512,), (300, 511, 37, 128)))
]

HEADS_AND_BLOCKS = (
    (1, 1, 1),
    (8, 8, 8),
    (8, 1, 16),
    (12, 4, 5),
    (40, 8, 7),
    (32, 2, 32),
    (10, 5, 3),
    (64, 1, 2),
    (8, 2, 20),
)
FEATURES = [
    *(
        replace(RAGGED, name=f"D{D}-{SHORT[dtype]}", D=D, dtype=dtype, cache_dtype=dtype)
        for D, dtype in product((64, 96, 128, 256), (BF16, F16))
    ),
    *(
        replace(FP8_CACHE, name=f"D{D}-{SHORT[dtype]}-fp8", D=D, dtype=dtype)
        for D, dtype in product((64, 96, 128, 256), (BF16, F16))
    ),
    *(
        Case(
            name=f"window{window}{'-causal' * causal}{'-sinks' * sinks}", window=window, causal=causal, sinks=sinks,
            context_lengths=(90, 200, 3),
        )
        for window, causal, sinks in product((0, 7, 64), (False, True), (False, True))
    ),
    *(Case(name=f"N{N}-G{G}-S{S}", N=N, G=G, S=S, context_lengths=(70, 33)) for N, G, S in HEADS_AND_BLOCKS),
    *(replace(RAGGED, name=f"D{D}-bias-fp8-output", D=D, bias=True, output_scale=0.011) for D in (64, 96, 128, 256)),
    replace(RAGGED, name="f16-bias", dtype=F16, cache_dtype=F16, bias=True, sinks=True),
    replace(FP8_CACHE, name="fp8-bias", bias=True),
    replace(FP8_CACHE, name="f16-fp8-output", dtype=F16, output_scale=0.02),
    Case(name="output-too-large", why="448 stays", output_scale=0.0005, sinks=True, context_lengths=(20, 0)),
]  # fmt: skip

WINDOW = 16
CORNER = [
    Case(name="empty-batch", why="nothing to do is not an error", context_lengths=()),
    Case(name="no-context", why="the block sees itself only, in every request", context_lengths=(0, 0)),
    Case(name="context-1", why="one cache row", context_lengths=(1,)),
    Case(
        name="around-the-window",
        why="the first block slot just does, and just does not, see row 0, or the last of 16 rows; a window shorter"
        " than the context",
        window=WINDOW,
        context_lengths=(0, 1, WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + 14, WINDOW + 15, 5 * WINDOW + 3),
    ),
    Case(name="window-1", why="a slot sees itself alone", window=1, context_lengths=(9, 0)),
    Case(name="window-2-causal", why="a slot sees itself and its neighbour before", window=2, causal=True),
    Case(name="window-beyond", why="a window longer than everything", window=1 << 20, context_lengths=(40, 0)),
    Case(name="window-largest", why="positions less this window are below every int32", window=2**31 - 1, S=16,
         context_lengths=(40, 140)),
    Case(name="window-in-block", why="later slots see no context at all", window=5, S=16, context_lengths=(64, 2)),
    Case(
        name="around-tiles", why="one less, equal, one more than the row counts a kernel may work in", C_max=260,
        context_lengths=(15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257), N=4, S=3,
    ),
    Case(
        name="full-cache", why="the last row of the last slot: one row more is another tensor",
        context_lengths=(128, 128), C_max=128, L=3, layer=2, slot_ids=(1, 0),
    ),
    Case(
        name="permuted-slots", why="requests lie anywhere in the cache", slots=7, slot_ids=(5, 0, 6, 2), L=3, layer=1,
        C_max=97, context_lengths=(31, 97, 0, 60),
    ),
    Case(name="shared-slot", why="two requests read one slot", slot_ids=(1, 1), context_lengths=(50, 50)),
    Case(name="odd", why="no size is a multiple of anything", N=21, G=7, D=96, S=11, L=5, layer=3, C_max=61,
         slots=3, slot_ids=(2, 0), context_lengths=(59, 13), rope_factor=1.3466),
    Case(name="block-32", why="the longest block, ragged", S=32, context_lengths=(0, 77), causal=True),
    Case(name="batch-256", why="the largest batch, every length from 0 on", N=2, G=1, S=2, C_max=256,
         context_lengths=tuple(range(256))),
    Case(name="one-long", why="a long context beside short ones", N=2, G=1, S=2, context_lengths=(5000, 3, 0)),
    Case(name="longest", why="C_max = 131,072, all of it context", N=2, G=1, S=2, context_lengths=(131072,)),
    Case(name="longest-fp8", why="as longest, in bytes", N=1, G=1, S=1, D=96, cache_dtype=FP8, k_scale=0.02,
         v_scale=0.03, context_lengths=(131071,)),
    Case(name="sharp", why="exp of a score overflows FP32 unless the maximum is taken off", norm=12.0,
         context_lengths=(120, 0)),
    Case(name="sharp-f16", why="the same where the maximum lies far from 0 in FP16", norm=12.0, dtype=F16,
         cache_dtype=F16, context_lengths=(120, 0)),
    Case(name="flat", why="all scores are nearly equal: every row counts", norm=0.01, context_lengths=(333,)),
    Case(name="small", why="eps counts beside small q and k", size=1e-3, context_lengths=(40,)),
    Case(name="odd-scale", why="softmax_scale is not always D ** -0.5", softmax_scale=0.3, context_lengths=(40,)),
    Case(name="sinks-no-context", why="a sink beside the block alone", sinks=True, context_lengths=(0, 1)),
    Case(name="sinks-window-1", why="a sink and one key", sinks=True, window=1, context_lengths=(0, 20)),
    Case(name="fp8-everything", why="all features at once", D=128, cache_dtype=FP8, k_scale=0.015, v_scale=0.04,
         window=33, causal=True, sinks=True, L=2, layer=1, slots=4, slot_ids=(3, 1), context_lengths=(100, 32)),
]  # fmt: skip

# A pool of pages: ragged, with a window, without context; last pages full and begun.
PAGED = [
    *(
        Case(name=f"pages-{size}-{version}-{SHORT[cache]}", L=3, layer=1, C_max=200, slots=5, slot_ids=(4, 0, 2, 3),
             context_lengths=(150, 0, 64, 1), pages=Pages(size, version), cache_dtype=cache,
             k_scale=0.02 if cache is FP8 else 1.0, v_scale=0.03 if cache is FP8 else 1.0)
        for size, version, cache in product((16, 32, 64), ("V1", "V2"), (BF16, FP8))
    ),
    *(
        Case(name=f"pages-{size}-window-{window}", D=D, window=window, causal=True, sinks=True, L=2, layer=1,
             context_lengths=(300, 0, window, 129), pages=Pages(size))
        for size, window, D in ((16, 7, 96), (16, 128, 64), (32, 33, 128), (64, 65, 256), (64, 1, 128))
    ),
    Case(name="pages-shared", slot_ids=(1, 1, 0), context_lengths=(50, 33, 70), pages=Pages(16, "V1")),
    Case(name="pages-many-rows", N=8, G=1, S=10, context_lengths=(700, 3, 130), L=2, layer=1, pages=Pages(32)),
    Case(name="pages-many-rows-fp8", N=8, G=1, S=10, context_lengths=(2100, 3, 130), L=2, layer=1,
         pages=Pages(16, "V1"), cache_dtype=FP8, k_scale=0.02, v_scale=0.03, window=1900),
    Case(name="pages-many-rows-128", N=4, G=1, D=128, S=16, context_lengths=(1300, 0, 64), pages=Pages(64, "V1")),
]  # fmt: skip

# A test gives the middle request an invalid slot or length: TensorRT's builder times nodes with such values.
OUT_OF_RANGE = [
    Case(name="out-of-range", N=2, G=1, S=2, slots=7, C_max=300, context_lengths=(5, 300, 290)),
    Case(name="out-of-range-fp8", N=2, G=1, S=2, slots=7, C_max=300, cache_dtype=FP8, window=40, sinks=True,
         context_lengths=(5, 300, 290)),
]  # fmt: skip

# The plane that is read, the last of a cache with 6 GiB of K and 6 GiB of V, in which 32-bit offsets overflow.
PLANE = Case(name="plane", N=16, G=8, S=2, C_max=131072, context_lengths=(40,))
FAR = replace(PLANE, name="far", L=8, layer=7, slots=6, slot_ids=(5,))
# Pages after 5 GiB of others, which 32-bit page table entries can still address.
FAR_PAGES = Case(name="far-pages", L=4, layer=3, context_lengths=(70, 33), pages=Pages(32, first=80_000))
FAR_FP8 = replace(FAR, name="far-fp8", L=16, layer=15, cache_dtype=FP8, k_scale=0.02, v_scale=0.03)

# Larger than what `make test` computes; for the GPU and for benchmarks/.
PERFORMANCE = [
    replace(
        draft, name=f"{draft.name}-B{B}-C{C}-{SHORT[cache]}", context_lengths=(C,) * B, cache_dtype=cache,
        k_scale=0.02 if cache is FP8 else 1.0, v_scale=0.03 if cache is FP8 else 1.0,
    )
    for draft, cache, B, C in product((GPT_OSS, QWEN3_8B), (BF16, FP8), (1, 4, 16, 64), (512, 4096, 32768, 131072))
]  # fmt: skip
