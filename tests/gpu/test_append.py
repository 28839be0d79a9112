# SPDX-License-Identifier: Apache-2.0
"""The append kernel on a GPU, against torch's index_put."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dflash_trt import _C
from tests.gpu.launches import bits
from tests.plugins.tensors import UNTOUCHED, Guarded
from tests.plugins.test_append import CASES, FAR, Case, by_torch, draw

pytestmark = pytest.mark.gpu


def append(case: Case, caches: list[torch.Tensor]) -> None:
    """On torch's current stream."""
    tensors = [tensor.cuda() for tensor in vars(draw(case)).values()]
    _C.kv_injection_append(*tensors, *caches, stream=torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_writes_what_torch_writes_and_nothing_else(case: Case) -> None:
    caches = [Guarded(case.cache_shape, case.dtype, "cuda") for _ in "kv"]
    append(case, [cache.tensor for cache in caches])
    for cache, expected in zip(caches, by_torch(case, draw(case)), strict=True):
        cache.assert_guarded()
        assert torch.equal(bits(cache.tensor).cpu().view(expected.shape), expected)


def test_a_captured_append_takes_rows_and_places_from_their_tensors() -> None:
    case = CASES[0]
    tensors = [tensor.cuda() for tensor in vars(draw(case)).values()]
    caches = [torch.zeros(case.cache_shape, dtype=case.dtype, device="cuda") for _ in "kv"]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _C.kv_injection_append(*tensors, *caches, stream=torch.cuda.current_stream().cuda_stream)
    assert not any(cache.any() for cache in caches)  # captured, not run
    other = replace(case, page_ids=case.page_ids[::-1])
    for tensor, value in zip(tensors, vars(draw(other)).values(), strict=True):
        tensor.copy_(value)
    graph.replay()
    pages, offsets = (list(values) for values in (other.page_ids, other.offsets))
    for cache, rows in zip(caches, tensors[0].unbind(1), strict=True):
        assert torch.equal(cache[pages, :, offsets], rows)


def test_a_cache_beyond_4_gib() -> None:
    size = 2 * FAR.pages * FAR.L * FAR.R * FAR.G * FAR.D
    free, needed = torch.cuda.mem_get_info()[0], 2 * size + 2**30
    if free < needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of free GPU memory, found {free / 2**30:.0f}")
    caches = [torch.full((size,), UNTOUCHED, dtype=torch.uint8, device="cuda") for _ in "kv"]
    append(FAR, [cache.view(FAR.dtype).view(FAR.cache_shape) for cache in caches])
    tensors = draw(FAR)
    for cache, rows in zip(caches, tensors.kv.unbind(1), strict=True):
        placed = cache.view(FAR.dtype).view(FAR.cache_shape)
        assert torch.equal(placed[5, :, FAR.offsets[0] :].cpu(), rows.transpose(0, 1))
        placed[5, :, FAR.offsets[0] :].view(torch.int16).fill_(-1)
        assert all((part == UNTOUCHED).all() for part in cache.split(2**30))
