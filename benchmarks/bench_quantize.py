# SPDX-License-Identifier: Apache-2.0
"""Packing BF16 weights on this machine's CPU: ours, modelopt's export arithmetic, and a plain memory copy.

All run in turn over the same tensors, several rounds, in one process. A row's time is the sum over the
tensors of each one's fastest round, so that a machine shared with other work disturbs little; its speed is
in GB of BF16 weights read a second. Every tensor has its own output, touched before. modelopt runs where it
can be imported. Prints a table, asserts nothing.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))

from dflash_trt import _C
from dflash_trt.cli.machine_report import cpu_model
from dflash_trt.cli.output import print_table

COPY = "memory copy (numpy)"


@dataclass
class Tensor:
    """One weight matrix and what the packers write."""

    weights: NDArray[np.uint16]
    copy: NDArray[np.uint16]
    fp8: NDArray[np.uint8]
    nvfp4: NDArray[np.uint8]
    scales: NDArray[np.uint8]
    scale: float
    scale_2: float

    @classmethod
    def random(cls, rows: int, columns: int, rng: np.random.Generator) -> Tensor:
        normal = rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(0.02)
        weights = (normal.view(np.uint32) >> 16).astype(np.uint16)
        amax = _C.amax(weights)
        return cls(
            weights=weights,
            copy=np.ones_like(weights),
            fp8=np.ones((rows, columns), np.uint8),
            nvfp4=np.ones((rows, columns // 2), np.uint8),
            scales=np.ones((rows, columns // 16), np.uint8),
            scale=float(np.float32(amax) / np.float32(448)),
            scale_2=float(np.float32(amax) / np.float32(2688)),
        )


@dataclass
class Way:
    """One thing to do with every tensor."""

    name: str
    threads: int
    run: Callable[[Tensor], object]
    rounds: list[list[float]] = field(default_factory=list)
    """Seconds of each tensor in each round."""

    def round(self, tensors: list[Tensor]) -> None:
        seconds = []
        for tensor in tensors:
            begin = time.perf_counter()
            self.run(tensor)
            seconds.append(time.perf_counter() - begin)
        self.rounds.append(seconds)

    def seconds(self) -> float:
        return sum(map(min, zip(*self.rounds, strict=True)))


def layer_shapes(hidden: int, ffn: int, heads: int, kv_heads: int, head_dim: int) -> list[tuple[int, int]]:
    """[out, in] of a drafter layer's q, k, v, o, gate, up and down."""
    return [
        (heads * head_dim, hidden),
        (kv_heads * head_dim, hidden),
        (kv_heads * head_dim, hidden),
        (hidden, heads * head_dim),
        (ffn, hidden),
        (ffn, hidden),
        (hidden, ffn),
    ]


def our_ways(threads: int) -> list[Way]:
    pool = ThreadPoolExecutor(threads)

    def copy(tensor: Tensor) -> None:
        parts = zip(np.array_split(tensor.copy, threads), np.array_split(tensor.weights, threads), strict=True)
        list(pool.map(lambda pair: np.copyto(*pair), parts))

    def amax(tensor: Tensor) -> None:
        _C.amax(tensor.weights, threads=threads)

    def fp8(tensor: Tensor) -> None:
        _C.pack_fp8(tensor.weights, tensor.scale, tensor.fp8, threads=threads)

    def nvfp4(tensor: Tensor) -> None:
        _C.pack_nvfp4(tensor.weights, tensor.scale_2, tensor.nvfp4, tensor.scales, threads=threads)

    return [
        Way(COPY, threads, copy),
        Way("amax", threads, amax),
        Way("pack_fp8", threads, fp8),
        Way("pack_nvfp4", threads, nvfp4),
        Way("amax + pack_fp8", threads, lambda tensor: (amax(tensor), fp8(tensor))),
        Way("amax + pack_nvfp4", threads, lambda tensor: (amax(tensor), nvfp4(tensor))),
    ]


def modelopt_ways(threads: int) -> list[Way]:
    """amax and what the unified Hugging Face export does with it."""
    import torch
    from modelopt.torch.export.quant_utils import to_quantized_weight
    from modelopt.torch.quantization.qtensor import NVFP4QTensor
    from modelopt.torch.quantization.utils import reduce_amax

    def fp8(tensor: Tensor) -> None:
        torch.set_num_threads(threads)
        weights = torch.from_numpy(tensor.weights).view(torch.bfloat16)
        to_quantized_weight(weights, reduce_amax(weights).float() / 448, "fp8")

    def nvfp4(tensor: Tensor) -> None:
        torch.set_num_threads(threads)
        weights = torch.from_numpy(tensor.weights).view(torch.bfloat16)
        scale_2 = NVFP4QTensor.get_weights_scaling_factor_2(weights)
        scales, _ = NVFP4QTensor.get_weights_scaling_factor(weights, 16, scale_2)
        to_quantized_weight(weights, scales, "nvfp4", scale_2, 16)

    return [Way("modelopt FP8", threads, fp8), Way("modelopt NVFP4", threads, nvfp4)]


@click.command()
@click.option("--hidden", default=2880, show_default=True)
@click.option("--ffn", default=7680, show_default=True)
@click.option("--heads", default=64, show_default=True)
@click.option("--kv-heads", default=8, show_default=True)
@click.option("--head-dim", default=64, show_default=True)
@click.option("--layers", default=1, show_default=True, help="gpt-oss-120b's drafter has 8, all alike.")
@click.option("--rounds", default=7, show_default=True)
def main(hidden: int, ffn: int, heads: int, kv_heads: int, head_dim: int, layers: int, rounds: int) -> None:
    """Measure our packers, modelopt and a memory copy, with 1 and with all threads."""
    shapes = layer_shapes(hidden, ffn, heads, kv_heads, head_dim) * layers
    rng = np.random.default_rng(0)
    tensors = [Tensor.random(*shape, rng) for shape in shapes]
    gigabytes = sum(tensor.weights.nbytes for tensor in tensors) / 1e9
    all_threads = len(os.sched_getaffinity(0))
    has_modelopt = find_spec("modelopt") is not None
    ways = []
    for threads in (1, all_threads):
        ways += our_ways(threads) + (modelopt_ways(threads) if has_modelopt else [])
    versions = [f"numpy {metadata.version('numpy')}"]
    versions += [f"{name} {metadata.version(name)}" for name in ("torch", "nvidia-modelopt") if has_modelopt]
    click.echo(f"{cpu_model()}, {all_threads} threads")
    click.echo(f"Python {platform.python_version()}, {', '.join(versions)}")
    click.echo(f"{len(tensors)} tensors, {gigabytes:.3f} GB of BF16, fastest of {rounds} rounds each\n")
    for way in ways:
        way.round(tensors[:1])  # warm-up
        way.rounds.clear()
    for _ in range(rounds):
        for way in ways:
            way.round(tensors)
    _print(ways, gigabytes)
    if not has_modelopt:
        click.echo("modelopt: not installed")


def _print(ways: list[Way], gigabytes: float) -> None:
    speed = {(way.name, way.threads): gigabytes / way.seconds() for way in ways}
    counts = list(dict.fromkeys(way.threads for way in ways))
    columns = ["", *(text for n in counts for text in (f"{n} thread{'s' * (n > 1)}, GB/s", "of copy"))]
    rows = []
    for name in dict.fromkeys(way.name for way in ways):
        row = [name]
        for threads in counts:
            value = speed[name, threads]
            row += [f"{value:.2f}" if value >= 1 else f"{value:.4f}", f"{value / speed[COPY, threads]:.0%}"]
        rows.append(row)
    print_table("BF16 weights read a second", columns, rows)


if __name__ == "__main__":
    main()
