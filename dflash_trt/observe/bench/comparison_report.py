# SPDX-License-Identifier: Apache-2.0
"""All that `dflash-trt bench report` says, as values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from dflash_trt.observe.bench.announced import AVERAGE, Figure, beside, of_target
from dflash_trt.observe.bench.comparison_tables import (
    Average,
    Line,
    average,
    category_lines,
    data_set_line,
    matched_concurrencies,
    sweep,
)
from dflash_trt.observe.bench.records import RecordedAcceptance, Run
from dflash_trt.observe.bench.speed_curve import AtSpeed, Curve, at_speeds, curve, ends, gpus_of, num_gpus, speeds
from dflash_trt.observe.bench.workloads import BASELINE, LoadedRun, Series, Workload, workloads

INVERSION = 1.1
"""Times faster at a higher concurrency: more is no chance."""
TAU_COLUMN = "tau of drafting passes"
TAU = (
    "Tau of drafting passes = (accepted drafts + drafting passes) / drafting passes: tokens that one pass of the target"
    " over drafts brings, its accepted drafts and one of its own."
)


class PositionShares(msgspec.Struct, frozen=True):
    """Acceptance of one method at one point, by position of the draft."""

    method: str
    concurrency: int
    acceptance: RecordedAcceptance
    shares: tuple[float, ...]
    """Accepted drafts at position 1, 2, ... per verify pass."""


class WorkloadReport(msgspec.Struct, frozen=True, kw_only=True):
    """The curve of a set of prompts, or of one category."""

    title: str
    titles: dict[str, str]
    """Of methods."""
    per: str
    """"GPU", or "server" where not every run tells its GPUs."""
    curves: tuple[Curve, ...]
    ends: tuple[str, ...]
    at_speeds: tuple[AtSpeed, ...]
    sweep: tuple[Line, ...]
    acceptance: tuple[PositionShares, ...]


class Published(msgspec.Struct, frozen=True):
    """A figure that others published for the same target."""

    figure: Figure
    differences: tuple[str, ...]
    """In what the deployments differ; none: it stands beside this run's."""


class CategoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """The announcement's Table 1 for one set of prompts and concurrency."""

    title: str
    concurrency: int
    methods: tuple[str, ...]
    titles: dict[str, str]
    lines: tuple[Line, ...]
    average: Average | None


class RunFacts(msgspec.Struct, frozen=True):
    """What stands on every page about a run."""

    directory: str
    run: Run


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The document."""

    runs: tuple[RunFacts, ...]
    seed: int
    """Of the intervals."""
    notes: tuple[str, ...]
    workloads: tuple[WorkloadReport, ...]
    categories: tuple[CategoryReport, ...]
    data_sets: tuple[Line, ...]
    """The announcement's Tables 2 and 3, and the paper's."""
    methods: tuple[str, ...]
    titles: dict[str, str]
    published: tuple[Published, ...]


def report(
    runs: Sequence[LoadedRun], seed: int, user_rates: Sequence[float] = (), concurrency: int | None = None
) -> Report:
    """`user_rates` are those at which throughput is compared, round ones unless given; `concurrency` is Table 1's."""
    found = workloads(runs)
    series = {one.name: one for work in found for one in work.series}
    categories = tuple(_category_reports(found, seed, concurrency))
    lines = [line for work in found if work.category is None and (line := data_set_line(work, seed))]
    return Report(
        runs=tuple(RunFacts(one.directory.name, one.run) for one in runs),
        seed=seed,
        notes=tuple(dict.fromkeys(_notes(runs, found))),
        workloads=tuple(_workload_report(work, seed, user_rates) for work in found if _has_curve(work, found)),
        categories=categories,
        data_sets=tuple(lines),
        methods=tuple(series),
        titles={name: one.title for name, one in series.items()},
        published=tuple(_published(found, categories, lines)),
    )


def _has_curve(work: Workload, found: Sequence[Workload]) -> bool:
    """A category has a picture of its own where it was measured at several concurrencies, or nothing else was."""
    is_swept = any(len(one.points) > 1 for one in work.series)
    return work.category is None or is_swept or len(found) == 1


def _workload_report(work: Workload, seed: int, user_rates: Sequence[float]) -> WorkloadReport:
    curves = tuple(curve(one, gpus_of(one, work)) for one in work.series)
    per = "server" if num_gpus(work) is None else "GPU"
    return WorkloadReport(
        title=work.title,
        titles={one.name: one.title for one in work.series},
        per=per,
        curves=curves,
        ends=tuple(ends(one, per) for one in curves),
        at_speeds=at_speeds(work, user_rates or speeds(curves), seed),
        sweep=sweep(work, seed),
        acceptance=tuple(shares for one in work.series for shares in _shares(one)),
    )


def _shares(series: Series) -> Iterator[PositionShares]:
    for point in series.points:
        found, counts = point.acceptance, point.acceptance.counts
        if counts is not None and counts.proposed:
            shares = tuple(count / counts.drafting_passes for count in counts.accepted_by_position)
            yield PositionShares(series.name, point.concurrency, found, shares)
        elif counts is None and found.source != "not published":
            yield PositionShares(series.name, point.concurrency, found, ())


def _category_reports(found: Sequence[Workload], seed: int, concurrency: int | None) -> Iterator[CategoryReport]:
    for name in dict.fromkeys(work.prompt_set for work in found):
        of_set = [work for work in found if work.prompt_set == name]
        whole, own = of_set[0] if of_set[0].category is None else None, [w for w in of_set if w.category is not None]
        matched = [set(matched_concurrencies(work)) for work in own or of_set]
        shared = sorted(set.intersection(*matched)) if matched else []
        chosen = concurrency if concurrency is not None else shared[0] if shared else None
        if chosen is None:
            continue
        lines = category_lines(whole, own, chosen, seed)
        series = {one.name: one.title for work in own or of_set for one in work.series}
        if lines:
            yield CategoryReport(
                title=name, concurrency=chosen, methods=tuple(series), titles=series, lines=lines,
                average=average(lines, tuple(series)),
            )  # fmt: skip


def _published(
    found: Sequence[Workload], categories: Sequence[CategoryReport], lines: Sequence[Line]
) -> Iterator[Published]:
    """Every figure of the targets that were measured, beside the row that it belongs to, or else with why not."""
    chosen = {one.title: one.concurrency for one in categories} | {line.name: line.concurrency for line in lines}
    series = [(work, one) for work in found for one in work.series if one.name != BASELINE]
    for figure in dict.fromkeys(figure for _, one in series for figure in of_target(one.method.model)):
        best: tuple[str, ...] | None = None
        for work, one in series:
            concurrency = chosen.get(work.prompt_set, 1)
            category = AVERAGE if figure.category == AVERAGE else work.category
            is_row, differences = beside(one, work.prompt_set, category, concurrency, figure)
            if is_row and (best is None or len(differences) < len(best)):
                best = differences
        yield Published(figure, (f"no {figure.data_set} of this method here",) if best is None else best)


def _notes(runs: Sequence[LoadedRun], found: Sequence[Workload]) -> Iterator[str]:
    for one in runs:
        yield from (f"{one.directory.name}: {warning}" for warning in one.run.warnings)
        for point in one.points:
            lost = point.requests.failed + point.requests.timed_out
            if lost:
                where = f"{point.method}, concurrency {point.concurrency}" + (
                    f", {point.category}" if point.category else ""
                )
                causes = "; ".join(f"{text} ({count})" for text, count in point.requests.errors.items())
                yield (
                    f"{one.directory.name}: {where}: {lost} of {point.requests.sent} requests failed or timed out, and"
                    f" are in no rate: {causes}"
                )
    for work in found:
        if work.baseline() is None:
            yield f"{work.title}: no method named {BASELINE!r}, so there is nothing to be faster than"
        yield from _differences(work)
        yield from _inversions(work)


def _differences(work: Workload) -> Iterator[str]:
    """What runs on the same prompts do not share."""
    for field in ("request", "server", "num_gpus", "client"):
        values = {msgspec.json.encode(getattr(one.run, field)) for one in work.series}
        if len(values) > 1:
            shown = ", ".join(sorted(value.decode() for value in values))
            yield f"{work.title}: the runs differ in {field}: {shown}"
    if num_gpus(work) is None and any(one.run.num_gpus for one in work.series):
        yield f"{work.title}: not every run tells its GPUs, so throughput is per server"


def _inversions(work: Workload) -> Iterator[str]:
    """Points where users were slower than at a higher concurrency, which load alone does not explain."""
    for one in work.series:
        points = curve(one, 1).points
        slow = [
            str(p.concurrency)
            for p in points
            if any(q.concurrency > p.concurrency and q.user_rate > INVERSION * p.user_rate for q in points)
        ]
        if slow:
            yield (
                f"{work.title}: {one.title} at concurrency {', '.join(slow)}: users were slower than at a higher one;"
                " the machine had other work, or the run is short"
            )
