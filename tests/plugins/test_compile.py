# SPDX-License-Identifier: Apache-2.0
"""plugins/ configures and builds on its own; nvcc makes every kernel without a warning and without a spill.

Without a GPU: what tests/gpu gives the kernels is right, and the kernel's benchmark and counter start.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from benchmarks.bench_kv_injection_attention import ahead_rows, short_rows
from benchmarks.bench_kv_injection_attention import main as bench
from dflash_trt.engine.plans.tensorrt_api import installed_library
from tests.gpu.launches import PluginLaunch
from tests.gpu.test_kernel import CHAIN, reading
from tests.gpu.test_sanitizer import calls
from tests.paths import REPOSITORY
from tests.plugins.abi import Creator
from tests.plugins.cases import GPT_OSS
from tests.plugins.compare import assert_close
from tests.plugins.kernel.oracle import expect
from tests.plugins.tensors import draw, reference
from tools.count_kernel import main as count
from tools.kernel_phases import build as build_phases
from tools.kernel_phases import durations
from tools.kernel_phases import main as kernel_phases
from tools.sass import cheapest_path, parse


@pytest.mark.parametrize(
    ("command", "options"),
    [(bench, ["--dry-run", "--only", "a rank of 8"]), (count, ["--help"]), (kernel_phases, ["--help"])],
)
def test_it_starts(command: click.Command, options: list[str]) -> None:
    result = CliRunner().invoke(command, options)
    assert result.exit_code == 0, result.output


def test_the_borders_of_kernels_that_nobody_is_given_yet() -> None:
    found = [(512, 0.8, "1"), (512, 1.005, "64"), (2048, 0.9, "1"), (1024, 0.9, "1"), (4096, 0.7, "4")]
    assert (short_rows(found), ahead_rows(found)) == (4096, 512)
    found.append((1024, 1.2, "64"))
    assert (short_rows(found), ahead_rows(found)) == (512, 2048)
    found += [(512, 1.1, "4"), (4096, 1.1, "1")]
    assert (short_rows(found), ahead_rows(found)) == (0, None)


def test_a_plugin_of_another_commit_is_called_with_what_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the launch, for which it needs a GPU."""
    case = replace(GPT_OSS, context_lengths=(2000, 30))
    launch = PluginLaunch(installed_library(), case, draw(case))
    assert launch.workspace.tensor.numel() > case.B * case.S * case.N * case.D
    known = [(name, 0) for name in case.attributes() if name != "has_qkv_bias"]
    monkeypatch.setattr(Creator, "field_names", lambda self: known)
    with pytest.raises(ValueError, match="expected a plugin of gpt-oss"):  # ours wants to know of the bias
        PluginLaunch(installed_library(), case, draw(case))
    biased = replace(case, bias=True)
    with pytest.raises(ValueError, match="expected a plugin that has has_qkv_bias"):
        PluginLaunch(installed_library(), biased, draw(biased))


@pytest.mark.full
def test_every_kernel_of_sm_90a_is_counted() -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc: install the CUDA toolkit")
    result = CliRunner().invoke(count, ["--drafter", "gpt-oss", "--arch", "90a"])
    assert result.exit_code == 0, result.output
    rows = [[cell.strip() for cell in line.split("│")] for line in result.output.splitlines() if "sm_90a" in line]
    assert {row[3] for row in rows} == {"mma", "short", "wgmma", "ahead", "and combine", "append"}


def test_a_call_reads_the_output_of_the_call_in_front() -> None:
    first, other = draw(CHAIN), draw(replace(CHAIN, seed=1))
    chained = reading(other, reference(CHAIN, first))
    assert_close(reference(CHAIN, chained), *expect(CHAIN, chained))
    with pytest.raises(AssertionError):
        assert_close(reference(CHAIN, chained), *expect(CHAIN, other))


@pytest.mark.parametrize(
    ("capability", "kernels", "caches"),
    [
        ((9, 0), {"best", "mma", "short", "wgmma", "ahead"}, 3),
        ((10, 3), {"best", "short"}, 3),
        ((8, 0), {"best", "short"}, 2),
    ],
)
def test_the_sanitizer_sees_every_kernel_of_the_gpu(
    capability: tuple[int, int], kernels: set[str], caches: int
) -> None:
    made = calls(capability, ("best", "mma", "wgmma", "short", "ahead"))
    assert {kernel for _, _, kernel in made} == kernels
    assert {kernel for _, _, kernel in calls(capability, ("best", "mma"))} == kernels & {"best", "mma"}
    assert len({case.cache_dtype for case, _, _ in made}) == caches


ARCHITECTURES = ("80", "86", "89", "90a", "100f", "120f", "90-virtual")
MACHINE_CODE = ARCHITECTURES[:-1]
HEAD_DIMS = (64, 96, 128, 256)
WARPS = {64: 6, 96: 4, 128: 4, 256: 4}  # registers of an attention CTA; two CTAs must share an SM
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
    """Output of ptxas for one kernel and architecture."""

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


def compile_source(build: Path, source: str, architectures: tuple[str, ...], **options: str) -> list[Kernel]:
    """Runs nvcc as CMake would, with ptxas telling what it made."""
    if shutil.which(os.environ.get("CUDACXX", "nvcc")) is None:
        pytest.skip("no nvcc: install the CUDA toolkit")
    result = configure(
        build, DFLASH_CUDA="ON", DFLASH_CUDA_ARCHITECTURES=";".join(architectures), CMAKE_CUDA_FLAGS="-Xptxas=-v",
        CMAKE_EXPORT_COMPILE_COMMANDS="ON", **options,
    )  # fmt: skip
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
    names = ("attention",) * 4 + ("combine",) * 2  # two formats of the block, and of the cache two for each
    expected = [(name, arch) for arch in ARCHITECTURES if arch in MACHINE_CODE for name in names]
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
    assert {(kernel.name, kernel.architecture) for kernel in made} == {("attention", "90a")}
    assert len(made) == 4 * rows  # for each number of rows two formats of the block, for each of them two of the cache
    assert [kernel for kernel in made if kernel.stack or kernel.spills] == []
    assert [kernel for kernel in made if kernel.registers > SM_REGISTERS // (128 * teams)] == []


@pytest.mark.full
@pytest.mark.parametrize(
    ("source", "architectures", "count"), [("short.cu", MACHINE_CODE, 8), ("ahead.cu", ("90a",), 6)]
)
def test_kernels_that_no_gpu_has_run_neither_warn_nor_spill(
    source: str, architectures: tuple[str, ...], count: int, tmp_path: Path
) -> None:
    """Short contexts' for head_dim 64 and 128; with products ahead for 64 rows and, with head_dim 64, 80."""
    made = compile_source(tmp_path, source, ARCHITECTURES, DFLASH_EXPERIMENTAL_KERNELS="ON")
    assert Counter(kernel.architecture for kernel in made) == dict.fromkeys(architectures, count)
    assert [kernel for kernel in made if kernel.stack or kernel.spills] == []
    assert [kernel for kernel in made if source == "ahead.cu" and kernel.registers > SM_REGISTERS // (128 * 2)] == []


# A branch around an instruction, a loop of two, an early end and the last.
SASS = """
        /*0000*/                   LDG.E R1, [R2.64] ;
        /*0010*/              @!P0 BRA `(.L_x_1) ;
        /*0020*/                   MUFU.EX2 R3, R4 ;
.L_x_1:
        /*0030*/                   STS [R5], R3 ;
        /*0040*/               @P1 BRA `(.L_x_1) ;
        /*0050*/               @P2 EXIT ;
        /*0060*/                   STG.E [R2.64], R1 ;
        /*0070*/                   EXIT ;
"""


@pytest.mark.parametrize(
    ("sequence", "blocks"),
    [
        ([], [0, 2, 3]),
        (["LDG", "STG"], [0, 2, 3, 4]),
        (["MUFU"], [0, 1, 2, 3]),
        (["STS", "STS", "STS", "STG"], [0, 2, 2, 2, 3, 4]),
    ],
)
def test_the_cheapest_path_to_an_end(sequence: list[str], blocks: list[int]) -> None:
    assert cheapest_path(parse(SASS), sequence) == blocks


def test_no_path_issues_what_is_behind_it() -> None:
    with pytest.raises(ValueError, match=r"no path issues \('STG', 1\), \('LDG', 1\)"):
        cheapest_path(parse(SASS), ["STG", "LDG"])


def test_durations_of_phases() -> None:
    """One warp without steps of the context that has the block, and one with the stamp of an earlier span's block."""
    lines = ["0 0 0 0 10 30 60 100 - 101 140 150 170", "0 0 1 5 10 30 70 100 120 125 90 150 160"]
    cycles = durations(lines)
    assert list(cycles) == [
        "GridBefore", "Span", "Loads", "Rows", "FirstStep", "Context", "Block", "Results", "Merge", "all",
    ]  # fmt: skip
    assert cycles["GridBefore"] == [10, 5]
    assert (cycles["FirstStep"], cycles["Context"], cycles["Block"]) == ([20], [1, 5], [39])
    assert (cycles["Results"], cycles["all"]) == ([10, 25], [170, 155])


@pytest.mark.full
@pytest.mark.parametrize(("drafter", "cache"), [("gpt-oss", "bf16"), ("qwen3", "fp8")])
def test_stamps_do_not_make_the_kernel_spill(drafter: str, cache: str, tmp_path: Path) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc: install the CUDA toolkit")
    assert " 0 bytes spill stores, 0 bytes spill loads" in build_phases(drafter, cache, tmp_path / "program")
