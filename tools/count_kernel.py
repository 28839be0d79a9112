# SPDX-License-Identifier: Apache-2.0
"""The attention kernel on paper: what its machine code issues for every byte of the cache. Needs nvcc, no GPU.

Each (architecture, drafter, cache) is compiled and disassembled, the cheapest turn of the loop over the context is
taken of every warp of a team (tools/sass.py), and its instructions are counted. A ceiling is the rate at which a
GPU would read the cache if one thing alone held it up and everything else were free:

  issue  four warp instructions a clock and SM
  MMA    mma.m16n8k16 or wgmma at the rate below; MUFU: exp2 at 16 results a clock and SM (32 on 10.3)
  shared 128 bytes a clock and SM: copies, ldmatrix, stmatrix and wgmma's right operands, bank conflicts included

The general kernel (mma) is counted, and where they are compiled for the call that of short contexts (short) and
sm_90a's (wgmma). Of each, one request of 512 context rows: the instructions that a warp of team 0 issues from beginning
to end at least, and how many different ones, which are the code that the SM has to fetch once (tools/sass.py).

No ceiling is a measurement: latency and the other warps' work come on top. Clocks are boost clocks.
Prints tables, asserts nothing.
"""

from __future__ import annotations

import importlib.metadata
import math
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).parents[1]))

from dflash_trt.cli.output import print_table
from tests.paths import REPOSITORY
from tests.plugins.cases import BF16, FP8, GPT_OSS, QWEN3_8B, SHORT, Case, wgmma_rows
from tools.sass import PIPES, cheapest_path, cheapest_round, parse, pipe

PLUGINS = REPOSITORY / "plugins"
SM_REGISTERS = 65536
SHARED_BYTES_PER_CLOCK = 128
RESERVED_SHARED_BYTES = 1024  # of every CTA
SHORT_CONTEXT = 512


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Data-sheet numbers; `mma` and `wgmma` are multiply-adds a clock and SM with 16-bit operands and FP32 sums."""

    name: str
    architecture: str
    sms: int
    ghz: float
    terabytes: float  # a second, of its memory
    shared_bytes: int  # of an SM
    mma: int
    mufu: int = 16
    wgmma: int = 0


# wgmma: from the data sheet's dense BF16 rate. mma: A100's documented 1,024; on Hopper mma.sync reaches about 62 % of
# wgmma's 2,048 (arXiv 2501.12084); for 10.x no number is published, the same is assumed. RTX PRO 6000: from its data
# sheet's dense FP16 rate.
GPUS = (
    Gpu(
        name="H200", architecture="90a", sms=132, ghz=1.98, terabytes=4.8, shared_bytes=228 << 10, mma=1270, wgmma=2048
    ),
    Gpu(name="B200", architecture="100f", sms=148, ghz=1.965, terabytes=8.0, shared_bytes=228 << 10, mma=1024),
    Gpu(name="B300", architecture="100f", sms=148, ghz=1.92, terabytes=8.0, shared_bytes=228 << 10, mma=1024, mufu=32),
    Gpu(name="RTX PRO 6000", architecture="120f", sms=188, ghz=2.6, terabytes=1.79, shared_bytes=100 << 10, mma=512),
)
DRAFTERS = {
    "gpt-oss": GPT_OSS,
    "qwen3": QWEN3_8B,
    "head96": replace(QWEN3_8B, name="head96", D=96),
    "head256": replace(QWEN3_8B, name="head256", N=16, G=4, D=256),
}

WGMMA_KERNEL = """
#include "kv_injection_attention/kernel/wgmma_attention.cuh"
namespace dflash::kv_injection {{
template __global__ void wgmma_attention<{D}, {rows}, BF16, {bytes}>(
    const __grid_constant__ Params, const __grid_constant__ LaunchConfig);
}}
"""
SHORT_KERNEL = """
#include "kv_injection_attention/kernel/attention.cuh"
namespace dflash::kv_injection {{
template __global__ void short_attention<{D}, BF16, {bytes}>(
    const __grid_constant__ Params, const __grid_constant__ LaunchConfig);
}}
"""
KERNEL = """
#include "kv_injection_attention/kernel/attention.cuh"
namespace dflash::kv_injection {{
template __global__ void attention<{D}, BF16, {bytes}>(
    const __grid_constant__ Params, const __grid_constant__ LaunchConfig);
}}
"""
PRINT_LAUNCH_CONFIG = """
#include <algorithm>
#include <cstdio>
#include "kv_injection_attention/kernel/wgmma_launch_config.h"
using namespace dflash::kv_injection;
int main() {{
  Params p{{}};
  p.batch = p.slots = p.layers = 1;
  p.block = {S}; p.num_heads = {N}; p.num_kv_heads = {G}; p.head_dim = {D}; p.max_pages = 1;
  p.block_dtype = DType::kBF16; p.cache_dtype = {cache};
  const bool is_short = {short};
  const LaunchConfig config = {wgmma}    ? make_wgmma_launch_config(p, 132)
                              : is_short ? make_short_launch_config(p, 132, kWgmmaShared)
                                         : make_launch_config(p, 264);
  const int stages = {wgmma} ? wgmma_stages({D}, {itemsize}) : num_stages({D}, {itemsize});
  const int step = {wgmma} ? kWgmmaKeys : step_keys({D}, {itemsize});
  const int units = {context} / kUnitKeys, parts = is_short ? 1 : worthwhile_ranges(config, units);
  const int ctas = units - units / parts <= config.combine_cost ? 1 : parts;  // as Schedule has it
  std::printf("%d %d %d %d %d %d %d %d", config.tile_rows, config.row_groups, config.teams, stages, config.shared_bytes,
              step, is_short ? 1 : warp_tiles(p.head_dim), ctas);
  using Rows = StoredRows<{D} * {itemsize}>;
  constexpr int vectors = {D} * {itemsize} / 16;
  int read[8] = {{}}, written[8] = {{}};  // lanes of eight, by the bank group of their 16 bytes
  for (int i = 0; i < 8; ++i) {{
    ++read[Rows::at(i, 0) / 16 % 8];
    ++written[Rows::at(i / vectors, i % vectors * 16) / 16 % 8];
  }}
  std::printf(" %d %d", *std::max_element(read, read + 8) - 1, *std::max_element(written, written + 8) - 1);
}}
"""


@dataclass(frozen=True)
class LaunchConfig:
    """How the host lays the call out, as its own code says."""

    tile_rows: int
    row_groups: int
    teams: int
    stages: int
    shared_bytes: int
    step_keys: int
    warp_tiles: int
    parts: int
    """CTAs that share one request of SHORT_CONTEXT rows and a kv head."""
    # Wavefronts beyond one that eight lanes of 16 bytes take: ldmatrix on a step's rows, and copies that write them.
    read_conflicts: int
    write_conflicts: int


@dataclass(frozen=True)
class ShortCall:
    """Instructions on a warp's path through a call of one request with SHORT_CONTEXT rows."""

    issued: int
    different: int


@dataclass(frozen=True)
class Count:
    """Warp instructions of a CTA that a step of one team takes in a compiled kernel, by opcode."""

    case: Case
    architecture: str
    kernel: str
    config: LaunchConfig
    registers: int
    code_bytes: int  # of the whole kernel, padding included
    opcodes: Counter[str]
    short_call: ShortCall

    @property
    def step_bytes(self) -> int:
        return 2 * self.config.step_keys * self.case.D * self.case.cache_dtype.itemsize

    def per_kib(self, wanted: str) -> float:
        """Warp instructions of a pipe for 1,024 bytes of the cache."""
        issued = sum(n for opcode, n in self.opcodes.items() if pipe(opcode) == wanted)
        return issued * 1024 / self.step_bytes

    @property
    def multiply_adds(self) -> float:
        """For a byte of the cache, those of FP8 operands at half: the data sheet gives them twice the rate."""
        shapes = ((n, re.search(r"^([HQ])GMMA\.(\d+)x(\d+)x(\d+)", opcode)) for opcode, n in self.opcodes.items())
        wgmma = sum(
            n * math.prod(map(int, shape.groups()[1:])) / (4 if shape[1] == "H" else 8)  # of four warps
            for n, shape in shapes
            if shape
        )
        return (wgmma or self.per_kib("MMA") * self.step_bytes / 1024 * 16 * 8 * 16) / self.step_bytes

    @property
    def shared_bytes(self) -> float:
        """Bytes that shared memory moves for a byte of the cache, whole wavefronts and conflicts included."""
        copy, matrix = 1 + self.config.write_conflicts, 1 + self.config.read_conflicts
        wavefronts = {"LDGSTS": 4 * copy, "LDSM": 4 * matrix, "STSM": 4, "LDS": 1, "SHFL": 1}
        moved = 0.0
        for opcode, n in self.opcodes.items():
            if operand := re.search(r"^([HQ])GMMA\.\d+x(\d+)x(\d+)", opcode):  # the right one, swizzled, of four warps
                moved += n / 4 * int(operand[2]) * int(operand[3]) * (2 if operand[1] == "H" else 1)
            else:
                moved += n * SHARED_BYTES_PER_CLOCK * wavefronts.get(opcode.split(".")[0], 0)
        return moved / self.step_bytes

    def ctas(self, gpu: Gpu) -> int:
        threads = 32 * self.config.row_groups * self.config.teams
        by_registers = SM_REGISTERS // (threads * -(-self.registers // 8) * 8)
        return min(by_registers, gpu.shared_bytes // (self.config.shared_bytes + RESERVED_SHARED_BYTES))


def find(tool: str, hint: str) -> str:
    """The program's path: of its PyPI wheel, or on the PATH."""
    try:
        files = importlib.metadata.files(f"nvidia-cuda-{tool}") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = next((str(f.locate()) for f in files if f.name == tool), None) or shutil.which(tool)
    if found is None:
        raise click.ClickException(f"expected {tool} on the PATH, found none: {hint}")
    return found


def run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise click.ClickException(f"{' '.join(command[:2])} ...: {result.stderr}")
    return result.stdout + result.stderr


def make_launch_config(case: Case, kernel: str, directory: Path) -> LaunchConfig:
    source, program = directory / "config.cpp", directory / "config"
    cache = "DType::kF8E4M3" if case.cache_dtype is FP8 else "DType::kBF16"
    source.write_text(
        PRINT_LAUNCH_CONFIG.format(
            S=case.S, N=case.N, G=case.G, D=case.D, cache=cache, itemsize=case.cache_dtype.itemsize,
            wgmma=str(kernel == "wgmma").lower(), short=str(kernel == "short").lower(), context=SHORT_CONTEXT,
        )
    )  # fmt: skip
    names = ("launch_config.cpp", "wgmma_launch_config.cpp")
    sources = [str(PLUGINS / "kv_injection_attention" / name) for name in names]
    run(find("g++", "install it"), "-std=c++20", f"-I{PLUGINS}", str(source), *sources, "-o", str(program))
    return LaunchConfig(*map(int, run(str(program)).split()))


def kernels(case: Case, architecture: str) -> list[str]:
    """Kernels that are compiled for the call."""
    short = ["short"] if case.D in (64, 128) else []
    return ["mma", *short, *(["wgmma"] if architecture == "90a" and wgmma_rows(case) else [])]


def rows(case: Case) -> int:
    return case.S * case.N // case.G


def count(case: Case, architecture: str, kernel: str, directory: Path) -> Count:
    source, cubin = directory / "kernel.cu", directory / "kernel.cubin"
    template = {"mma": KERNEL, "short": SHORT_KERNEL, "wgmma": WGMMA_KERNEL}[kernel]
    source.write_text(template.format(D=case.D, rows=wgmma_rows(case), bytes=str(case.cache_dtype is FP8).lower()))
    code = f"--generate-code=arch=compute_{architecture},code=sm_{architecture}"
    nvcc = find("nvcc", "install the CUDA toolkit")
    ptxas = run(nvcc, "-std=c++20", "-cubin", code, f"-I{PLUGINS}", "-Xptxas=-v", str(source), "-o", str(cubin))
    found = re.search(r"Used (\d+) registers", ptxas)
    assert found, ptxas
    text = run(find("nvdisasm", "pip install 'nvidia-cuda-nvdisasm>=13'"), "-c", str(cubin))
    config = make_launch_config(case, kernel, directory)
    step, path = (wgmma_step, wgmma_path) if kernel == "wgmma" else (team_step, team_path)
    return Count(
        case, architecture, kernel, config, int(found[1]), code_bytes(text), step(text, case, config),
        short_call(text, path(case, config)),
    )  # fmt: skip


def code_bytes(text: str) -> int:
    """End of the last instruction, of 16 bytes, in a listing of one kernel."""
    return max(int(offset, 16) for offset in re.findall(r"/\*([0-9a-f]{4,5})\*/", text)) + 16


def team_step(text: str, case: Case, config: LaunchConfig) -> Counter[str]:
    """What the warps of a team issue between them for one step."""
    blocks = parse(text)
    row = case.D * case.cache_dtype.itemsize
    copy_rows = 32 // (1 << (row // 16 - 1).bit_length())  # that a warp copies at a time
    sixteens = config.step_keys // 16
    total: Counter[str] = Counter()
    for warp in range(config.row_groups):
        tiles = min(config.warp_tiles, -(-rows(case) // 16) - warp * config.warp_tiles)
        copies = 2 * -(-(config.step_keys // copy_rows - warp) // config.row_groups)  # of K and of V
        exactly = {"MUFU.EX2": 8 * tiles * sixteens, "LDGSTS": copies}
        at_least = {"LDSM": 2 * config.step_keys * row // 512, "HMMA": tiles * sixteens * case.D // 4}
        total += cheapest_round(blocks, exactly, at_least)
    return total


def wgmma_step(text: str, case: Case, config: LaunchConfig) -> Counter[str]:
    """What the four warps of a warpgroup, which are alike, issue between them for one step."""
    step = 2 * config.step_keys * case.D * case.cache_dtype.itemsize
    is_fp8 = case.cache_dtype is FP8
    products = {"HGMMA": case.D // 16, "QGMMA": case.D // 32} if is_fp8 else {"HGMMA": 2 * case.D // 16}
    exponentials = config.tile_rows // 2
    polynomials = exponentials // 13 if is_fp8 and case.D == 64 and config.tile_rows == 80 else 0  # kMufuRun
    exactly = {"MUFU.EX2": exponentials - polynomials, "LDGSTS": step // 16 // 128}
    at_least = products | {"STSM": config.tile_rows // 16, "LDSM": step // 4 // 512}
    warp = cheapest_round(parse(text), exactly, at_least)
    return Counter({opcode: 4 * n for opcode, n in warp.items()})


def short_call(text: str, sequence: list[str]) -> ShortCall:
    blocks = parse(text)
    path = cheapest_path(blocks, sequence)
    issued, different = (sum(len(blocks[i].opcodes) for i in each) for each in (path, set(path)))
    return ShortCall(issued, different)


def steps_of_team_0(config: LaunchConfig) -> int:
    keys = -(-SHORT_CONTEXT // config.parts)
    return -(-keys // (config.step_keys * config.teams))


def merge_turns(case: Case, config: LaunchConfig) -> int:
    return -(-min(config.tile_rows, rows(case)) * case.D // 2 // (32 * config.row_groups * config.teams))


def team_path(case: Case, config: LaunchConfig) -> list[str]:
    """What warp 0 issues in this order in attention.cuh, which raises its maxima with the first 16 keys."""
    tiles, D, itemsize = min(config.warp_tiles, -(-rows(case) // 16)), case.D, case.cache_dtype.itemsize
    steps = steps_of_team_0(config)
    keys = values = ["HMMA"] * (tiles * D // 8)
    tried, raised = ["MUFU.EX2"] * (8 * tiles), ["MUFU.EX2"] * (10 * tiles)
    at_once = 32 * config.row_groups * config.teams // (4 if D == 64 else 16 if D == 256 else 8)
    row_passes = -(-(config.tile_rows + 16 * -(-case.S // 16)) // at_once)
    copies = 2 * min(steps, config.stages - 1) * max(1, config.step_keys * D * itemsize // 512 // config.row_groups)
    turns = steps * config.step_keys // 16
    return [
        *["LDG"] * 9, *["LDGSTS"] * copies,  # of the context's place: length, slot, layout, pointer, the table's entry
        *(["LDG"] * 8 + ["MUFU.RSQ"]) * row_passes, "BAR",
        *keys, *tried, *keys, *raised, *values, *(keys + tried + values) * (turns - 1),
        *keys, *raised, *values,  # the block
        "BAR", *["STS"] * (tiles * (D // 2 + 4)), "BAR", "LDS", "MUFU.EX2", "BAR",
        *["STG"] * merge_turns(case, config),
    ]  # fmt: skip


def wgmma_path(case: Case, config: LaunchConfig) -> list[str]:
    """What warp 0 issues in wgmma_attention.cuh, whose team 0 has no part of the block."""
    steps, N, is_fp8 = steps_of_team_0(config), config.tile_rows, case.cache_dtype is FP8
    keys = ["QGMMA"] * (case.D // 32) if is_fp8 else ["HGMMA"] * (case.D // 16)
    values, again = ["HGMMA"] * (case.D // 16), keys if is_fp8 and case.D == 64 and N == 80 else []
    exponentials = N // 2 - (N // 2 // 13 if again else 0)
    weights = [*["MUFU.EX2"] * exponentials, *["STSM"] * (N // 16), *values]
    copies = ["LDGSTS"] * (2 * config.step_keys * case.D * case.cache_dtype.itemsize // 16 // 128)
    return [
        *["LDG"] * 3, "BAR", *["LDG"] * 13, *copies * min(steps, config.stages - 1), "MUFU.RSQ", "BAR",
        *keys, *["SHFL"] * (N // 4 * 3), *["MUFU.EX2"] * (N // 4), *again, *weights,
        *["LDGDEPBAR", *keys, *weights] * (steps - 1),
        "BAR", *["STS"] * (N // 4 * (case.D // 32 + 2)), "BAR", "LDS", "MUFU.EX2", "BAR",
        *["STG"] * merge_turns(case, config),
    ]  # fmt: skip


def name(counted: Count) -> str:
    case = counted.case
    return f"{case.name} ({rows(case)} rows, D {case.D}), {SHORT[case.cache_dtype].upper()}"


def instruction_row(counted: Count) -> list[str]:
    config = counted.config
    numbers = [counted.per_kib(pipe_name) for pipe_name in PIPES]
    return [
        name(counted),
        f"sm_{counted.architecture}",
        counted.kernel,
        *(f"{number:.1f}" for number in (*numbers, sum(numbers))),
        f"{config.teams} x {config.row_groups}",
        str(counted.registers),
        f"{config.shared_bytes / 1024:.0f}",
        f"{counted.code_bytes / 1024:.0f}",
        str(config.parts),
        str(counted.short_call.issued),
        str(counted.short_call.different),
        f"{config.read_conflicts}, {config.write_conflicts}",
    ]


def ceiling_row(counted: Count, gpu: Gpu) -> list[str]:
    clocks = gpu.sms * gpu.ghz * 1e9 / 1e12  # 10^12 a second
    mufu = counted.per_kib("MUFU") / 1024
    multiply_adds = gpu.wgmma if counted.kernel == "wgmma" else gpu.mma
    issue = clocks * 4 * 1024 / sum(map(counted.per_kib, PIPES))
    rates = [
        issue,
        clocks * multiply_adds / counted.multiply_adds,
        clocks * gpu.mufu / (mufu * 32),
        clocks * SHARED_BYTES_PER_CLOCK / counted.shared_bytes,
    ]
    ctas = counted.ctas(gpu)
    flight = ctas * counted.config.teams * (counted.config.stages - 1) * counted.step_bytes
    times = f"{min(rates) / gpu.terabytes:.2f}"
    cells = [name(counted), gpu.name, counted.kernel, f"{gpu.terabytes}", *(f"{rate:.1f}" for rate in rates), times]
    return [*cells, str(ctas), f"{flight / 1024:.0f}"]


@click.command()
@click.option("--drafter", "drafters", multiple=True, type=click.Choice(list(DRAFTERS)), help="Default: all.")
@click.option("--arch", "architectures", multiple=True, default=("90a", "100f", "120f"), help="Default: all.")
@click.option(
    "--cache",
    "caches",
    multiple=True,
    type=click.Choice(["bf16", "fp8"]),
    default=("bf16", "fp8"),
    help="Default: both.",
)
@click.option("--opcodes", is_flag=True, help="Also list the opcodes of a step.")
def main(drafters: tuple[str, ...], architectures: tuple[str, ...], caches: tuple[str, ...], opcodes: bool) -> None:
    """Count the attention kernel's instructions, and how fast a GPU could read the cache with them."""
    counts = []
    for drafter, architecture, cache in product(drafters or DRAFTERS, architectures, caches):
        case = replace(DRAFTERS[drafter], cache_dtype=FP8 if cache == "fp8" else BF16)
        for kernel in kernels(case, architecture):
            with tempfile.TemporaryDirectory() as directory:
                counts.append(count(case, architecture, kernel, Path(directory)))
    columns = [
        "drafter, cache",
        "for",
        "kernel",
        *PIPES,
        "all",
        "teams x warps",
        "registers",
        "KiB shared",
        "KiB of code",
        "CTAs",
        f"path of 1 x {SHORT_CONTEXT}",
        "different",
        "bank conflicts",
    ]
    print_table("Warp instructions for a KiB of the cache, and what a CTA takes", columns, map(instruction_row, counts))
    columns = [
        "drafter, cache",
        "GPU",
        "kernel",
        "memory",
        "issue",
        "MMA",
        "MUFU",
        "shared",
        "least / memory",
        "CTAs an SM",
        "KiB in flight",
    ]
    ceilings = [
        ceiling_row(counted, gpu) for counted in counts for gpu in GPUS if gpu.architecture == counted.architecture
    ]
    print_table("Ceilings, TB/s of cache read", columns, ceilings)
    for counted in counts if opcodes else ():
        listed = ", ".join(f"{n} {opcode}" for opcode, n in counted.opcodes.most_common())
        click.echo(
            f"\n{name(counted)}, sm_{counted.architecture}, {counted.kernel}, {counted.step_bytes} bytes: {listed}"
        )


if __name__ == "__main__":
    main()
