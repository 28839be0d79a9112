# SPDX-License-Identifier: Apache-2.0
"""Profiles one call of the sm_90a attention: clock cycles of a CTA's warps, phase by phase.

Compiles tools/kernel_phases.cu, in which the kernel stamps the SM's clock at the end of each phase (phases.cuh), and
runs it on this machine's GPU; needs nvcc and compute capability 9.0. Each call finds nothing of its inputs in L2. A
phase's cycles are those since the phase before that the warp stamped. If a CTA reads several requests one after
another, the phases are those of the last one, and Span includes everything before. Prints a table, asserts nothing.
"""

from __future__ import annotations

import re
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).parents[1]))

from dflash_trt.cli.output import print_table
from tests.paths import REPOSITORY
from tests.plugins.cases import GPT_OSS, QWEN3_8B, wgmma_rows
from tools.count_kernel import PLUGINS
from tools.sass import find, run

SOURCES = [REPOSITORY / "tools/kernel_phases.cu"] + [
    PLUGINS / "kv_injection_attention" / name
    for name in ("launch_config.cpp", "wgmma_launch_config.cpp", "kernel/gpu.cu")
]
DRAFTERS = {"gpt-oss": GPT_OSS, "qwen3": QWEN3_8B}
FLAGS = ["-std=c++20", "-O3", "--generate-code=arch=compute_90a,code=sm_90a", "-DDFLASH_STAMP_PHASES", "-Xptxas=-v"]


def phases() -> list[str]:
    """Names of the stamps, as phases.cuh gives them."""
    text = (PLUGINS / "kv_injection_attention/kernel/phases.cuh").read_text()
    return re.findall(r"^  k(\w+), +//", text, re.MULTILINE)


def build(drafter: str, cache: str, program: Path) -> str:
    """Compiles the kernel of a drafter; gives what ptxas says of it."""
    case = DRAFTERS[drafter]
    sizes = {"HEAD_DIM": case.D, "ROWS": wgmma_rows(case), "BLOCK": case.S, "GROUP": case.N // case.G}
    defines = [f"-D{name}={value}" for name, value in sizes.items()] + [f"-DFP8={str(cache == 'fp8').lower()}"]
    nvcc = find("nvcc", "install the CUDA toolkit")
    return run(nvcc, *FLAGS, *defines, f"-I{PLUGINS}", *map(str, SOURCES), "-o", str(program))


def durations(lines: Iterable[str]) -> dict[str, list[int]]:
    """Cycles of each phase in every call, CTA and warp, and of all together, from what the program prints."""
    names = phases()
    cycles: dict[str, list[int]] = defaultdict(list)
    for line in lines:
        stamps = line.split()[3:]
        stamped: list[tuple[str, int]] = []
        for name, at in zip(names, stamps, strict=True):
            if at != "-" and (not stamped or int(at) >= stamped[-1][1]):  # else it is left of an earlier span
                stamped.append((name, int(at)))
        for (_, before), (name, after) in pairwise(stamped):
            cycles[name].append(after - before)
        cycles["all"].append(stamped[-1][1] - stamped[0][1])
    return {name: cycles[name] for name in [*names[1:], "all"] if name in cycles}


def table_row(name: str, cycles: list[int]) -> list[str]:
    return [name, str(len(cycles)), *(str(round(pick(cycles))) for pick in (min, statistics.median, max))]


@click.command()
@click.option("--drafter", type=click.Choice(list(DRAFTERS)), default="gpt-oss", show_default=True)
@click.option("--cache", type=click.Choice(["bf16", "fp8"]), default="bf16", show_default=True)
@click.option("--requests", type=click.IntRange(1, 256), default=1, show_default=True)
@click.option("--context", type=click.IntRange(1, 131072), default=512, show_default=True, help="Rows of each request.")
@click.option("--kv-heads", type=click.IntRange(1, 8), default=8, show_default=True, help="1: one rank's of eight.")
@click.option("--runs", type=click.IntRange(1), default=10, show_default=True)
@click.option("--compile-only", is_flag=True, help="Needs no GPU: prints what ptxas says.")
def main(drafter: str, cache: str, requests: int, context: int, kv_heads: int, runs: int, compile_only: bool) -> None:
    """Print the clock cycles of each phase of the attention kernel of compute capability 9.0."""
    with tempfile.TemporaryDirectory() as directory:
        program = Path(directory) / "kernel_phases"
        ptxas = build(drafter, cache, program)
        if compile_only:
            click.echo(ptxas.strip())
            return
        lines = run(str(program), *map(str, (requests, context, kv_heads, runs))).splitlines()
    title = f"{drafter}, {cache}, {requests} x {context}, {kv_heads} kv heads: cycles since the phase before"
    columns = ["behind it", "warps", "least", "median", "most"]
    print_table(title, columns, [table_row(name, cycles) for name, cycles in durations(lines).items()])


if __name__ == "__main__":
    main()
