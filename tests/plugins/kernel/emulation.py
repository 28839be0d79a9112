# SPDX-License-Identifier: Apache-2.0
"""Builds programs around the kernel's sources for the CPU, and runs calls with the emulated kernel."""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.paths import REPOSITORY
from tests.plugins.cases import BF16, F16, FP8, Case
from tests.plugins.compare import assert_close
from tests.plugins.kernel.oracle import Expected, expect
from tests.plugins.tensors import Tensors, draw, out_of_range, pointers

HERE = Path(__file__).parent
CALL = (HERE / "emulated_call.cpp",)
PLUGINS = REPOSITORY / "plugins"
INCLUDE = (f"-I{HERE}", f"-I{PLUGINS}")
LAUNCH_CONFIG = ("launch_config.cpp", "wgmma_launch_config.cpp")
FLAGS = [
    "-std=c++20", "-O1", "-g1", "-Wall", "-Wextra", "-Werror",
    "-Wno-unknown-pragmas",  # unroll
    "-fsanitize=address,undefined", "-fno-sanitize-recover=all",
    "-fno-sanitize=null,object-size,vptr",  # a third of the time to compile, for what the address sanitizer finds too
]  # fmt: skip
# Each CTA is allocated anew: without freed memory held back and stacks of allocations a call takes a third less time.
ASAN_OPTIONS = "detect_leaks=0:detect_stack_use_after_return=0:malloc_context_size=1:quarantine_size_mb=1"
MOST_SECONDS = 60  # seconds of CPU time, far more than a call takes
DIGEST_CHARACTERS = 16
ALL_FORMATS, BF16_BLOCKS, BF16_BLOCKS_FP8_CACHES = range(3)
MMA, SHORT, AHEAD = 0, -1, 1000
DTYPES = {F16: 0, BF16: 1, FP8: 2}
shared = Path("unknown before conftest.py says it")
"""Where what is built once lies."""


def compiler() -> str:
    found = shutil.which(os.environ.get("CXX", "g++"))
    if found is None:
        pytest.skip("no C++ compiler: install g++, or point CXX to one")
    return found


class EmulationError(Exception):
    """Error for which the emulator or a sanitizer stopped the program."""


@dataclass(frozen=True)
class Gpu:
    """Properties of a GPU, apart from its size."""

    architecture: int  # 10 * major + minor
    shared_bytes: int  # maximum per CTA
    starts_early: bool  # grids, before the one before has ended

    @property
    def defines(self) -> list[str]:
        values = {"ARCHITECTURE": self.architecture, "SHARED": self.shared_bytes, "EARLY": int(self.starts_early)}
        return [f"-DDFLASH_{name}={value}" for name, value in values.items()]


HOPPER = Gpu(90, 99 << 10, starts_early=True)  # where two CTAs share an SM; Blackwell is alike
A100 = Gpu(80, 163 << 10, starts_early=False)
ADA = Gpu(89, 99 << 10, starts_early=False)


def build(program: Path, sources: list[Path], *defines: str, plugins: Path = PLUGINS, gpu: Gpu = HOPPER) -> Path:
    """The sources as `program`, with address and undefined-behaviour sanitizers."""
    compile_with(f"-I{HERE}", f"-I{plugins}", *gpu.defines, *defines, *map(str, sources), "-o", str(program))
    return program


def once(name: str, build: Callable[[Path], object]) -> Path:
    """Result of `build` for a path, made on first use and again if a source has changed."""
    path, partial = shared / f"{name}-{sources_digest()}", shared / f"{name}.partial"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            build(partial)
            for old in shared.glob(f"{name}-{'?' * DIGEST_CHARACTERS}"):
                old.unlink()
            partial.rename(path)
    return path


@cache
def sources_digest() -> str:
    """Digest of all sources and of the compiler."""
    digest = hashlib.sha256(subprocess.check_output([compiler(), "--version"]) + repr(FLAGS).encode())
    for file in sorted([*HERE.iterdir(), *PLUGINS.rglob("*")]):
        if file.suffix in (".cpp", ".h", ".cuh", ".cu", ".py"):
            digest.update(f"{file}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:DIGEST_CHARACTERS]


def emulator() -> list[Path]:
    """The emulator's objects, to be built into programs."""
    return [_object(HERE / "emulator_sources.cpp")]


def _object(source: Path) -> Path:
    return once(f"{source.stem}.o", lambda built: compile_with(*INCLUDE, "-c", str(source), "-o", str(built)))


def compile_with(*arguments: str) -> None:
    result = subprocess.run([compiler(), *FLAGS, *arguments], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def launch_config() -> list[Path]:
    """The host's objects, as they are where a kernel has a mutant."""
    return [_object(PLUGINS / "kv_injection_attention" / name) for name in LAUNCH_CONFIG]


def build_kernel(
    program: Path, head_dim: int, kernel: int = MMA, plugins: Path = PLUGINS, formats: int = ALL_FORMATS,
    gpu: Gpu = HOPPER, callers: Sequence[Path] = CALL,
) -> Path:  # fmt: skip
    """The program that `call` runs, of the general attention (MMA), of short contexts' (SHORT), or of sm_90a's for
    `kernel` rows, with products ahead where AHEAD is added.

    The fewer `formats`, the sooner it is compiled. Sources other than `call`'s may be the `callers`.
    """
    host = [*map(_object, callers), *launch_config(), *emulator()]
    source = HERE / "emulated_kernel.cpp"
    numbers = {"HEAD_DIM": head_dim, "KERNEL": kernel, "FORMATS": formats}
    defines = [f"-DDFLASH_{name}={value}" for name, value in numbers.items()]
    if plugins != PLUGINS:
        return build(program, [source, *host], *defines, plugins=plugins, gpu=gpu)

    def compile_kernel(built: Path) -> None:
        compile_with(*INCLUDE, *gpu.defines, *defines, "-c", str(source), "-o", str(built))

    name = "_".join(map(str, (*numbers.values(), *astuple(gpu))))
    return build(program, [once(f"emulated_kernel_{name}.o", compile_kernel), *host])


@dataclass(frozen=True)
class LaunchConfig:
    """How the host laid the call out, as the program prints it."""

    row_tiles: int
    tile_rows: int
    row_groups: int
    teams: int
    ranges: int
    shared_bytes: int


@dataclass(frozen=True)
class Result:
    out: torch.Tensor
    config: LaunchConfig | None  # none of an empty call


def call(
    program: Path, directory: Path, case: Case, tensors: Tensors, *, ctas: int = 264, seed: int = 0,
    seconds: int = MOST_SECONDS,
) -> Result:  # fmt: skip
    """The output [B, S, N*D] of the emulated kernel on a GPU that holds `ctas` CTAs (264: an H200)."""
    directory.mkdir()
    table = write_context(directory, case, tensors)
    numbers = case.attributes() | {
        "batch": case.B, "block": case.S, "slots": table.shape[0], "layers": case.L, "max_pages": table.shape[1],
        "block_dtype": DTYPES[case.dtype], "cache_dtype": DTYPES[case.cache_dtype], "out_dtype": DTYPES[case.out_dtype],
    }  # fmt: skip
    (directory / "params").write_text("".join(f"{name} {value!r}\n" for name, value in numbers.items()))
    given = {field.name: getattr(tensors, field.name) for field in fields(tensors)} | {"page_table": table}
    for name, tensor in given.items():
        if tensor is not None and name not in ("k_cache", "v_cache"):
            (directory / name).write_bytes(raw_bytes(tensor))
    config = run(program, str(directory), str(ctas), str(seed), seconds=seconds).split()
    out = torch.frombuffer(bytearray((directory / "out").read_bytes()) or bytearray(2), dtype=case.out_dtype)
    out = out[: case.B * case.S * case.N * case.D].reshape(case.B, case.S, case.N * case.D)
    return Result(out, LaunchConfig(*map(int, config)) if config else None)


def check(
    program: Path, directory: Path, case: Case, *, tensors: Tensors | None = None, expected: Expected | None = None,
    rounded_queries: bool = False, **how: int,
) -> Result:  # fmt: skip
    """Compares a call with float64, or with what is `expected`.

    `how` is the GPU's size, the order of threads and the time limit.
    """
    tensors = tensors or draw(case)
    result = call(program, directory, case, tensors, **how)
    assert_close(result.out, *(expected or expect(case, tensors, rounded_queries=rounded_queries)))
    return result


def check_order(program: Path, directory: Path, case: Case, *, ctas: int, seeds: int) -> None:
    """The order of threads, CTAs and grids changes no bit."""
    tensors = draw(case)
    outputs = [call(program, directory / str(seed), case, tensors, ctas=ctas, seed=seed).out for seed in range(seeds)]
    assert all(torch.equal(out.view(torch.uint8), outputs[0].view(torch.uint8)) for out in outputs)


def check_out_of_range(
    program: Path, directory: Path, case: Case, name: str, value: int, *, rounded_queries: bool = False, **how: int
) -> None:
    """Request 1, out of range, is NaN, and the others are as they were."""
    tensors = draw(case)
    out = call(program, directory, case, out_of_range(tensors, name, value), **how).out
    assert out[1].isnan().all()
    expected = expect(case, tensors, rounded_queries=rounded_queries)
    for b in (0, 2):
        assert_close(out[b], expected.output[b], expected.tolerance[b])


def write_context(directory: Path, case: Case, tensors: Tensors) -> torch.Tensor:
    """Writes the context's memory to the sparse file `pool`, with pointers as offsets into it; returns the page table.

    A dense pool is K, then V; a cache that is smaller than the case's is its last plane.
    """
    pool, offsets, layout, table = tensors.context(case)
    parts, begin = [pool], -offsets[0]
    if case.pages is None:
        parts, begin = [tensors.k_cache, tensors.v_cache], case.cache_nbytes - pool.nbytes
        slots, L, *plane = case.cache_shape
        row = case.D * case.cache_dtype.itemsize
        plane_bytes = math.prod(plane[:2]) * row
        offsets, layout = (
            [layer * plane_bytes for layer in range(L)],
            [plane[0], L * plane_bytes, case.cache_nbytes, case.G * row, row, slots],
        )
        table = torch.arange(slots, dtype=torch.int32)[:, None]
    else:
        offsets = [offset + begin for offset in offsets]
    with (directory / "pool").open("wb") as file:
        for part in parts:
            file.seek(begin, os.SEEK_CUR)
            file.write(raw_bytes(part))
    for name, values in (("context_pointers", pointers(offsets, layout)), ("context_layout", layout)):
        (directory / name).write_bytes(raw_bytes(torch.tensor(values)))
    return table


def run(program: Path, *arguments: str, seconds: int = MOST_SECONDS) -> str:
    """Output of the program. Raises EmulationError if it stops early or takes more than `seconds` of CPU time."""
    command = ["sh", "-c", 'ulimit -S -t "$0" && exec "$@"', str(seconds), str(program), *arguments]
    environment = os.environ | {"ASAN_OPTIONS": ASAN_OPTIONS}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    if result.returncode == -signal.SIGXCPU:
        raise EmulationError(
            f"expected {' '.join(command[4:])} to end within {seconds} s of CPU time, found that it runs on"
        )
    if result.returncode != 0:
        raise EmulationError(result.stderr)
    return result.stdout


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
