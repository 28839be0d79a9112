# SPDX-License-Identifier: Apache-2.0
"""Published speed-ups of a system's target on its GPUs and runtime, to read an estimate beside."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dflash_trt.deploy.schema import TITLES
from dflash_trt.observe.bench.report.published_rows import PublishedRow, published_sets
from dflash_trt.observe.estimate.shapes import System

RUNTIMES = {str(runtime): title for runtime, title in TITLES.items()}


def published_lines(system: System) -> list[str]:
    """A line for each source with such rows; one that says so without any."""
    found = {each.title: [row for row in each.rows if _is_of(row, system)] for each in published_sets().values()}
    lines = [f"published: {_figures(rows)}, {rows[0].where}: {source}" for source, rows in found.items() if rows]
    place = f"{RUNTIMES[system.runtime]} on {system.gpu.name}x{system.num_gpus}"
    return lines or [f"published: nothing for {system.target.target} with {place}"]


def _is_of(row: PublishedRow, system: System) -> bool:
    """Whether it is of this target, runtime, GPU and number of GPUs, as far as the row states them."""
    runtime, _, gpus = row.where.partition(", ")
    number, _, gpu = gpus.rpartition(" x ")
    return (
        row.target == system.target.target
        and runtime == RUNTIMES[system.runtime]
        and re.sub(r"[^a-z0-9]", "", gpu.lower()) == re.sub(r"[^a-z0-9]", "", system.gpu.name)
        and int(number or 1) == system.num_gpus
    )


def _figures(rows: Sequence[PublishedRow]) -> str:
    """'2.3x plain decoding, EAGLE-3 1.7x (SPEED-Bench, average, batch not stated)'."""
    (first, *rest) = rows
    if rest:
        factors = sorted(row.dflash.speedup for row in rows)
        batches = sorted({row.concurrency for row in rows if row.concurrency is not None})
        at = f", batch {batches[0]} to {batches[-1]}" if batches else ""
        return f"{factors[0]:.1f}x to {factors[-1]:.1f}x plain decoding in {len(rows)} rows{at}"
    others = "".join(f", EAGLE-3 {figures.speedup:.1f}x" for figures in first.eagle3.values())
    batch = "batch not stated" if first.concurrency is None else f"batch {first.concurrency}"
    return f"{first.dflash.speedup:.1f}x plain decoding{others} ({first.prompts}, {batch})"
