# SPDX-License-Identifier: Apache-2.0
"""Attention over pages, against its equation in float64 on each sequence by itself."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_trt import _C
from dflash_trt.runtime.cpu.accelerate import _place
from dflash_trt.runtime.cpu.linear_layers import openmp_team

PAGE = 32
ISAS = _C.cpu_features()
WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Layer:
    """A layer's shape, and sequences of it: tokens before the pass, and in it."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    value_dim: int = 32
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    dtype: torch.dtype = torch.float32
    lengths: tuple[tuple[int, int], ...] = ((0, 5), (70, 1), (31, 2), (33, 40), (300, 8))


CASES = {
    "plain": Layer(), "one head each": Layer(heads=2),
    "many heads": Layer(heads=64, kv_heads=4, head_dim=64, value_dim=64, lengths=((100, 9), (0, 1))),
    "window": Layer(window=20), "window of one": Layer(window=1),
    "window of a page": Layer(window=32, has_sinks=True), "soft cap": Layer(softcap=3.0, window=50),
    "sinks": Layer(has_sinks=True), "latent": Layer(heads=3, kv_heads=3, head_dim=24, value_dim=12),
    "odd sizes": Layer(head_dim=9, value_dim=50, window=40, has_sinks=True),
}  # fmt: skip


@dataclass(frozen=True)
class Data:
    """Inputs of each sequence: query [T, N, D], key [T, G, D] and value [T, G, E]; sinks [N]."""

    sequences: list[tuple[Tensor, Tensor, Tensor]]
    sinks: Tensor | None


def random_data(layer: Layer, seed: int = 0) -> Data:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(layer.dtype)

    sizes = ((layer.heads, layer.head_dim), (layer.kv_heads, layer.head_dim), (layer.kv_heads, layer.value_dim))
    sequences = [tuple(normal(sum(length), *size) for size in sizes) for length in layer.lengths]
    return Data(sequences, normal(layer.heads).float() if layer.has_sinks else None)  # type: ignore[arg-type]


def expected(layer: Layer, data: Data) -> list[Tensor]:
    """Output [T, N, E] of each sequence, by the equation."""
    found = []
    for query, key, value in data.sequences:
        q = query.double().transpose(0, 1)
        k, v = (x.double().transpose(0, 1).repeat_interleave(layer.heads // layer.kv_heads, 0) for x in (key, value))
        scores = q @ k.transpose(1, 2) * layer.head_dim**-0.5
        if layer.softcap:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        distance = torch.arange(len(query))[:, None] - torch.arange(len(query))
        seen = (distance >= 0) & (distance < (layer.window or len(query)))
        scores = scores.masked_fill(~seen, -torch.inf)
        if data.sinks is not None:
            scores = torch.cat([scores, data.sinks.double()[:, None, None].expand(-1, len(query), 1)], -1)
        found.append((scores.softmax(-1)[..., : len(query)] @ v).transpose(0, 1))
    return found


class Cache:
    """Pages of all sequences in random order, with NaN in rows that were never written."""

    def __init__(self, layer: Layer, seed: int = 0) -> None:
        self.layer = layer
        needed = [-(-sum(length) // PAGE) for length in layer.lengths]
        pages = list(range(sum(needed) + 3))
        random.Random(seed).shuffle(pages)
        self.pages = [[pages.pop() for _ in range(count)] for count in needed]
        width = -(-layer.value_dim // _C.VALUE_ALIGNMENT) * _C.VALUE_ALIGNMENT
        shape = (layer.kv_heads, sum(needed) + 3)
        self.k = torch.full((*shape, layer.head_dim, PAGE), torch.nan, dtype=layer.dtype)
        self.v = torch.full((*shape, PAGE, width), torch.nan, dtype=layer.dtype)

    def attend(
        self,
        data: Data,
        rows: Sequence[tuple[int, int, int]],
        *,
        threads: int = 1,
        start: int | None = None,
        isa: str = "best",
    ) -> list[Tensor]:
        """One pass over tokens begin .. end of sequences (index, begin, end) -> [n, N, E] of each."""
        layer = self.layer
        parts = [[x[begin:end] for x in data.sequences[i]] for i, begin, end in rows]
        query, key, value = (torch.cat(part).transpose(0, 1) for part in zip(*parts, strict=True))
        counts = [end - begin for _, begin, end in rows]
        out = torch.full((sum(counts), layer.heads, layer.value_dim), torch.nan, dtype=layer.dtype)
        _C.PassRows([begin for _, begin, _ in rows], counts, [self.pages[i] for i, *_ in rows]).attend(
            _place(query),
            _place(key),
            _place(value),
            self.k.data_ptr(),
            self.v.data_ptr(),
            out.data_ptr(),
            (layer.heads, layer.kv_heads, layer.head_dim, layer.value_dim, self.k.shape[1]),
            is_bf16=layer.dtype == torch.bfloat16,
            scale=layer.head_dim**-0.5,
            softcap=layer.softcap,
            window=layer.window,
            sinks=0 if data.sinks is None else data.sinks.data_ptr(),
            threads=threads,
            start=openmp_team()[1] if start is None else start,
            isa=isa,
        )
        return list(out.split(counts))


def prefill_and_pass(layer: Layer, data: Data, **options: Any) -> list[Tensor]:
    """All tokens before the pass in one, then the pass."""
    cache = Cache(layer)
    cache.attend(data, [(i, 0, begin) for i, (begin, _) in enumerate(layer.lengths) if begin], **options)
    return cache.attend(data, [(i, begin, begin + n) for i, (begin, n) in enumerate(layer.lengths)], **options)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_equation(name: str, dtype: torch.dtype, isa: str) -> None:
    layer = replace(CASES[name], dtype=dtype)
    data = random_data(layer)
    for found, whole in zip(prefill_and_pass(layer, data, isa=isa), expected(layer, data), strict=True):
        tolerance = TOLERANCES[dtype]
        torch.testing.assert_close(found.double(), whole[-len(found) :], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", ["plain", "many heads", "soft cap", "odd sizes"])
def test_a_rows_bits_are_those_of_a_token_by_itself(name: str, dtype: torch.dtype, isa: str) -> None:
    """Token by token, one sequence after the other, against whole blocks of all."""
    layer = replace(CASES[name], dtype=dtype)
    data = random_data(layer)
    together, cache = prefill_and_pass(layer, data, isa=isa), Cache(layer, seed=1)
    for i, (begin, n) in enumerate(layer.lengths):
        alone = [cache.attend(data, [(i, t, t + 1)], isa=isa)[0] for t in range(begin + n)]
        assert torch.equal(torch.cat(alone[begin:]), together[i])


def test_threads_change_nothing() -> None:
    """Uses torch's own team, with enough work for it."""
    assert openmp_team()[1], "torch has no OpenMP here"
    layer = Layer(heads=16, kv_heads=4, head_dim=64, value_dim=64, lengths=((600, 40), (200, 8)))
    data = random_data(layer)
    for one, several in zip(prefill_and_pass(layer, data), prefill_and_pass(layer, data, threads=3), strict=True):
        assert torch.equal(one, several)


def test_the_team_is_asked_where_there_is_enough_work() -> None:
    """Once for storing and once for attending, with all threads; the last one to start finds no work left."""
    asked: list[int] = []

    @ctypes.CFUNCTYPE(None, WORK, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    def start(work: Any, data: int, num_threads: int, _: int) -> None:
        asked.append(num_threads)
        for _thread in range(num_threads):
            work(data)

    address = ctypes.cast(start, ctypes.c_void_p).value
    for layer, expected_calls in ((CASES["many heads"], [3, 3]), (Layer(lengths=((0, 5),)), [])):
        data, rows = random_data(layer), [(i, 0, sum(length)) for i, length in enumerate(layer.lengths)]
        alone = Cache(layer).attend(data, rows)
        asked.clear()
        found = Cache(layer).attend(data, rows, threads=3, start=address)
        assert asked == expected_calls
        assert all(map(torch.equal, found, alone))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 60.0, 1e4])
def test_large_scores_do_not_overflow(scale: float) -> None:
    layer = Layer(has_sinks=True)
    data = random_data(layer)
    scaled = Data([(query * scale, key, value) for query, key, value in data.sequences], data.sinks)
    for found, whole in zip(prefill_and_pass(layer, scaled), expected(layer, scaled), strict=True):
        torch.testing.assert_close(found.double(), whole[-len(found) :], atol=1e-3, rtol=1e-3)


def test_nan_goes_to_those_who_see_it() -> None:
    layer = Layer(lengths=((40, 1), (40, 1)))
    data = random_data(layer)
    data.sequences[0][1][3] = torch.nan
    first, second = prefill_and_pass(layer, data)
    assert first.isnan().all()
    assert second.isfinite().all()


@pytest.mark.parametrize("isa", ISAS)
def test_nan_does_not_reach_a_token_before_it(isa: str) -> None:
    """A draft that will be rejected may be anything."""
    layer = Layer(heads=2, lengths=((40, 8),))
    data = random_data(layer)
    before = prefill_and_pass(layer, data, isa=isa)[0]
    for x in data.sequences[0]:
        x[44:] = torch.nan
    after = prefill_and_pass(layer, data, isa=isa)[0]
    assert torch.equal(after[:4], before[:4])
    assert after[4:].isnan().all()


@pytest.mark.parametrize(
    ("begins", "counts", "pages"),
    [
        ([0], [1], [[]]), ([32], [1], [[0]]), ([0], [0], [[0]]), ([-1], [1], [[0]]), ([0, 0], [1], [[0]]),
        ([0], [1], [[-1]]), ([2**63 - 1], [1], [[0]]), ([0], [2**63 - 1], [[0]]),
    ],
)  # fmt: skip
def test_rows_must_fit(begins: list[int], counts: list[int], pages: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="expected"):
        _C.PassRows(begins, counts, pages)


@pytest.mark.parametrize(
    ("page", "shape", "window", "message"),
    [
        (10**8, (2, 1, 8, 8, 4), 0, "a cache that has each page, found 4"),
        (4, (2, 1, 8, 8, 4), 0, "a cache that has each page, found 4"),
        (0, (2, 0, 8, 8, 4), 0, "at least one KV head, found 0"),
        (0, (3, 2, 8, 8, 4), 0, "a multiple of num_kv_heads heads, found 3"),
        (0, (0, 1, 8, 8, 4), 0, "a multiple of num_kv_heads heads, found 0"),
        (0, (2, 1, 0, 8, 4), 0, "a head_dim, found 0"),
        (0, (2, 1, 8, -1, 4), 0, "a value_dim, found -1"),
        (0, (2, 1, 8, 8, 4), -1, "a window, or 0 for none, found -1"),
    ],
)
def test_a_shape_that_would_read_elsewhere_is_refused(
    page: int, shape: tuple[int, int, int, int, int], window: int, message: str
) -> None:
    """Before anything is read: the addresses are none."""
    rows = _C.PassRows([0], [1], [[page]])
    nowhere = (0, 0, 0)
    with pytest.raises(ValueError, match=message):
        rows.attend(
            nowhere, nowhere, nowhere, 0, 0, 0, shape,
            is_bf16=False, scale=1.0, softcap=0.0, window=window, sinks=0, threads=1, start=0,
        )  # fmt: skip
