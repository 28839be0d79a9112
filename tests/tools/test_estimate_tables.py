# SPDX-License-Identifier: Apache-2.0
"""The tables of estimates in benchmarks/RESULTS.md are in step with the code, and say what was held out."""

from __future__ import annotations

from dflash_trt.observe.estimate.constants import constants, rates
from tools.estimate_tables import AIM, PAGE, error_of, predict, replace_tables
from tools.published_points import published_points


def test_page_is_in_step_with_the_code() -> None:
    """After a wanted change: python -m tools.estimate_tables"""
    page = PAGE.read_text()
    assert replace_tables(page) == page


def test_a_third_of_the_points_is_held_out() -> None:
    uses = [point.use for point in published_points().points]
    assert len(uses) >= 30
    assert uses.count("held out") * 3 >= len(uses)


def test_constants_were_fitted_to_nothing_but_calibration_points() -> None:
    sources = " ".join(constant.source for _, constant in constants())
    for point in published_points().points:
        assert (f"'{point.id}'" in sources) == (point.use == "calibration"), point.id


def test_large_errors_name_what_is_missing() -> None:
    for point in published_points().points:
        error = error_of(point, predict(point, rates(point.gpu, point.runtime)))
        assert (abs(error) > AIM) == bool(point.missing), (point.id, error)


def test_identifiers_are_unique() -> None:
    names = [point.id for point in published_points().points]
    assert len(set(names)) == len(names)
