# SPDX-License-Identifier: Apache-2.0
"""What a reader of a report must know before its figures: losses, what differs between runs, disturbed points."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from dflash_trt.observe.bench.speed_curve import curve, num_gpus
from dflash_trt.observe.bench.workloads import BASELINE, LoadedRun, Workload

INVERSION = 1.1
"""Times faster at a higher concurrency: more is no chance."""


def notes(runs: Sequence[LoadedRun], measured: Sequence[Workload]) -> tuple[str, ...]:
    """Each once."""
    return tuple(dict.fromkeys([*_losses(runs), *(note for work in measured for note in _workload_notes(work))]))


def _losses(runs: Sequence[LoadedRun]) -> Iterator[str]:
    for loaded in runs:
        yield from (f"{loaded.directory.name}: {warning}" for warning in loaded.run.warnings)
        for point in loaded.points:
            if lost := point.requests.failed + point.requests.timed_out:
                causes = "; ".join(f"{text} ({count})" for text, count in point.requests.errors.items())
                yield (
                    f"{loaded.directory.name}: {point.name}: {lost} of {point.requests.sent} requests failed or timed"
                    f" out and are in no rate: {causes}"
                )


def _workload_notes(work: Workload) -> Iterator[str]:
    if work.baseline() is None:
        yield f"{work.title}: no method named {BASELINE!r}, so there are no speed-ups"
    for field in ("request", "server", "num_gpus", "client"):
        values = {msgspec.json.encode(getattr(series.run, field)) for series in work.series}
        if len(values) > 1:
            yield f"{work.title}: the runs differ in {field}: {', '.join(sorted(value.decode() for value in values))}"
    if num_gpus(work) is None and any(series.run.num_gpus for series in work.series):
        yield f"{work.title}: not every run tells its GPUs, so throughput is per server"
    for series in work.series:
        points = curve(series, 1).points
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
