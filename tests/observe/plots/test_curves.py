# SPDX-License-Identifier: Apache-2.0
"""The picture: what is in it, and that it is the same each time."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from dflash_trt.observe.plots.curves import NARROW, STYLES, WIDE, Plot, PlotCurve, PlotPoint, draw, svg


def plot(*rates: tuple[float, float], beaten: int = -1) -> Plot:
    points = tuple(
        PlotPoint(user_rate=user, gpu_rate=gpu, label=f"c{index}", is_best=index != beaten)
        for index, (user, gpu) in enumerate(rates)
    )
    curve = PlotCurve("DFlash <&>", STYLES["dflash"], points)
    return Plot(title="a $title$", detail="a detail", per="GPU", labels="concurrency", curves=(curve,))


MANY = ((300.0, 10.0), (200.0, 400.0), (100.0, 2000.0))


@pytest.mark.parametrize("size", [WIDE, NARROW])
def test_the_same_plot_gives_the_same_bytes_without_a_date(size: tuple[float, float]) -> None:
    text = svg(plot(*MANY), size)
    assert text == svg(plot(*MANY), size)
    assert "dc:date" not in text


def test_texts_can_be_read_and_searched() -> None:
    root = ElementTree.fromstring(svg(plot(*MANY)))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"DFlash <&>", "c0", "c1", "c2", "tokens/s per GPU, logarithmic", "1,000"} <= set(texts)


def test_the_line_goes_through_the_best_points_as_rates_are_read_between_them() -> None:
    """Halfway between 200 and 100 tokens/s/user lie (400 + 2000) / 2 tokens/s/GPU, not their geometric mean."""
    axes = draw(plot(*MANY, (150.0, 20.0), beaten=3)).axes[0]
    line = axes.get_lines()[0].get_xydata().tolist()
    assert [150.0, 1200.0] in line
    assert [150.0, 20.0] not in line
    hollow = axes.get_lines()[3]
    assert (hollow.get_xydata().tolist(), hollow.get_markerfacecolor()) == ([[150.0, 20.0]], "white")


def test_labels_that_would_cover_each_other_are_left_out() -> None:
    crowded = plot((300.0, 10.0), (200.0, 100.0), (199.0, 101.0), (198.0, 102.0), (100.0, 2000.0))
    labels = [text.get_text() for text in draw(crowded).axes[0].texts]
    assert {"c0", "c4"} <= set(labels)
    assert len({"c1", "c2", "c3"} & set(labels)) <= 1


def test_a_single_point_and_rates_that_are_alike_have_numbers_on_the_axis() -> None:
    for drawn in (draw(plot((55.0, 55.0))), draw(plot((60.0, 100.0), (50.0, 130.0)))):
        low, high = drawn.axes[0].get_ylim()
        assert sum(low <= tick <= high for tick in drawn.axes[0].get_yticks()) >= 2
