# SPDX-License-Identifier: Apache-2.0
"""Published speed-ups of a system's target on its GPUs and runtime, to read an estimate beside."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dflash_trt.deploy.schema import TITLES as RUNTIME_TITLES
from dflash_trt.observe.bench.report.published_rows import PublishedRow, published_sets
from dflash_trt.observe.estimate.shapes import System
from dflash_trt.observe.plots.method_styles import TITLES

RUNTIMES = {str(runtime): title for runtime, title in RUNTIME_TITLES.items()}


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
    speedups: dict[str, list[float]] = {}
    for row in rows:
        for (method, _), figures in row.figures().items():
            speedups.setdefault(method, []).append(figures.speedup)
    texts = {
        method: "x to ".join(f"{end:.1f}" for end in sorted({min(all_), max(all_)}))
        for method, all_ in speedups.items()
    }
    others = "".join(f", {TITLES[method]} {text}x" for method, text in texts.items() if method != "dflash")
    batches = sorted({row.concurrency for row in rows if row.concurrency is not None})
    batch = f"batch {' to '.join(map(str, batches[:: max(1, len(batches) - 1)]))}" if batches else "batch not stated"
    what = rows[0].prompts if len(rows) == 1 else f"{len(rows)} rows"
    return f"{texts['dflash']}x plain decoding{others} ({what}, {batch})"
