# SPDX-License-Identifier: Apache-2.0
"""Methods at equal concurrency: the sweep, categories (the announcement's Table 1), data sets (Tables 2, 3, paper)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import msgspec

from dflash_trt.observe.bench.bootstrap import interval, point_rates, request_rate, request_rates
from dflash_trt.observe.bench.speed_curve import Factor, gpus_of
from dflash_trt.observe.bench.workloads import BASELINE, Sample, Series, Workload, picked, sample


class Measured(msgspec.Struct, frozen=True):
    """One method in one row of a table."""

    rate: float | None
    """Tokens a second: of all users in a sweep, of one request in the other tables."""
    speedup: Factor | None
    """Over plain decoding; None for itself."""
    tau_of_drafting_passes: float | None = None
    user_rate: float | None = None
    lost: int | None = None
    """Requests that failed or timed out, where they are known by row."""


class Line(msgspec.Struct, frozen=True):
    """A row of a table: a concurrency, a category or a data set."""

    name: str
    concurrency: int
    by_method: dict[str, Measured]


class Average(msgspec.Struct, frozen=True):
    """The mean of the rows' speed-ups and taus, over the rows that every method has."""

    num_rows: int
    speedups: dict[str, float]
    taus_of_drafting_passes: dict[str, float]


def sweep(workload: Workload, seed: int) -> tuple[Line, ...]:
    """Every concurrency that some method was measured at; speed-ups of throughput where plain decoding was, too."""
    lines = []
    for concurrency in sorted({p.concurrency for one in workload.series for p in one.points}):
        by_method = {}
        for series in workload.series:
            point = series.at(concurrency)
            if point is not None:
                user = point.user_tokens_per_second
                by_method[series.name] = Measured(
                    point.output_tokens_per_second / gpus_of(series, workload),
                    _sweep_speedup(workload, series, concurrency, seed), point.acceptance.tau_of_drafting_passes,
                    user.p50 if user else None, point.requests.failed + point.requests.timed_out,
                )  # fmt: skip
        if by_method:
            lines.append(Line(str(concurrency), concurrency, by_method))
    return tuple(lines)


def _sweep_speedup(workload: Workload, series: Series, concurrency: int, seed: int) -> Factor | None:
    if series.name == BASELINE:
        return None
    baseline, point = workload.baseline(), series.at(concurrency)
    plain = baseline.at(concurrency) if baseline else None
    if baseline is None or plain is None or point is None:
        return Factor(None, why=f"plain decoding was not measured at concurrency {concurrency}")
    rates = [
        one.output_tokens_per_second / gpus_of(of, workload) for one, of in ((point, series), (plain, baseline))
    ]  # fmt: skip
    if not rates[1]:
        return Factor(None, why="plain decoding brought no token")
    drawn = [
        point_rates(one, seed, f"{of.name}/{one.category}/{concurrency}")[1] / gpus_of(of, workload)
        for one, of in ((point, series), (plain, baseline))
    ]
    return Factor(rates[0] / rates[1], interval(drawn[0] / drawn[1]))


def matched_concurrencies(workload: Workload) -> tuple[int, ...]:
    """Those at which every method of the workload has a point."""
    sets = [{p.concurrency for p in one.points if p.requests.completed} for one in workload.series]
    return tuple(sorted(set.intersection(*sets))) if sets else ()


def category_lines(whole: Workload | None, own: Sequence[Workload], concurrency: int, seed: int) -> tuple[Line, ...]:
    """A row per category: from points of its own, or else from the requests of it among those on all prompts."""
    lines = [_line(one.category or "", one.series, concurrency, seed, sample) for one in own]
    if not own and whole is not None:
        found = {row.category for one in whole.series for p in one.points for row in p.rows if row.category is not None}
        for category in sorted(found):
            lines.append(_line(category, whole.series, concurrency, seed, partial(picked, category)))
    return tuple(line for line in lines if line.by_method)


def data_set_line(workload: Workload, seed: int) -> Line | None:
    """A row of Tables 2 and 3: the lowest concurrency that every method has; None where they share none."""
    matched = matched_concurrencies(workload)
    return _line(workload.title, workload.series, matched[0], seed, sample) if matched else None


def _line(
    name: str, series: Iterable[Series], concurrency: int, seed: int, pick: Callable[[Series, int], Sample | None]
) -> Line:  # fmt: skip
    samples = {one.name: found for one in series if (found := pick(one, concurrency)) is not None}
    plain = samples.get(BASELINE)
    by_method = {}
    for method, found in samples.items():
        speedup = None if method == BASELINE else _speedup(name, method, found, plain, seed)
        by_method[method] = Measured(request_rate(found.rows), speedup, found.tau_of_drafting_passes, None, found.lost)
    return Line(name, concurrency, by_method)


def _speedup(name: str, method: str, found: Sample, plain: Sample | None, seed: int) -> Factor:
    ours, theirs = request_rate(found.rows), request_rate(plain.rows) if plain else None
    if plain is None or not theirs or ours is None:
        return Factor(None, why="plain decoding was not measured on it")
    drawn = [request_rates(found.rows, seed, f"{method}/{name}"), request_rates(plain.rows, seed, f"none/{name}")]
    return Factor(ours / theirs, interval(drawn[0] / drawn[1]))


def average(lines: Sequence[Line], methods: Sequence[str]) -> Average | None:
    """Over the rows in which every method has a speed-up; None where there is no such row, or a single one."""
    whole = [line for line in lines if all(_has_speedup(line, method) for method in methods if method != BASELINE)]
    if len(whole) < 2:
        return None
    speedups, taus = {}, {}
    for method in methods:
        found = [line.by_method[method] for line in whole if method in line.by_method]
        factors = [one.speedup.value for one in found if one.speedup is not None and one.speedup.value is not None]
        if method != BASELINE:
            speedups[method] = statistics.fmean(factors)
        known = [tau for one in found if (tau := one.tau_of_drafting_passes) is not None]
        if len(known) == len(whole):
            taus[method] = statistics.fmean(known)
    return Average(len(whole), speedups, taus)


def _has_speedup(line: Line, method: str) -> bool:
    measured = line.by_method.get(method)
    return measured is not None and measured.speedup is not None and measured.speedup.value is not None
