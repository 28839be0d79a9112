# SPDX-License-Identifier: Apache-2.0
"""Linear layers of a target in BF16, beside torch's own, which oneDNN computes on a CPU, by number of rows.

One thread; both take turns, and --cold MiB of other memory are read between two calls, as other layers are in a pass.
Each cell is the median in microseconds, and its ratio to torch's. Prints a table, asserts nothing; half a minute.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import click
import torch
import torch.nn.functional as F

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from dflash_trt.cli.output import print_table  # noqa: E402
from dflash_trt.doctor import cpu_model  # noqa: E402
from dflash_trt.targets.bfloat16_linear import MIN_INPUTS, linear  # noqa: E402

SHAPES = ((128, 128), (128, 384), (512, 512), (1024, 1024), (1024, 3072), (3072, 1024), (1024, 151936))
"""Inputs and outputs."""
ROWS = (1, 4, 8, 16, 64, 128, 512)
LARGEST = 2**34
"""Multiplications of a call that is measured."""


@click.command()
@click.option("--seconds", default=0.5, show_default=True, help="For each shape and number of rows.")
@click.option("--cold", default=16, show_default=True, help="MiB that are read between two calls.")
def main(seconds: float, cold: int) -> None:
    """Print microseconds a layer takes, and ratios to torch."""
    torch.set_num_threads(1)
    other = torch.ones(cold * 2**18)
    table = []
    for inputs, outputs in SHAPES:
        weight = torch.randn(outputs, inputs).bfloat16()
        counts = [rows for rows in ROWS if rows * inputs * outputs <= LARGEST]
        cells = [measured(weight, torch.randn(rows, inputs).bfloat16(), other, seconds) for rows in counts]
        rule = "ours" if inputs >= MIN_INPUTS else "torch"
        table.append((f"{inputs} -> {outputs}", *cells, *[""] * (len(ROWS) - len(cells)), rule))
    print_table(f"{cpu_model()}, one thread", ("weight", *map(str, ROWS), "rule"), table)


@torch.inference_mode()
def measured(weight: torch.Tensor, rows: torch.Tensor, other: torch.Tensor, seconds: float) -> str:
    """A cell."""
    ways = (lambda: linear(weight, None, rows), lambda: F.linear(rows, weight))
    times: list[list[float]] = [[], []]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 4:
        for way, taken in zip(ways, times, strict=True):
            other.sum()
            begin = time.perf_counter()
            way()
            taken.append(1e6 * (time.perf_counter() - begin))
    ours, torchs = map(statistics.median, times)
    return f"{ours:.0f} ({ours / torchs:.2f})"


if __name__ == "__main__":
    main()
