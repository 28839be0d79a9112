# SPDX-License-Identifier: Apache-2.0
"""Attention of our plans is priced as the kernel was measured: on its own GPU exactly, on another one nearly."""

from __future__ import annotations

import pytest

from dflash_trt.deploy.gpus import known_gpu
from dflash_trt.observe.estimate.kernel_times import attention_tables, kernel_seconds
from dflash_trt.observe.estimate.step import StepLoad
from tests.observe.estimate.systems import ENGINE, MOE, model_of

H200, H100 = known_gpu("h200").memory_bandwidth, known_gpu("h100").memory_bandwidth


def test_measured_cells_are_what_was_measured() -> None:
    for table in attention_tables().tables:
        heads = (table.num_key_value_heads, table.head_dim, table.cache_bytes)
        for requests, rows, microseconds in table.microseconds:
            assert kernel_seconds(*heads, requests, rows, H200) == pytest.approx(microseconds * 1e-6)


@pytest.mark.parametrize(
    ("requests", "rows", "microseconds"), [(1, 512, 22), (16, 4096, 72), (64, 4096, 239), (16, 32768, 395)]
)
def test_another_gpu_is_scaled_by_its_memory(requests: int, rows: int, microseconds: float) -> None:
    """An H100's times, which no constant was fitted to: benchmarks/RESULTS.md, below the H200's table."""
    assert kernel_seconds(8, 64, 2, requests, rows, H100) == pytest.approx(microseconds * 1e-6, rel=0.15)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("cache_bytes", [1, 2])
@pytest.mark.parametrize("heads", [1, 2, 8])
def test_more_work_takes_no_less(heads: int, cache_bytes: int, head_dim: int) -> None:
    """Tables are noisy by two microseconds; beyond them a call reads all its rows, at most at a copy's rate."""
    for requests, rows in ((1, 100), (1, 5000), (3, 700), (16, 40000), (100, 4096), (200, 131072)):
        now = kernel_seconds(heads, head_dim, cache_bytes, requests, rows, H200)
        assert now > 20e-6
        for more in ((requests * 4, rows), (requests, rows * 4)):
            assert kernel_seconds(heads, head_dim, cache_bytes, *more, H200) > now - 2.5e-6
    rows, read = 131072, 2 * heads * head_dim * cache_bytes * 200 * 131072
    assert kernel_seconds(heads, head_dim, cache_bytes, 200, rows, H200) > 0.9 * read / 4.8e12


def test_only_our_plans_run_our_kernel() -> None:
    """Natively the runtime's kernel has a floor of 10 us; a pass of our plans has ours in each of its layers."""
    load = StepLoad(batch=1, num_draft_tokens=9, context=512)
    for name, low, high in ((ENGINE, 21e-6, 30e-6), (MOE, 10e-6, 12e-6)):
        model = model_of(name)
        seconds = {term.name: term.seconds for term in model.price("dflash", load).terms}
        assert model.system.draft is not None
        assert low < seconds["attention, context"] / model.system.draft.num_layers < high
