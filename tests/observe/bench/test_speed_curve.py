# SPDX-License-Identifier: Apache-2.0
"""Factors at equal speed, against figures worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from dflash_trt.observe.bench.records import BenchPoint, Distribution, RequestRow
from dflash_trt.observe.bench.run_directory import MethodSeries, Workload
from dflash_trt.observe.bench.speed_curve import at_speeds, curve, ends, speeds
from tests.observe.bench import samples


def series(name: str, points: Sequence[BenchPoint], num_gpus: int | None = None) -> MethodSeries:
    return MethodSeries(name, samples.run(name, num_gpus=num_gpus), samples.method(name), tuple(points))


def workload(*series: MethodSeries) -> Workload:
    return Workload("ours", None, series)


PLAIN = series("none", [samples.point("none", 1, 100, 80), samples.point("none", 4, 60, 200)])
DFLASH = series("dflash", [samples.point("dflash", 1, 300, 240), samples.point("dflash", 4, 80, 400)])


def test_the_factor_is_read_between_the_points_of_both_curves() -> None:
    """At 80: plain is halfway from 80 to 200, DFlash at its slowest point."""
    (found,) = at_speeds(workload(PLAIN, DFLASH), [80], seed=7)
    assert found.gpu_rates == pytest.approx({"none": 140, "dflash": 400})
    assert found.factors["dflash"].value == pytest.approx(400 / 140)
    assert found.factors["dflash"].why is None


def test_a_curve_that_does_not_reach_a_speed_has_no_factor_and_says_where_it_ends() -> None:
    fast, slow = at_speeds(workload(PLAIN, DFLASH), [150, 70], seed=7)
    assert fast.gpu_rates == {"none": None, "dflash": pytest.approx(240 + 160 * (150 / 220))}
    assert fast.factors["dflash"].value is None
    assert (
        fast.factors["dflash"].why == "plain does not reach it: its fastest point is 100 tokens/s/user at concurrency 1"
    )
    assert slow.gpu_rates == {"none": pytest.approx(170), "dflash": None}
    assert (
        slow.factors["dflash"].why
        == "DFlash was not measured there: its slowest point is 80 tokens/s/user at concurrency 4"
    )
    far = series("dflash", [samples.point("dflash", 1, 300, 240), samples.point("dflash", 4, 200, 400)])
    (between,) = at_speeds(workload(PLAIN, far), [150], seed=7)
    assert between.factors["dflash"].why == (
        "DFlash was not measured there: its slowest point is 200 tokens/s/user at concurrency 4;"
        " plain does not reach it: its fastest point is 100 tokens/s/user at concurrency 1"
    )


def test_single_points_meet_only_where_they_are() -> None:
    one, two = (
        series("none", [samples.point("none", 1, 100, 80)]),
        series("dflash", [samples.point("dflash", 2, 100, 160)]),
    )
    at, beside = at_speeds(workload(one, two), [100, 90], seed=7)
    assert at.factors["dflash"].value == pytest.approx(2)
    assert beside.factors["dflash"].value is None
    assert ends(curve(one, 1), "GPU") == "plain: one point, 100 tokens/s/user, 80.0 tokens/s/GPU (concurrency 1)"


def test_without_plain_decoding_there_are_rates_and_no_factors() -> None:
    (found,) = at_speeds(workload(DFLASH), [80], seed=7)
    assert found.gpu_rates == {"dflash": pytest.approx(400)}
    assert found.factors["dflash"].why == "plain decoding was not measured"


def test_a_point_that_another_beats_is_not_read_between() -> None:
    """Concurrency 8 is slower for users and in all than 4; ties count once."""
    points = [*PLAIN.points, samples.point("none", 8, 50, 150), samples.point("none", 16, 60, 200)]
    found = curve(series("none", points), 1)
    assert [p.concurrency for p in found.front] == [1, 4]
    assert [p.concurrency for p in found.points] == [1, 4, 8, 16]


def test_throughput_is_per_gpu_where_every_run_tells_its_gpus() -> None:
    both = workload(series("none", PLAIN.points, 8), series("dflash", DFLASH.points, 4))
    assert at_speeds(both, [80], seed=7)[0].gpu_rates == pytest.approx({"none": 140 / 8, "dflash": 400 / 4})
    one = workload(series("none", PLAIN.points), series("dflash", DFLASH.points, 4))
    assert at_speeds(one, [80], seed=7)[0].gpu_rates == pytest.approx({"none": 140, "dflash": 400})


def test_what_did_not_complete_is_no_point() -> None:
    broken = samples.point("none", 8, 30, 300, rows=(), failed=3)
    assert curve(series("none", [*PLAIN.points, broken]), 1) == curve(PLAIN, 1)


def test_speeds_are_round_and_hold_the_announcements_where_it_is_reached() -> None:
    """60 to 300 in parts of 60, and 80 to 100, where both are, in parts of 10."""
    assert speeds([curve(PLAIN, 1), curve(DFLASH, 1)]) == (60, 80, 90, 100, 120, 180, 240, 300)
    fast = series("dflash", [samples.point("dflash", 1, 600, 240), samples.point("dflash", 4, 100, 400)])
    assert speeds([curve(fast, 1)]) == (150, 250, 300, 450, 500, 550, 600)
    assert speeds([curve(series("none", []), 1)]) == ()


def test_one_answer_that_was_read_all_at_once_moves_no_point() -> None:
    """A mean would say 1090 tokens/s/user."""
    rates = Distribution(mean=1090, p50=100, p90=9000, p99=10000)
    odd = msgspec.structs.replace(PLAIN.points[0], user_tokens_per_second=rates)
    assert curve(series("none", [odd]), 1).points[0].user_rate == 100


def spread(name: str, *rates: float, most: int) -> MethodSeries:
    """Points at concurrency 1 and `most`, whose requests of 11 tokens see those speeds, and that share of them."""
    points = []
    for c in (1, most):
        rows = tuple(RequestRow(input_tokens=1, output_tokens=11, ttft_seconds=0.0, seconds=10 * c / r) for r in rates)
        mean = sum(rates) / len(rates)
        points.append(samples.point(name, c, mean / c, 0.8 * mean * (1 + c), rows=rows))
    return series(name, points)


def test_intervals_hold_the_factor_and_are_the_same_for_a_seed() -> None:
    both = workload(spread("none", 80, 95, 105, 120, most=4), spread("dflash", 200, 280, 320, 400, most=8))
    (found,) = at_speeds(both, [50], seed=7)
    factor = found.factors["dflash"]
    assert factor.value is not None
    assert factor.interval is not None
    low, high = factor.interval
    assert low < factor.value < high
    assert at_speeds(both, [50], seed=7) == (found,)
    assert at_speeds(both, [50], seed=8)[0].factors["dflash"].interval != factor.interval


def test_requests_that_are_all_alike_leave_no_doubt() -> None:
    (found,) = at_speeds(workload(PLAIN, DFLASH), [90], seed=7)
    assert found.factors["dflash"].interval == pytest.approx((found.factors["dflash"].value,) * 2)


def test_at_the_end_of_a_curve_there_is_a_factor_without_an_interval() -> None:
    """In some draws the curve ends before."""
    (found,) = at_speeds(workload(spread("none", 80, 120, most=4), DFLASH), [100], seed=7)
    assert found.factors["dflash"].value is not None
    assert found.factors["dflash"].interval is None
