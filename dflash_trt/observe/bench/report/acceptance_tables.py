# SPDX-License-Identifier: Apache-2.0
"""Tables of the drafts that servers counted, and of acceptance by position."""

from __future__ import annotations

from collections.abc import Iterator

from dflash_trt.observe.bench.report.cell_text import NONE, TAU, tau_text
from dflash_trt.observe.bench.report.workloads import Workload
from dflash_trt.observe.pages.page_templates import Table


def drafts_table(work: Workload) -> Table | None:
    """Counts of drafts, with their source where there are several; None without counts."""
    found = [
        (series.title, point) for series in work.series for point in series.points
        if point.acceptance.tau_of_drafting_passes is not None
    ]  # fmt: skip
    sources = list(dict.fromkeys(point.acceptance.source for _, point in found))
    is_mixed = len(sources) > 1
    rows = []
    for title, point in found:
        counts = point.acceptance.counts
        numbers = (None,) * 3 if counts is None else (counts.drafting_passes, counts.proposed, counts.accepted)
        rows.append(
            (title, *((point.acceptance.source,) if is_mixed else ()), str(point.concurrency),
             *(NONE if number is None else f"{number:,}" for number in numbers),
             tau_text(point.acceptance.tau_of_drafting_passes))
        )  # fmt: skip
    if not rows:
        return None
    return Table(
        title=f"Drafts{'' if is_mixed else f' ({sources[0]})'}: {work.title}", rows=tuple(rows),
        columns=("method", *(("source",) if is_mixed else ()), "concurrency", "drafting passes", "proposed", "accepted",
                 TAU), num_text_columns=1 + is_mixed,
    )  # fmt: skip


def position_tables(work: Workload) -> Iterator[Table]:
    """Share of drafting passes that accepted the draft at position 1, 2, ...: a table for each method."""
    for series in work.series:
        counted = [
            (point.concurrency, counts) for point in series.points
            if (counts := point.acceptance.counts) is not None and counts.drafting_passes
        ]  # fmt: skip
        most = max((len(counts.accepted_by_position) for _, counts in counted), default=0)
        shares = [
            [f"{accepted / counts.drafting_passes:.0%}" for accepted in counts.accepted_by_position]
            + [NONE] * (most - len(counts.accepted_by_position))
            for _, counts in counted
        ]
        if most:
            yield Table(
                title=f"Acceptance by position, {series.title}: {work.title}", num_text_columns=0,
                columns=("position", *(f"at {concurrency}" for concurrency, _ in counted)),
                rows=tuple((str(position), *cells) for position, cells in enumerate(zip(*shares, strict=True), 1)),
            )  # fmt: skip
