# SPDX-License-Identifier: Apache-2.0
"""Taps that wait: each slot gets the committed rows of its own segments, in order."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
import torch

from dflash_trt.runtime import model_runner
from dflash_trt.runtime.model_runner import NO_SLOT, PendingTaps


@pytest.mark.parametrize("seed", range(40))
def test_each_slot_gets_its_committed_rows_in_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "MAX_PASSES", 2 + seed % 5)
    rng, pending, number = random.Random(seed), PendingTaps(), 0
    expected: defaultdict[int, list[int]] = defaultdict(list)
    for _ in range(rng.randrange(1, 60)):
        owners: list[int] = []
        rows: list[int] = []
        for slot in sorted(rng.sample(range(6), rng.randrange(1, 6))):
            committed, rejected = rng.randrange(4), rng.randrange(4) * rng.randrange(2)
            expected[slot] += range(number, number + committed)
            rows += range(number, number + committed + rejected)
            number += committed + rejected
            owners += [slot] * committed + [NO_SLOT] * rejected
        column = torch.tensor(rows, dtype=torch.float32)[None, :, None]  # as a target gives them
        pending.add([column, -column], owners)
        if rng.random() < 0.2:
            pending.drop(slot := rng.randrange(6))
            expected.pop(slot, None)
        if rng.random() < 0.2:
            pending.compact()
            assert pending.num_bytes == 8 * sum(map(len, expected.values()))
        if rng.random() < 0.1:
            check(pending, expected)
            expected.clear()
    check(pending, expected)
    assert pending.take() == ([], [], None)


def test_rows_that_nobody_waits_for_take_no_more_room() -> None:
    pending, row = PendingTaps(), torch.zeros(64, 2)
    for _ in range(300):
        pending.add([row], [0] * len(row))
        pending.drop(0)
    assert pending.num_bytes < 100 * row.nbytes


def check(pending: PendingTaps, expected: defaultdict[int, list[int]]) -> None:
    slots, counts, taps = pending.take()
    assert pending.num_bytes == 0
    assert taps is None or torch.equal(taps[:, 0], -taps[:, 1])
    rows = [] if taps is None else taps[:, 0].int().tolist()
    found = {slot: [rows.pop(0) for _ in range(count)] for slot, count in zip(slots, counts, strict=True)}
    assert rows == []
    assert found == {slot: numbers for slot, numbers in expected.items() if numbers}
