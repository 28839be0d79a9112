# SPDX-License-Identifier: Apache-2.0
"""Batch and row buckets: every size fits one, and padding stays within the factor that they rise by."""

from __future__ import annotations

import pytest

from dflash_trt.engine.plans.plan import PlanOptions, Range, graph_batch_sizes, profiles, row_buckets


@pytest.mark.parametrize(
    ("largest", "buckets"),
    [
        (1, [1]),
        (2, [1, 2]),
        (6, [1, 2, 4, 6]),
        (64, [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]),
        (72, [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 72]),  # not as 128
        (300, [1, 2, 4, *range(8, 129, 8), 192, 256, 300]),
    ],
)
def test_batches_are_those_of_the_cuda_graphs(largest: int, buckets: list[int]) -> None:
    assert graph_batch_sizes(largest) == buckets


@pytest.mark.parametrize(
    ("largest", "buckets"),
    [
        (1, [1]),
        (16, [16]),
        (17, [16, 17]),
        (256, [16, 64, 256]),
        (257, [16, 64, 256, 257]),
        (512, [16, 64, 256, 512]),
        (2048, [16, 64, 256, 512, 1024, 2048]),
    ],
)
def test_row_buckets(largest: int, buckets: list[int]) -> None:
    assert row_buckets(largest) == buckets


def test_profiles_of_both_graphs() -> None:
    options = PlanOptions(max_batch_size=2, max_seq_len=100, max_num_tokens=16)
    assert profiles("context", options) == ({"T": Range(min=16, opt=16, max=16)},)
    first, second = profiles("draft", options)
    assert first["B"] == Range(min=1, opt=1, max=1)
    assert second == {
        "B": Range(min=2, opt=2, max=2),
        "slots": Range(min=1, opt=1, max=3),
        "pages": Range(min=1, opt=1, max=8192),
    }
