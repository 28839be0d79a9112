# SPDX-License-Identifier: Apache-2.0
"""Cases of benchmarks/bench_kv_injection_attention.py, with their inputs and the bytes they move."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

from tests.plugins.cases import BF16, FP8, GPT_OSS, QWEN3_8B, SHORT, Case
from tests.plugins.kernel.oracle import norm_and_rotate
from tests.plugins.tensors import Tensors, draw

LAYERS = 8  # heads per drafter
PAGE = 64  # rows of a page for peers that read pages; what a slot has room for is a multiple of it
BATCHES = (1, 4, 16, 64)
CONTEXTS = (512, 4096, 32768, 131072 - PAGE)  # a slot holds at most 131,072 rows, including the block after its context
BORDERS = (1024, 2048)  # where the kernel of short contexts may cease to be the fastest
DRAFTERS = {"gpt-oss": GPT_OSS, "Qwen3-8B": QWEN3_8B}


def cases() -> dict[str, list[Case]]:
    """By the title of their table."""
    tables: dict[str, list[Case]] = {}
    for (name, draft), cache in product(DRAFTERS.items(), (BF16, FP8)):
        whole = [(context,) * batch for batch, context in product(BATCHES, CONTEXTS)]
        whole += [(context,) * batch for batch, context in product((1, 64), BORDERS)]
        tables[title(name, draft, cache)] = [
            make(draft, cache, lengths) for lengths in (*whole, ragged(16), ragged(64))
        ]
        rank = replace(draft, N=draft.N // draft.G, G=1)
        shared = [(4096,) * batch for batch in BATCHES] + [(512,), (32768,)]
        heading = title(f"{name}, a rank of {draft.G}", rank, cache)
        tables[heading] = [make(rank, cache, lengths) for lengths in shared]
    return tables


def title(name: str, draft: Case, cache: torch.dtype) -> str:
    return f"{name}: {draft.N}/{draft.G} heads of {draft.D}, block {draft.S}, {SHORT[cache].upper()} cache"


def ragged(batch: int) -> tuple[int, ...]:
    """From 512 to 32,768 rows, each longer than the one before by the same factor."""
    return tuple(round(512 * 64 ** (i / (batch - 1))) for i in range(batch))


def make(draft: Case, cache: torch.dtype, lengths: Sequence[int]) -> Case:
    rows = max(lengths) + draft.S
    k_scale, v_scale = (0.02, 0.03) if cache is FP8 else (1.0, 1.0)
    return replace(
        draft, name=lengths_text(lengths), L=LAYERS, C_max=rows + -rows % PAGE, context_lengths=tuple(lengths),
        cache_dtype=cache, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip


def lengths_text(lengths: Sequence[int]) -> str:
    first, last = lengths[0], lengths[-1]
    return f"{len(lengths)} x {first}" if first == last else f"{len(lengths)} x {first}..{last}"


def context_bytes(case: Case) -> int:
    """Bytes of the cache rows that one layer's call reads."""
    return 2 * sum(case.context_lengths) * case.G * case.D * case.cache_dtype.itemsize


def moved_bytes(case: Case) -> int:
    """Bytes that one layer's call must read and write: context rows, qkv, both norms, rope, slots, lengths, output."""
    slots = case.B * case.S
    block = slots * 2 * (case.N + case.G) * case.D * case.dtype.itemsize
    return context_bytes(case) + block + 2 * case.D * case.dtype.itemsize + 4 * slots * case.D + 8 * case.B


def memory_bytes(case: Case) -> int:
    """Bytes a GPU needs at most: the caches of all layers, the plane they are made of, and one request's FP32 draws."""
    plane = 2 * case.B * case.C_max * case.G * case.D
    return plane * (case.L + 2) * case.cache_dtype.itemsize + 4 * plane // case.B


@dataclass(frozen=True)
class Inputs:
    """Inputs of our kernel and its peers, which read the same caches."""

    case: Case
    tensors: Tensors
    """Ours; every layer of the caches has the same values."""
    queries: torch.Tensor
    """Queries [B, S, N, D], already normalised and rotated, which no peer does. The caches hold the block after each
    context.
    """

    @property
    def lengths(self) -> list[int]:
        """Rows that a peer reads of each request: context and block."""
        return [length + self.case.S for length in self.case.context_lengths]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the layer's caches [B, C_max, G, D]."""
        return self.tensors.k_cache[:, index], self.tensors.v_cache[:, index]


def make_inputs(case: Case, device: str) -> Inputs:
    """Random inputs. Cache rows after the block are 0, because peers multiply them by 0."""
    tensors = draw(replace(case, L=1, layer=0), device)
    queries, keys = (
        torch.stack([norm_and_rotate(x[b].unflatten(-1, (-1, case.D)), norm, tensors.rope[b]) for b in range(case.B)])
        for x, norm in ((tensors.q, tensors.q_norm), (tensors.k, tensors.k_norm))
    )
    for cache, scale, rows in (
        (tensors.k_cache, case.k_scale, keys),
        (tensors.v_cache, case.v_scale, tensors.v.unflatten(-1, (-1, case.D)).double()),
    ):
        block = as_bytes((rows / scale).to(case.cache_dtype))
        for b, length in enumerate(case.context_lengths):
            as_bytes(cache)[b, 0, length : length + case.S] = block[b]
            as_bytes(cache)[b, 0, length + case.S :] = 0
    caches = (as_bytes(cache).repeat(1, case.L, 1, 1, 1) for cache in (tensors.k_cache, tensors.v_cache))
    k_cache, v_cache = (cache.view(case.cache_dtype) for cache in caches)
    return Inputs(case, replace(tensors, k_cache=k_cache, v_cache=v_cache), queries.to(case.dtype))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Not every operation knows FP8."""
    return tensor.view(torch.uint8)


def all_cases() -> Iterator[Case]:
    for table in cases().values():
        yield from table
