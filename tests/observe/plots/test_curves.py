# SPDX-License-Identifier: Apache-2.0
"""The picture: its points, its contents, and that it is the same each time."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from typing import NamedTuple

import pytest

from dflash_trt.observe.plots.curves import NARROW, Plot, PlotCurve, PlotPoint, draw, svg
from dflash_trt.observe.plots.frontier import frontier, rate_between
from dflash_trt.observe.plots.method_styles import MORE, STYLES, styles


class Point(NamedTuple):
    user_rate: float
    gpu_rate: float


def test_a_point_that_another_beats_or_equals_is_no_part_of_the_frontier() -> None:
    points = [Point(50, 30), Point(100, 10), Point(90, 5), Point(20, 25), Point(100, 10), Point(60, 30)]
    assert frontier(points) == [Point(100, 10), Point(60, 30)]
    assert [rate_between([Point(100, 10)], rate) for rate in (99.0, 100.0, 101.0)] == [None, 10, None]
    assert rate_between([], 1.0) is None


@pytest.mark.parametrize(
    ("user_rate", "expected"), [(100, 10), (75, 20), (50, 30), (20, 60), (100.1, None), (19.9, None), (44, 36)]
)
def test_between_points_linearly_and_beyond_them_nothing(user_rate: float, expected: float | None) -> None:
    assert rate_between([Point(100, 10), Point(50, 30), Point(20, 60)], user_rate) == expected


def test_methods_that_nobody_knows_get_styles_of_their_own() -> None:
    assert styles(["dflash", "medusa", "none", "pard"]) == [STYLES["dflash"], MORE[0], STYLES["none"], MORE[1]]
    many = styles([f"m{index}" for index in range(20)])
    assert len(many) == 20
    assert len({(style.color, style.marker) for style in many[:7]}) == 7


def plot(*rates: tuple[float, float], beaten: int = -1) -> Plot:
    points = tuple(
        PlotPoint(user_rate=user, gpu_rate=gpu, label=f"c{index}", is_best=index != beaten)
        for index, (user, gpu) in enumerate(rates)
    )
    curve = PlotCurve("DFlash <&>", STYLES["dflash"], points)
    return Plot(title="a $title$", detail="a detail", per="GPU", labels="concurrency", curves=(curve,))


MANY = ((300.0, 10.0), (200.0, 400.0), (100.0, 2000.0))


def test_it_is_the_same_each_time_and_its_texts_can_be_read_and_searched() -> None:
    text = svg(plot(*MANY), NARROW)
    assert text == svg(plot(*MANY), NARROW)
    assert "dc:date" not in text
    texts = [element.text for element in ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}text")]
    assert {"DFlash <&>", "c0", "c1", "c2", "tokens/s per GPU, logarithmic", "1,000"} <= set(texts)
    crowded = plot((300.0, 10.0), (200.0, 100.0), (199.0, 101.0), (198.0, 102.0), (100.0, 2000.0))
    labels = [text.get_text() for text in draw(crowded).axes[0].texts]
    assert {"c0", "c4"} <= set(labels)
    assert len({"c1", "c2", "c3"} & set(labels)) <= 1


def test_the_line_goes_through_the_best_points_as_rates_are_read_between_them() -> None:
    """Halfway between 200 and 100 tokens/s/user lie (400 + 2000) / 2 tokens/s/GPU, not their geometric mean."""
    axes = draw(plot(*MANY, (150.0, 20.0), beaten=3)).axes[0]
    line = axes.get_lines()[0].get_xydata().tolist()
    assert [150.0, 1200.0] in line
    assert [150.0, 20.0] not in line
    hollow = axes.get_lines()[3]
    assert (hollow.get_xydata().tolist(), hollow.get_markerfacecolor()) == ([[150.0, 20.0]], "white")


def test_a_single_point_and_rates_that_are_alike_have_numbers_on_the_axis() -> None:
    for drawn in (draw(plot((55.0, 55.0))), draw(plot((60.0, 100.0), (50.0, 130.0)))):
        low, high = drawn.axes[0].get_ylim()
        assert sum(low <= tick <= high for tick in drawn.axes[0].get_yticks()) >= 2
