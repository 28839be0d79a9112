# SPDX-License-Identifier: Apache-2.0
"""Counts the instructions that the attention kernels issue per byte of the cache. Needs nvcc, no GPU.

The kernels of a (drafter, architecture) are compiled and disassembled, the cheapest turn of the loop over the context
is taken of every warp of a team (tools/sass.py), and its instructions are counted. A ceiling is the rate at which a GPU
would read the cache if one thing alone held it up and everything else were free:

  issue  four warp instructions a clock and SM
  MMA    mma.m16n8k16 or wgmma at the rate below; MUFU: exp2 at 16 results a clock and SM (32 on 10.3)
  shared 128 bytes a clock and SM: copies, ldmatrix, stmatrix and wgmma's right operands, bank conflicts included

Counted are the general kernel (mma), and where they are compiled for the call that of short contexts (short), sm_90a's
(wgmma), and sm_90a's with products ahead (ahead). For each of them and for the second kernel (combine) that follows it,
the instructions that a warp of team 0 issues at least for one request of 512 context rows, and the number of distinct
ones, which the SM has to fetch once. Last the kernel that appends rows to the cache. No ceiling is a measurement:
latency and the other warps' work come on top. Prints tables, asserts nothing.
"""

from __future__ import annotations

import math
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).parents[1]))

from dflash_trt.cli.output import print_table
from tests.paths import REPOSITORY
from tests.plugins.cases import BF16, FP8, GPT_OSS, QWEN3_8B, SHORT, Case, ahead_fits, wgmma_rows
from tools.gpus import GPUS, Gpu
from tools.sass import PIPES, Code, cheapest_path, cheapest_round, compile_kernels, find, pipe, run

PLUGINS = REPOSITORY / "plugins"
SM_REGISTERS = 65536
SHARED_BYTES_PER_CLOCK = 128
RESERVED_SHARED_BYTES = 1024  # threads of every CTA
SHORT_CONTEXT = 512
WGMMA = ("wgmma", "ahead")

DRAFTERS = {
    "gpt-oss": GPT_OSS, "qwen3": QWEN3_8B,
    "head96": replace(QWEN3_8B, name="head96", D=96), "head256": replace(QWEN3_8B, name="head256", N=16, G=4, D=256),
}  # fmt: skip

KERNELS = {
    "mma": "attention<{D}, BF16, {fp8}>",
    "short": "short_attention<{D}, BF16, {fp8}>",
    "wgmma": "wgmma_attention<{D}, {N}, BF16, {fp8}, 0>",
    "ahead": "wgmma_attention<{D}, {N}, BF16, {fp8}, 1>",
    "combine": "combine<{D}, BF16>",
}
SOURCE = """
#include "kv_injection_attention/kernel/append.cuh"
#include "kv_injection_attention/kernel/attention.cuh"
#include "kv_injection_attention/kernel/combine.cuh"
#include "kv_injection_attention/kernel/wgmma_attention.cuh"
namespace dflash::kv_injection {
"""
INSTANCE = "template __global__ void {}(const __grid_constant__ Params, const __grid_constant__ LaunchConfig);\n"


@dataclass(frozen=True)
class LaunchConfig:
    """How the host lays the call out, as its own code says (count_kernel.cpp)."""

    tile_rows: int
    row_groups: int
    teams: int
    stages: int
    shared_bytes: int
    step_keys: int
    warp_tiles: int
    parts: int
    """CTAs that share one request of SHORT_CONTEXT rows and a kv head."""
    combine_warps: int
    # Wavefronts beyond one that eight lanes of 16 bytes take: ldmatrix on a step's rows, and copies that write them.
    read_conflicts: int
    write_conflicts: int


@dataclass(frozen=True)
class Call:
    """A call of an attention kernel and, unless that is for short contexts, of the second one."""

    case: Case
    gpu: Gpu
    kernel: str
    config: LaunchConfig
    code: Code
    combine: Code

    @property
    def name(self) -> list[str]:
        drafter = f"{self.case.name} ({rows(self.case)} rows, D {self.case.D})"
        return [f"{drafter}, {SHORT[self.case.cache_dtype].upper()}", f"sm_{self.gpu.architecture}", self.kernel]

    @property
    def step_bytes(self) -> int:
        return 2 * self.config.step_keys * self.case.D * self.case.cache_dtype.itemsize

    @cached_property
    def opcodes(self) -> Counter[str]:
        """Warp instructions of a CTA that a step of one team takes."""
        warps = wgmma_step(self) if self.kernel in WGMMA else team_step(self)
        return sum((cheapest_round(self.code.blocks, *needed) for needed in warps), Counter())

    def per_kib(self, wanted: str) -> float:
        """Warp instructions of a pipe for 1,024 bytes of the cache."""
        return sum(n for opcode, n in self.opcodes.items() if pipe(opcode) == wanted) * 1024 / self.step_bytes

    def wgmmas(self) -> Iterator[tuple[float, int, list[int]]]:
        """How many a warpgroup issues, bytes of an operand's element, and M, N, K."""
        for opcode, n in self.opcodes.items():
            if shape := re.search(r"^([HQ])GMMA\.(\d+)x(\d+)x(\d+)", opcode):
                yield n / 4, 2 if shape[1] == "H" else 1, [int(size) for size in shape.groups()[1:]]

    @property
    def multiply_adds(self) -> float:
        """For a byte of the cache, those of FP8 operands at half: the data sheet gives them twice the rate."""
        made = sum(n * math.prod(shape) * item / 2 for n, item, shape in self.wgmmas())
        return (made or self.per_kib("MMA") * self.step_bytes / 1024 * 16 * 8 * 16) / self.step_bytes

    @property
    def shared_bytes(self) -> float:
        """Bytes that shared memory moves for a byte of the cache, whole wavefronts and conflicts included."""
        copy, matrix = 1 + self.config.write_conflicts, 1 + self.config.read_conflicts
        wavefronts = {"LDGSTS": 4 * copy, "LDSM": 4 * matrix, "STSM": 4, "LDS": 1, "SHFL": 1}
        moved = sum(n * wavefronts.get(opcode.split(".")[0], 0) for opcode, n in self.opcodes.items())
        right = sum(n * N * K * item for n, item, (_, N, K) in self.wgmmas())  # operands, which are swizzled
        return (moved * SHARED_BYTES_PER_CLOCK + right) / self.step_bytes

    @property
    def ctas_an_sm(self) -> int:
        threads = 32 * self.config.row_groups * self.config.teams
        by_registers = SM_REGISTERS // (threads * -(-self.code.registers // 8) * 8)
        return min(by_registers, self.gpu.shared_bytes // (self.config.shared_bytes + RESERVED_SHARED_BYTES))


def rows(case: Case) -> int:
    return case.S * case.N // case.G


def kernels(case: Case, architecture: str) -> list[str]:
    """Attention kernels that are compiled for the call."""
    there = {"mma": True, "short": case.D in (64, 128)}
    if architecture == "90a":
        there |= {"wgmma": wgmma_rows(case) > 0, "ahead": ahead_fits(case)}
    return [kernel for kernel, is_there in there.items() if is_there]


def instance(case: Case, kernel: str) -> str:
    return KERNELS[kernel].format(D=case.D, N=wgmma_rows(case), fp8=int(case.cache_dtype is FP8))


def compiled(wanted: Sequence[str], architecture: str, directory: Path) -> dict[str, Code]:
    """Code of "append" and of instances that differ in name or flags."""
    source = directory / "kernels.cu"
    source.write_text(SOURCE + "".join(map(INSTANCE.format, wanted)) + "}\n")
    by_name = {
        (re.findall(r"12kv_injection\d+([a-z_]+)", mangled)[0], *re.findall(r"Lb(\d)E", mangled)): code
        for mangled, code in compile_kernels(source, architecture, PLUGINS).items()
    }
    return {name: by_name[re.findall(r"\w+", name)[0], *re.findall(r"\b[01]\b", name)] for name in (*wanted, "append")}


def launch_config(case: Case, gpu: Gpu, kernel: str, directory: Path) -> LaunchConfig:
    program = directory / "launch_config"
    if not program.exists():
        files = (PLUGINS / "kv_injection_attention" / name for name in ("launch_config.cpp", "wgmma_launch_config.cpp"))
        sources = map(str, (Path(__file__).with_suffix(".cpp"), *files))
        run(find("g++", "install it"), "-std=c++20", f"-I{PLUGINS}", *sources, "-o", str(program))
    sizes = (SHORT_CONTEXT, case.S, case.N, case.G, case.D, case.cache_dtype.itemsize, gpu.sms, gpu.shared_bytes)
    return LaunchConfig(*map(int, run(str(program), kernel, *map(str, sizes)).split()))


Needed = tuple[dict[str, int], dict[str, int]]  # opcodes of a warp in a step: exactly, and at least


def team_step(call: Call) -> list[Needed]:
    """By warp."""
    case, config, row = call.case, call.config, call.case.D * call.case.cache_dtype.itemsize
    copy_rows = 32 // (1 << (row // 16 - 1).bit_length())  # rows that a warp copies at a time
    sixteens = config.step_keys // 16
    warps = []
    for warp in range(config.row_groups):
        tiles = min(config.warp_tiles, -(-rows(case) // 16) - warp * config.warp_tiles)
        copies = 2 * -(-(config.step_keys // copy_rows - warp) // config.row_groups)  # one for K and one for V
        at_least = {"LDSM": 2 * config.step_keys * row // 512, "HMMA": tiles * sixteens * case.D // 4}
        warps.append(({"MUFU.EX2": 8 * tiles * sixteens, "LDGSTS": copies}, at_least))
    return warps


def wgmma_work(call: Call) -> tuple[list[str], list[str], list[str]]:
    """Instructions of a warp in a step: products with keys; exponentials, stores of weights; products with values."""
    D, N, is_fp8 = call.case.D, call.config.tile_rows, call.case.cache_dtype is FP8
    exponentials = N // 2 - (N // 2 // 13 if is_fp8 and D == 64 and N == 80 else 0)  # the others are polynomials
    weights = ["MUFU.EX2"] * exponentials + ["STSM"] * (N // 16)
    return ["QGMMA"] * (D // 32) if is_fp8 else ["HGMMA"] * (D // 16), weights, ["HGMMA"] * (D // 16)


def wgmma_step(call: Call) -> list[Needed]:
    """A warpgroup's four warps are alike."""
    counted = Counter(opcode for work in wgmma_work(call) for opcode in work)
    exactly = {"MUFU.EX2": counted.pop("MUFU.EX2"), "LDGSTS": call.step_bytes // 16 // 128}
    return [(exactly, dict(counted) | {"LDSM": call.step_bytes // 4 // 512})] * 4


def path(call: Call) -> list[str]:
    """Instructions of warp 0, in order, in a call of one request with SHORT_CONTEXT rows."""
    config, case = call.config, call.case
    keys, warps = -(-SHORT_CONTEXT // config.parts), config.row_groups * config.teams
    steps = -(-keys // (config.step_keys * config.teams))
    begin, results = (wgmma_path if call.kernel in WGMMA else team_path)(call, steps, 32 * warps)
    outputs = -(-min(config.tile_rows, rows(case)) * case.D // 2 // (32 * warps))
    return [*begin, "BAR", *["STS"] * results, "BAR", "LDS", "MUFU.EX2", "BAR", *["STG"] * outputs]


def team_path(call: Call, steps: int, threads: int) -> tuple[list[str], int]:
    """Path in attention.cuh up to the results; how many a thread has. The block is the team's whose turn is next."""
    case, config = call.case, call.config
    in_turn = -(-SHORT_CONTEXT // config.parts // config.step_keys) % config.teams == 0
    tiles, D, itemsize = min(config.warp_tiles, -(-rows(case) // 16)), case.D, case.cache_dtype.itemsize
    keys = values = ["HMMA"] * (tiles * D // 8)
    tried, raised = ["MUFU.EX2"] * (8 * tiles), ["MUFU.EX2"] * (10 * tiles)
    lanes = {64: 4, 256: 16}.get(D, 8)  # chunks per row
    row_passes = -(-(config.tile_rows + 16 * -(-case.S // 16)) * lanes // threads)
    copies = 2 * min(steps, config.stages - 1) * max(1, config.step_keys * D * itemsize // 512 // config.row_groups)
    return [
        *["LDG"] * 9, *["LDGSTS"] * copies,  # the context's length, slot, layout, pointer and page table entry
        *(["LDG"] * 8 + ["MUFU.RSQ"]) * row_passes, "BAR",
        *(keys + tried if call.kernel == "mma" else ()), *keys, *raised, *values,
        *(keys + tried + values) * (steps * config.step_keys // 16 - 1),
        *(keys + raised + values if in_turn else ()),
    ], tiles * (D // 2 + 4)  # fmt: skip


def wgmma_path(call: Call, steps: int, _: int) -> tuple[list[str], int]:
    """Path in wgmma_attention.cuh, whose team 0 has no part of the block."""
    N, D = call.config.tile_rows, call.case.D
    keys, weights, values = wgmma_work(call)
    again = keys if call.case.cache_dtype is FP8 and D == 64 and N == 80 else []
    raised = [*keys, *["SHFL"] * (N // 4 * 3), *["MUFU.EX2"] * (N // 4)]
    step = [*raised, *again, *weights, *values, *["LDGDEPBAR", *keys, *weights, *values] * (steps - 1)]
    if call.kernel == "ahead":  # after each step's weights, the products of the next keys
        step = ["LDGDEPBAR", *raised, *weights, *keys, *values, *[*weights, "LDGDEPBAR", *keys, *values] * (steps - 1)]
    copies = ["LDGSTS"] * (call.step_bytes // 16 // 128 * min(steps, call.config.stages - 1))
    return [*["LDG"] * 3, "BAR", *["LDG"] * 13, *copies, "MUFU.RSQ", "BAR", *step], N // 4 * (D // 32 + 2)


def combine_path(call: Call) -> list[str]:
    """The second kernel's warp 0, which finds that the request is not cut."""
    parts, warps, each = call.config.parts, call.config.combine_warps, call.case.D // 32
    if parts == 1:
        return ["LDG"]
    added = ["BAR", *["LDS"] * ((warps - 1) * (each + 1))] if warps > 1 else []
    return [*["LDG"] * 4, *["SHFL"] * 5, *["MUFU.EX2"] * -(-parts // warps), *added, *["STG"] * each]


def step_row(call: Call) -> list[str]:
    config, numbers = call.config, [call.per_kib(name) for name in PIPES]
    teams, conflicts = f"{config.teams} x {config.row_groups}", f"{config.read_conflicts}, {config.write_conflicts}"
    return [*call.name, *(f"{number:.1f}" for number in (*numbers, sum(numbers))), teams, conflicts]


def code_cells(code: Code, sequence: Sequence[str]) -> list[str]:
    walk = cheapest_path(code.blocks, sequence)
    issued = [sum(len(code.blocks[i].opcodes) for i in each) for each in (walk, set(walk))]
    return [f"{code.nbytes / 1024:.0f}", str(code.registers), *map(str, issued)]


def call_rows(call: Call) -> Iterator[list[str]]:
    shared = f"{call.config.shared_bytes / 1024:.0f}"
    yield [*call.name, str(call.config.parts), shared, *code_cells(call.code, path(call))]
    if call.kernel != "short":
        yield [*call.name[:2], "and combine", "", "", *code_cells(call.combine, combine_path(call))]


def ceiling_row(call: Call, gpu: Gpu) -> list[str]:
    clocks = gpu.sms * gpu.ghz * 1e9 / 1e12  # 10^12 a second
    rates = [
        clocks * 4 * 1024 / sum(map(call.per_kib, PIPES)),
        clocks * (gpu.wgmma if any(call.wgmmas()) else gpu.mma) / call.multiply_adds,
        clocks * gpu.mufu / (call.per_kib("MUFU") / 1024 * 32),
        clocks * SHARED_BYTES_PER_CLOCK / call.shared_bytes,
    ]
    flight = call.ctas_an_sm * call.config.teams * (call.config.stages - 1) * call.step_bytes
    cells = [call.name[0], gpu.name, call.kernel, f"{gpu.terabytes}", *(f"{rate:.1f}" for rate in rates)]
    return [*cells, f"{min(rates) / gpu.terabytes:.2f}", str(call.ctas_an_sm), f"{flight / 1024:.0f}"]


STEPS = ["drafter, cache", "for", "kernel", *PIPES, "all", "teams x warps", "bank conflicts"]
CALLS = ["drafter, cache", "for", "kernel", "CTAs", "KiB shared", "KiB of code", "registers", "path", "different"]
CEILINGS = ["drafter, cache", "GPU", "kernel", "memory", "issue", "MMA", "MUFU", "shared", "least / memory",
            "CTAs an SM", "KiB in flight"]  # fmt: skip


def counted(drafter: str, architecture: str, directory: Path) -> tuple[list[Call], Code]:
    """Calls of the attention kernels, and the code of the append."""
    gpu = next(gpu for gpu in GPUS if gpu.architecture == architecture)
    cases = [replace(DRAFTERS[drafter], cache_dtype=cache) for cache in (BF16, FP8)]
    made = [(case, kernel, instance(case, kernel)) for case in cases for kernel in kernels(case, architecture)]
    combine = instance(cases[0], "combine")
    code = compiled([combine, *(name for *_, name in made)], architecture, directory)
    return [
        Call(case, gpu, kernel, launch_config(case, gpu, kernel, directory), code[name], code[combine])
        for case, kernel, name in made
    ], code["append"]


@click.command()
@click.option("--drafter", "drafters", multiple=True, type=click.Choice(list(DRAFTERS)), default=list(DRAFTERS))
@click.option("--arch", "architectures", multiple=True, default=("90a", "100f", "120f"), show_default=True)
@click.option("--opcodes", is_flag=True, help="Also list the opcodes of a step.")
def main(drafters: Sequence[str], architectures: Sequence[str], opcodes: bool) -> None:
    """Count the attention kernels' instructions, and how fast a GPU could read the cache with them."""
    calls, appends = [], []
    with tempfile.TemporaryDirectory() as name:
        for architecture in architectures:
            for drafter in drafters:
                made, append = counted(drafter, architecture, Path(name))
                calls += made
            appends.append(["", f"sm_{architecture}", "append", "", "", *code_cells(append, ["LDG", "STG"])])
    print_table("Warp instructions for a KiB of the cache", STEPS, map(step_row, calls))
    print_table(f"A call of 1 x {SHORT_CONTEXT}", CALLS, [*chain.from_iterable(map(call_rows, calls)), *appends])
    gpus = [(call, gpu) for call in calls for gpu in GPUS if gpu.architecture == call.gpu.architecture]
    print_table("Ceilings, TB/s of cache read", CEILINGS, [ceiling_row(call, gpu) for call, gpu in gpus])
    for call in calls if opcodes else ():
        listed = ", ".join(f"{n} {opcode}" for opcode, n in call.opcodes.most_common())
        click.echo(f"\n{', '.join(call.name)}, {call.step_bytes} bytes: {listed}")


if __name__ == "__main__":
    main()
