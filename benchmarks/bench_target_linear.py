# SPDX-License-Identifier: Apache-2.0
"""Linear layers of a target on a CPU, beside what torch has for them, by type and number of rows.

In BF16 that is oneDNN, in FP32 the faster of MKL, which torch asks, and oneDNN with weights that it laid out before.
One thread; they take turns, and --cold MiB of other memory are read between two calls, as other layers are in a pass.
Each cell is the median in microseconds, and its ratio to torch's. Prints a table, asserts nothing; a minute.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import torch
import torch.nn.functional as F

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from dflash_trt.cli.output import print_table  # noqa: E402
from dflash_trt.doctor import cpu_model  # noqa: E402
from dflash_trt.targets import bfloat16_linear, panel_linear  # noqa: E402

SHAPES = ((128, 128), (128, 384), (128, 1024), (512, 512), (1024, 1024), (1024, 3072), (3072, 1024), (1024, 151936))
"""Inputs and outputs."""
ROWS = (1, 4, 8, 16, 64, 128, 512)
LARGEST = 2**34
"""Multiplications of a call that is measured."""
Ways = tuple[Callable[[torch.Tensor], torch.Tensor], ...]
"""Ours, and torch's."""


@click.command()
@click.option("--dtype", "dtypes", multiple=True, default=("float32", "bfloat16"), show_default=True)
@click.option("--seconds", default=0.5, show_default=True, help="For each shape and number of rows.")
@click.option("--cold", default=16, show_default=True, help="MiB that are read between two calls.")
def main(dtypes: Sequence[str], seconds: float, cold: int) -> None:
    """Print microseconds a layer takes, and ratios to torch."""
    torch.set_num_threads(1)
    other = torch.ones(cold * 2**18)
    for dtype in dtypes:
        table = []
        for inputs, outputs in SHAPES:
            weight = torch.randn(outputs, inputs).to(getattr(torch, dtype))
            ways = bfloat16_ways(weight) if dtype == "bfloat16" else float_ways(weight)
            counts = [rows for rows in ROWS if rows * inputs * outputs <= LARGEST]
            cells = [measured(ways, torch.randn(rows, inputs).to(weight.dtype), other, seconds) for rows in counts]
            is_ours = dtype == "float32" or inputs >= bfloat16_linear.MIN_INPUTS
            rule = "ours" if is_ours else "torch"
            table.append((f"{inputs} -> {outputs}", *cells, *[""] * (len(ROWS) - len(cells)), rule))
        print_table(f"{cpu_model()}, one thread, {dtype}", ("weight", *map(str, ROWS), "rule"), table)


def bfloat16_ways(weight: torch.Tensor) -> Ways:
    return lambda rows: bfloat16_linear.linear(weight, None, rows), lambda rows: F.linear(rows, weight)


def float_ways(weight: torch.Tensor) -> Ways:
    panels, reordered = panel_linear.panels(weight), torch.ops.mkldnn._reorder_linear_weight(weight, 8)
    return (
        lambda rows: panel_linear.linear(panels, len(weight), None, rows),
        lambda rows: F.linear(rows, weight),
        lambda rows: torch.ops.mkldnn._linear_pointwise(rows, reordered, None, "none", [], ""),
    )


@torch.inference_mode()
def measured(ways: Ways, rows: torch.Tensor, other: torch.Tensor, seconds: float) -> str:
    """A cell."""
    times: list[list[float]] = [[] for _ in ways]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 4:
        for way, taken in zip(ways, times, strict=True):
            other.sum()
            begin = time.perf_counter()
            way(rows)
            taken.append(1e6 * (time.perf_counter() - begin))
    ours, *torchs = map(statistics.median, times)
    return f"{ours:.0f} ({ours / min(torchs):.2f})"


if __name__ == "__main__":
    main()
