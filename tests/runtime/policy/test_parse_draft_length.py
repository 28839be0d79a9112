# SPDX-License-Identifier: Apache-2.0
"""Draft lengths that a user may write, and the policies that they name."""

from __future__ import annotations

import pytest

from dflash_trt.errors import RequestError
from dflash_trt.runtime.policy.auto_length import AutoLength
from dflash_trt.runtime.policy.draft_length import FixedLength, LengthByBatch
from dflash_trt.runtime.policy.parse_draft_length import parse_draft_length

K = 7
BATCH_SIZES = (1, 2, 7, 8, 31, 32, 1000)


@pytest.mark.parametrize("length", [0, 1, K])
def test_a_number_is_the_length_at_every_batch_size(length: int) -> None:
    policy = parse_draft_length(str(length), K)
    assert isinstance(policy, FixedLength)
    assert [policy.choose(batch_size) for batch_size in BATCH_SIZES] == [length] * len(BATCH_SIZES)


@pytest.mark.parametrize("text", ["1:7,8:3,32:0", "32:0,1:7,8:3"])
def test_a_schedule_holds_from_its_batch_sizes_on(text: str) -> None:
    policy = parse_draft_length(text, K)
    assert isinstance(policy, LengthByBatch)
    assert [policy.choose(batch_size) for batch_size in BATCH_SIZES] == [7, 7, 7, 3, 3, 0, 0]
    assert parse_draft_length("1:4", K).choose(100) == 4, "one entry is a schedule, too"


def test_a_request_has_a_length_of_its_own_under_auto_alone() -> None:
    auto, fixed = parse_draft_length("auto", 7), parse_draft_length(3, 7)
    assert isinstance(auto, AutoLength)
    assert auto.lengths([None, 0, 2, 7]) == [7, 0, 2, 7]
    assert fixed.lengths([None, 0, 2, 7]) == [3, 0, 2, 3]
    assert auto.lengths([]) == fixed.lengths([]) == []


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "-1", "8", "1.5", "7,3", "all"),
        *("2:7", "0:7,1:3", "1:7,8:8", "1:7,8:-1", "1:7,1:3", "1:7:3", "1:7,", "1:", ":7", "1:7,8", "x:3"),
        *("adaptive", "auto:1", "auto,1:7", "Auto"),
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(RequestError) as refusal:
        parse_draft_length(text, K)
    assert str(refusal.value) == (
        f"draft length: expected 0 to 7, a schedule by batch size that begins at 1 (1:7,8:3) or auto, found {text!r}"
    )
