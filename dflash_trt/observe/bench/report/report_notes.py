# SPDX-License-Identifier: Apache-2.0
"""Notes of a report: lost requests, runs that differ, and speeds that cannot be right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from dflash_trt.observe.bench.report.speed_curve import curve
from dflash_trt.observe.bench.report.workloads import LoadedRun, Workload

INVERSION = 1.1
"""Factor above which a higher speed at a higher concurrency is not chance."""


def notes(runs: Sequence[LoadedRun], measured: Sequence[Workload]) -> tuple[str, ...]:
    return tuple(dict.fromkeys([*_losses(runs), *(note for work in measured for note in _workload_notes(work))]))


def _losses(runs: Sequence[LoadedRun]) -> Iterator[str]:
    for loaded in runs:
        yield from (f"{loaded.directory.name}: {warning}" for warning in loaded.run.warnings)
        for point in loaded.points:
            if point.lost:
                causes = "; ".join(f"{text} ({count})" for text, count in point.errors.items())
                yield (
                    f"{loaded.directory.name}: {point.name}: {point.lost} of {point.sent} requests failed or timed"
                    f" out and are in no rate: {causes}"
                )


def _workload_notes(work: Workload) -> Iterator[str]:
    if all(series.name != work.reference for series in work.series):
        yield f"{work.title}: no method named {work.reference!r}, so there are no speed-ups; --reference names another"
    for field in ("request", "arrivals", "server", "num_gpus", "client", "goodput"):
        values = {msgspec.json.encode(getattr(series.run, field)) for series in work.series}
        if len(values) > 1:
            yield f"{work.title}: the runs differ in {field}: {', '.join(sorted(value.decode() for value in values))}"
    if work.num_gpus is None and any(series.run.num_gpus for series in work.series):
        yield f"{work.title}: not every run states its GPUs, so throughput is per server"
    for series in work.series:
        points = curve(work, series).points
        slow = [
            str(p.concurrency)
            for p in points
            if any(q.concurrency > p.concurrency and q.user_rate > INVERSION * p.user_rate for q in points)
        ]
        if slow:
            yield (
                f"{work.title}: {series.title} at concurrency {', '.join(slow)}: users were slower than at a higher"
                " one; the machine had other work, or the run is too short"
            )
