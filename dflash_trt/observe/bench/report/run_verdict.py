# SPDX-License-Identifier: Apache-2.0
"""The verdict of a report: at which concurrencies a method is faster than the reference."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from dflash_trt.observe.bench.point_record import BenchPoint
from dflash_trt.observe.bench.report.bench_report import BenchReport, WorkloadReport
from dflash_trt.observe.bench.report.equal_concurrency import ComparisonRow
from dflash_trt.observe.bench.report.intervals import Speedup
from dflash_trt.observe.bench.report.workloads import Workload, reference_title
from dflash_trt.observe.plots.method_styles import title_of

FASTER, SLOWER, UNDECIDED, IMPOSSIBLE = "faster", "slower", "undecided", "the machine was too busy to tell"


def verdict(report: BenchReport) -> tuple[str, ...]:
    """One sentence for each method but the reference, over all concurrencies that both were measured at."""
    return tuple(_verdict(work, series.name) for work in report.workloads for series in work.workload.compared())


def _verdict(work: WorkloadReport, name: str) -> str:
    workload = work.workload
    found = [(row, row.by_method[name].speedup) for row in work.sweep if name in row.by_method]
    measured = [(row, speedup) for row, speedup in found if speedup is not None]
    title = f"{title_of(name)} against {reference_title(workload.reference)}, {workload.title}"
    if not measured:
        return f"{title}: not compared, because no concurrency was measured with both"
    groups = [(kind, list(rows)) for kind, rows in groupby(measured, key=lambda each: judged(each[1]))]
    kinds = {kind for kind, _ in groups}
    whole = f"{kinds.pop()} everywhere" if kinds != {IMPOSSIBLE} and len(kinds) == 1 and len(measured) > 1 else ""
    parts = [f"{'' if whole else f'{kind} '}{_at(rows)}" for kind, rows in groups]
    return f"{title}: {f'{whole}: ' if whole else ''}{'; '.join(parts)}{_goodputs(workload, name)}"


def judged(speedup: Speedup) -> str:
    """Faster or slower only where the 95 % interval says so; above the acceptance length is no result."""
    if not speedup.is_possible:
        return IMPOSSIBLE
    low, high = speedup.interval or (0.0, float("inf"))
    return FASTER if low > 1 else SLOWER if high < 1 else UNDECIDED


def _at(rows: Sequence[tuple[ComparisonRow, Speedup]]) -> str:
    """at concurrency 1 to 8 (1.93x to 1.31x)."""
    names, values = [row.name for row, _ in rows], sorted(speedup.value for _, speedup in rows)
    seen = f"{values[0]:.2f}x" if len(rows) == 1 else f"{values[0]:.2f}x to {values[-1]:.2f}x"
    limits = [speedup.limit for _, speedup in rows if speedup.limit is not None and not speedup.is_possible]
    if limits:
        seen = f"above the acceptance length of {max(limits):.2f}, which cannot be"
    return f"at concurrency {names[0] if len(rows) == 1 else f'{names[0]} to {names[-1]}'} ({seen})"


def _goodputs(work: Workload, name: str) -> str:
    """The best goodput of both, where AIPerf counted it."""
    best = [_best(work, name), _best(work, work.reference)]
    texts = [f"{point.goodput:.2f} requests/s at {point.concurrency}" for point in best if point is not None]
    return "" if len(texts) < 2 else f". Best goodput: {texts[0]}, {reference_title(work.reference)} {texts[1]}"


def _best(work: Workload, name: str) -> BenchPoint | None:
    points = [point for series in work.series if series.name == name for point in series.points if point.rows]
    return max((point for point in points if point.good_requests is not None), key=lambda p: p.goodput, default=None)
