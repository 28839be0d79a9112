# SPDX-License-Identifier: Apache-2.0
"""Which points count, and what lies between them."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from dflash_trt.observe.plots.curves import MORE, STYLES, frontier, rate_between, styles


class Point(NamedTuple):
    user_rate: float
    gpu_rate: float


def test_a_point_that_another_beats_or_equals_is_no_part_of_the_frontier() -> None:
    points = [Point(50, 30), Point(100, 10), Point(90, 5), Point(20, 25), Point(100, 10), Point(60, 30)]
    assert frontier(points) == [Point(100, 10), Point(60, 30)]


@pytest.mark.parametrize(
    ("user_rate", "expected"), [(100, 10), (75, 20), (50, 30), (20, 60), (100.1, None), (19.9, None), (44, 36)]
)
def test_between_points_linearly_and_beyond_them_nothing(user_rate: float, expected: float | None) -> None:
    assert rate_between([Point(100, 10), Point(50, 30), Point(20, 60)], user_rate) == expected


def test_a_single_point_is_reached_at_its_own_speed_only() -> None:
    assert [rate_between([Point(100, 10)], rate) for rate in (99.0, 100.0, 101.0)] == [None, 10, None]
    assert rate_between([], 1.0) is None


def test_methods_that_nobody_knows_get_styles_of_their_own() -> None:
    assert styles(["dflash", "ngram", "none", "mtp"]) == [STYLES["dflash"], MORE[0], STYLES["none"], MORE[1]]
    many = styles([f"m{index}" for index in range(20)])
    assert len(many) == 20
    assert len({(style.color, style.marker) for style in many[:7]}) == 7
