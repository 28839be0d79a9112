# SPDX-License-Identifier: Apache-2.0
"""plugins/ configures and builds on its own; nvcc makes every kernel without a warning and without a spill."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.gpu.launches import runs_on
from tests.paths import REPOSITORY

ARCHITECTURES = ("90a", "100f", "120a", "90-virtual")
MACHINE_CODE = ARCHITECTURES[:-1]
HEAD_DIMS = (64, 96, 128, 256)
WARPS = {64: 6, 96: 4, 128: 4, 256: 4}  # of an attention CTA; two of them are to share an SM
SM_REGISTERS = 65536


def configure(build: Path, **options: str) -> subprocess.CompletedProcess[str]:
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("no cmake: install it")
    defines = [f"-D{name}={value}" for name, value in ({"DFLASH_WERROR": "ON"} | options).items()]
    command = [cmake, "-S", str(REPOSITORY / "plugins"), "-B", str(build), *defines]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"DFLASH_CUDA": "maybe"}, "DFLASH_CUDA: expected ON, OFF or AUTO, found maybe"),
        ({"DFLASH_CUDA": "OFF", "TENSORRT_ROOT": "/nowhere"}, "expected /nowhere/include/NvInferRuntime.h"),
    ],
    ids=("cuda", "tensorrt"),
)
def test_wrong_options_are_refused(options: dict[str, str], message: str, tmp_path: Path) -> None:
    result = configure(tmp_path, **options)
    assert result.returncode != 0
    assert message in " ".join(result.stderr.split())


@pytest.mark.full
def test_a_build_without_nvcc_and_without_the_sdk(tmp_path: Path) -> None:
    result = configure(tmp_path, DFLASH_CUDA="OFF")
    assert result.returncode == 0, result.stderr
    assert "dflash_trt plugins: kernels for [], TensorRT headers []" in result.stdout
    subprocess.run(["cmake", "--build", str(tmp_path)], check=True, capture_output=True)
    assert (tmp_path / "libdflash_trt_plugins.so").is_file()


@dataclass(frozen=True)
class Kernel:
    """What ptxas says of one kernel for one architecture."""

    name: str
    architecture: str
    stack: int
    spills: int
    registers: int


REPORT = re.compile(
    r"Compiling entry function '\w*?(attention|combine|append)\w*' for 'sm_(\w+)'\n.*\n"
    r"\s*(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\n"
    r".*Used (\d+) registers"
)


def kernels(ptxas: str) -> list[Kernel]:
    return [
        Kernel(name, architecture, int(stack), int(stores) + int(loads), int(registers))
        for name, architecture, stack, stores, loads, registers in REPORT.findall(ptxas)
    ]


def compile_source(build: Path, source: str, architectures: tuple[str, ...]) -> list[Kernel]:
    """Runs nvcc as CMake would, with ptxas telling what it made."""
    if shutil.which(os.environ.get("CUDACXX", "nvcc")) is None:
        pytest.skip("no nvcc: install the CUDA toolkit")
    result = configure(
        build,
        DFLASH_CUDA="ON",
        DFLASH_CUDA_ARCHITECTURES=";".join(architectures),
        CMAKE_CUDA_FLAGS="-Xptxas=-v",
        CMAKE_EXPORT_COMPILE_COMMANDS="ON",
    )
    assert result.returncode == 0, result.stderr
    (entry,) = (
        entry
        for entry in json.loads((build / "compile_commands.json").read_text())
        if entry["file"].endswith(f"/{source}")
    )
    command = shlex.split(entry["command"])
    (build / command[command.index("-o") + 1]).parent.mkdir(parents=True, exist_ok=True)
    result = subprocess.run(command, cwd=entry["directory"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    told = result.stdout + result.stderr
    assert "wgmma.mma_async instructions are serialized" not in told  # these are no warnings to ptxas
    assert "wait is injected" not in told
    return kernels(told)


@pytest.mark.full
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_nvcc_neither_warns_nor_spills(head_dim: int, tmp_path: Path) -> None:
    made = compile_source(tmp_path, f"head_dim_{head_dim}.cu", ARCHITECTURES)
    # Two formats of the block, and of attention two of the cache for each.
    expected = [
        (name, arch) for arch in ARCHITECTURES if arch in MACHINE_CODE for name in ("attention",) * 4 + ("combine",) * 2
    ]
    assert sorted((kernel.name, kernel.architecture) for kernel in made) == sorted(expected)
    assert [kernel for kernel in made if kernel.stack or kernel.spills] == []
    most = SM_REGISTERS // (2 * 32 * WARPS[head_dim])
    assert [kernel for kernel in made if kernel.name == "attention" and kernel.registers > most] == []


@pytest.mark.full
def test_the_append_neither_warns_nor_spills(tmp_path: Path) -> None:
    made = compile_source(tmp_path, "append.cu", ARCHITECTURES)
    assert sorted(kernel.architecture for kernel in made) == sorted(MACHINE_CODE)
    assert [kernel for kernel in made if kernel.stack or kernel.spills] == []


@pytest.mark.full
@pytest.mark.parametrize(("head_dim", "rows", "teams"), [(64, 3, 3), (128, 2, 2)])
def test_the_kernel_of_sm_90a_neither_warns_nor_spills(head_dim: int, rows: int, teams: int, tmp_path: Path) -> None:
    made = compile_source(tmp_path, f"wgmma_{head_dim}.cu", ARCHITECTURES)
    # For each number of rows two formats of the block, and for each of them two of the cache.
    assert [(kernel.name, kernel.architecture) for kernel in made] == [("attention", "90a")] * 4 * rows
    assert [kernel for kernel in made if kernel.stack or kernel.spills] == []
    assert max(kernel.registers for kernel in made) <= SM_REGISTERS // (128 * teams)


@pytest.mark.parametrize(
    ("capability", "runs"), [((9, 0), True), ((10, 0), True), ((10, 3), True), ((12, 0), True), ((8, 9), False)]
)
def test_the_gpus_that_the_architectures_are_for(capability: tuple[int, int], runs: bool) -> None:
    """DGX B300 is 10.3, H100 and H200 are 9.0; nothing is left to compile at run time."""
    assert runs_on(MACHINE_CODE, *capability) == runs
    assert not runs_on(("103a",), 10, 0)


def test_later_gpus_run_what_their_driver_compiles() -> None:
    for capability in ((11, 0), (12, 1), (13, 0)):
        assert not runs_on(MACHINE_CODE, *capability)
        assert runs_on(ARCHITECTURES, *capability)
    assert not runs_on(ARCHITECTURES, 8, 9)
