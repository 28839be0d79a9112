# SPDX-License-Identifier: Apache-2.0
"""Linear layers of a target on a CPU, beside what torch has for them, by type and number of rows.

In BF16 that is oneDNN, in FP32 the faster of MKL, which torch asks, and oneDNN with weights that it laid out before.
One thread; they take turns, and --cold MiB of other memory are read between two calls, as other layers are in a pass.
Experts stand beside transformers' grouped products; each token asks for some of them by chance.
Each cell is the median in microseconds, and its ratio to torch's. The last table is what oneDNN would take in the place
of our FP32 layers, with rows filled up to a fixed tile, and whether a row's bits then depend on how many there are.
Prints tables, asserts nothing; two minutes.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.moe import grouped_mm_experts_forward

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from dflash_trt.cli.output import print_table  # noqa: E402
from dflash_trt.files.processor import cpu_model  # noqa: E402
from dflash_trt.runtime.cpu import linear_layers  # noqa: E402

SHAPES = ((128, 128), (128, 384), (128, 1024), (512, 512), (1024, 1024), (1024, 3072), (3072, 1024), (1024, 151936))
"""Inputs and outputs."""
EXPERTS = ((128, 128, 8, 2), (2048, 768, 32, 8), (1440, 1440, 16, 4))
"""Width, that of an expert, how many there are, and how many a token asks for."""
ROWS = (1, 4, 8, 16, 64, 128, 512)
TILES = (1, 8, 16)
"""Rows to a multiple of which oneDNN's are filled up."""
LARGEST = 2**34
"""Multiplications of a call that is measured."""
Ways = tuple[Callable[[torch.Tensor], torch.Tensor], ...]
"""Ours, and torch's."""


@click.command()
@click.option("--dtype", "dtypes", multiple=True, default=("float32", "bfloat16"), show_default=True)
@click.option("--seconds", default=0.5, show_default=True, help="For each shape and number of rows.")
@click.option("--cold", default=16, show_default=True, help="MiB that are read between two calls.")
def main(dtypes: Sequence[str], seconds: float, cold: int) -> None:
    """Print microseconds that layers take, and ratios to torch."""
    torch.set_num_threads(1)
    other = torch.ones(cold * 2**18)
    for dtype in dtypes:
        table = []
        for inputs, outputs in SHAPES:
            weight = torch.randn(outputs, inputs).to(getattr(torch, dtype))
            ways = bfloat16_ways(weight) if dtype == "bfloat16" else float_ways(weight)
            counts = [rows for rows in ROWS if rows * inputs * outputs <= LARGEST]
            cells = [measured(ways, torch.randn(rows, inputs).to(weight.dtype), other, seconds) for rows in counts]
            is_ours = dtype == "float32" or inputs >= linear_layers.MIN_INPUTS
            rule = "ours" if is_ours else "torch"
            table.append((f"{inputs} -> {outputs}", *cells, *[""] * (len(ROWS) - len(cells)), rule))
        print_table(f"{cpu_model()}, one thread, {dtype}", ("weight", *map(str, ROWS), "rule"), table)
        table = []
        for sizes in EXPERTS:
            ways = expert_ways(*sizes, getattr(torch, dtype))
            cells = [
                measured(ways, torch.randn(rows, sizes[0]).to(getattr(torch, dtype)), other, seconds) for rows in ROWS
            ]
            table.append(("{} -> {}, {} experts, {} asked".format(*sizes), *cells))
        print_table(f"{cpu_model()}, one thread, {dtype}", ("experts", *map(str, ROWS)), table)
    table = [tile_row(inputs, outputs, tile, other, seconds) for inputs, outputs in SHAPES[:-1] for tile in TILES]
    title = f"oneDNN, FP32, over ours; {cpu_model()}, one thread"
    print_table(title, ("weight", "tile", *map(str, ROWS), "a row has the same bits"), table)


@torch.inference_mode()
def tile_row(inputs: int, outputs: int, tile: int, other: torch.Tensor, seconds: float) -> tuple[str, ...]:
    """oneDNN's times over ours by number of rows, and whether each of them gives the first row the same bits."""
    weight = torch.randn(outputs, inputs)
    ours, _, onednn = float_ways(weight)
    rows = torch.randn(max(ROWS), inputs)

    def filled_up(rows: torch.Tensor) -> torch.Tensor:
        return onednn(F.pad(rows, (0, 0, 0, -len(rows) % tile)))[: len(rows)]

    cells = []
    for count in ROWS:
        theirs, own = medians((filled_up, ours), rows[:count], other, seconds)
        cells.append(f"{theirs / own:.2f}")
    first = filled_up(rows[:1])
    same = all(torch.equal(filled_up(rows[:count])[:1], first) for count in (*ROWS, 2, 3, 5, 7, 9, 100))
    return f"{inputs} -> {outputs}", str(tile), *cells, "yes" if same else "no"


def expert_ways(hidden: int, inner: int, number: int, asked: int, dtype: torch.dtype) -> Ways:
    config = Qwen3MoeConfig(
        hidden_size=hidden, moe_intermediate_size=inner, num_experts=number, num_experts_per_tok=asked,
        num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, vocab_size=8,
    )  # fmt: skip
    theirs = Qwen3MoeForCausalLM(config).to(dtype)
    ours = copy.deepcopy(theirs)
    linear_layers.group_experts(ours)
    modules = [model.model.layers[0].mlp.experts for model in (ours, theirs)]

    def mixed(function: Callable[..., torch.Tensor], module: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        top = torch.rand(len(rows), number, generator=generator).topk(asked)
        return function(module, rows, top.indices, top.values.to(rows.dtype))

    functions = (linear_layers.experts, grouped_mm_experts_forward)
    return tuple(partial(mixed, *pair) for pair in zip(functions, modules, strict=True))


def bfloat16_ways(weight: torch.Tensor) -> Ways:
    return lambda rows: linear_layers.linear(weight, None, rows), lambda rows: F.linear(rows, weight)


def float_ways(weight: torch.Tensor) -> Ways:
    layer = nn.Linear(weight.shape[1], len(weight), bias=False)
    layer.weight.data = weight
    reordered = torch.ops.mkldnn._reorder_linear_weight(weight, 8)
    return (
        linear_layers.PanelLinear(layer),
        lambda rows: F.linear(rows, weight),
        lambda rows: torch.ops.mkldnn._linear_pointwise(rows, reordered, None, "none", [], ""),
    )


def measured(ways: Ways, rows: torch.Tensor, other: torch.Tensor, seconds: float) -> str:
    """A cell."""
    ours, *torchs = medians(ways, rows, other, seconds)
    return f"{ours:.0f} ({ours / min(torchs):.2f})"


@torch.inference_mode()
def medians(ways: Ways, rows: torch.Tensor, other: torch.Tensor, seconds: float) -> list[float]:
    """Microseconds of a call, by way."""
    times: list[list[float]] = [[] for _ in ways]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 4:
        for way, taken in zip(ways, times, strict=True):
            other.sum()
            begin = time.process_time()
            way(rows)
            taken.append(1e6 * (time.process_time() - begin))
    return [*map(statistics.median, times)]


if __name__ == "__main__":
    main()
