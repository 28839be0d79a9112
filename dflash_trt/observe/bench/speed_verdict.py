# SPDX-License-Identifier: Apache-2.0
"""The first line of a report: where a method is faster than the reference, where slower, where nothing was shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from dflash_trt.observe.bench.comparison_report import ComparisonRow, MethodFigures, WorkloadReport
from dflash_trt.observe.bench.speed_curve import MeasuredSpeedup

FASTER, SLOWER, UNDECIDED = "faster", "slower", "not decided"


def verdicts(work: WorkloadReport, load: str = "concurrency") -> Iterator[str]:
    """One line for each method but the reference, over all concurrencies that both were measured at."""
    for name in work.titles:
        if name != work.reference:
            yield _verdict(work, name, load)


def _verdict(work: WorkloadReport, name: str, load: str) -> str:
    found = [(row, _speedup(row, name)) for row in work.sweep]
    measured = [(row, speedup) for row, speedup in found if speedup is not None and speedup.value is not None]
    title = f"{work.titles[name]} against {work.reference_title}, {work.title}"
    if not measured:
        return f"{title}: not compared, because no {load} was measured with both"
    groups = [(kind, list(rows)) for kind, rows in groupby(measured, key=lambda each: judged(each[1]))]
    kinds = {kind for kind, _ in groups}
    whole = f"{kinds.pop()} everywhere" if len(kinds) == 1 and len(measured) > 1 else ""
    parts = [f"{'' if whole else f'{kind} '}{_at(rows, load)}" for kind, rows in groups]
    best = _goodputs(work, name)
    return f"{title}: {f'{whole}: ' if whole else ''}{'; '.join(parts)}{f'. {best}' if best else ''}"


def judged(speedup: MeasuredSpeedup) -> str:
    """Faster or slower only where the 95 % interval says so."""
    low, high = speedup.interval or (0.0, float("inf"))
    return FASTER if low > 1 else SLOWER if high < 1 else UNDECIDED


def _speedup(row: ComparisonRow, name: str) -> MeasuredSpeedup | None:
    figures = row.by_method.get(name)
    return None if figures is None else figures.speedup


def _at(rows: Sequence[tuple[ComparisonRow, MeasuredSpeedup]], load: str) -> str:
    """at concurrency 1 to 8 (1.93x to 1.31x)."""
    names, values = [row.name for row, _ in rows], sorted(speedup.value or 0.0 for _, speedup in rows)
    if len(rows) == 1:
        return f"at {load} {names[0]} ({values[0]:.2f}x)"
    return f"at {load} {names[0]} to {names[-1]} ({values[0]:.2f}x to {values[-1]:.2f}x)"


def _goodputs(work: WorkloadReport, name: str) -> str:
    """The best goodput of both."""
    best = {method: _best(work.sweep, method) for method in (name, work.reference)}
    if None in best.values():
        return ""
    texts = [f"{value.goodput.per_second:.2f} requests/s at {row.name}" for row, value in best.values()]  # type: ignore[union-attr,misc]
    return f"Best goodput: {texts[0]}, {work.reference_title} {texts[1]}"


def _best(sweep: Sequence[ComparisonRow], method: str) -> tuple[ComparisonRow, MethodFigures] | None:
    found = [(row, figures) for row in sweep if (figures := row.by_method.get(method)) and figures.goodput is not None]
    return max(found, key=lambda each: each[1].goodput.per_second if each[1].goodput else 0.0, default=None)
