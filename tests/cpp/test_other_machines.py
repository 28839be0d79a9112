# SPDX-License-Identifier: Apache-2.0
"""The C++ for aarch64 (Grace) and by Clang compiles without a warning, computes the same, and shares no symbol.

The module here has its stub's names and the CPU's kernels, and wrong arguments end in no signal.
"""

from __future__ import annotations

import ast
import json
import platform
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dflash_trt import _C
from tests.paths import REPOSITORY

CPUINFO = Path("/proc/cpuinfo")
AVX2 = {"avx2", "fma", "f16c"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vbmi"}


@pytest.mark.skipif(platform.machine() != "x86_64" or not CPUINFO.exists(), reason="kernels for x86, flags by Linux")
def test_the_best_kernels_that_the_cpu_runs() -> None:
    match = re.search(r"^flags\s*:(.*)$", CPUINFO.read_text(), re.MULTILINE)
    assert match
    flags = set(match[1].split())
    expected = [name for name, needed in (("avx512", AVX512), ("avx2", AVX2)) if needed <= flags]
    assert _C.cpu_features() == [*expected, "scalar"]


def test_the_stub_names_what_the_module_has() -> None:
    """dflash_trt/_C.pyi is written by hand."""
    stub = ast.parse((REPOSITORY / "dflash_trt" / "_C.pyi").read_text())
    described = {node.name for node in stub.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    constants = {ast.unparse(node.target) for node in stub.body if isinstance(node, ast.AnnAssign)}
    described |= {name for name in constants if not name.startswith("_")}
    assert described == {name for name in dir(_C) if not name.startswith("__")}


@pytest.mark.parametrize(
    ("seed", "rounds"), [(0, 30), *(pytest.param(seed, 1000, marks=pytest.mark.full) for seed in (1, 2))]
)
def test_no_call_ends_in_a_signal(seed: int, rounds: int) -> None:
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.cpp.fuzz_bindings", str(seed), str(rounds)]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-4000:]


@pytest.mark.full
@pytest.mark.skipif(platform.machine() != "x86_64", reason="kernels for x86")
def test_no_kernel_has_a_weak_symbol(tmp_path: Path) -> None:
    """A linker keeps one definition of a weak symbol such as std::min<long>: AVX-512's would crash machines without it.

    Without optimisation nothing is inlined, so every function shows that a compiler might emit.
    """
    options = ("-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", "-DDFLASH_PYTHON=OFF", "-DDFLASH_CUDA=OFF")
    configure = [tool("cmake"), "-S", str(REPOSITORY / "cpp"), "-B", str(tmp_path), *options]
    subprocess.run(configure, check=True, capture_output=True)
    commands = [
        [*shlex.split(unit["command"]), "-O0", "-o", str(tmp_path / f"{i}.o")]
        for i, unit in enumerate(json.loads((tmp_path / "compile_commands.json").read_text()))
        if "-mavx2" in unit["command"]
    ]
    assert len(commands) == 7

    def weak_symbols(command: list[str]) -> list[str]:
        subprocess.run(command, check=True, cwd=tmp_path)
        lines = subprocess.check_output([tool("nm"), "--demangle", command[-1]], text=True).splitlines()
        return [line for line in lines if line.split(maxsplit=2)[1] in ("W", "V", "u")]

    with ThreadPoolExecutor(2) as pool:
        assert [line for lines in pool.map(weak_symbols, commands) for line in lines] == []


AARCH64 = "aarch64-linux-gnu-g++"
DEBIAN = {AARCH64: "g++-aarch64-linux-gnu", "clang++": "clang", "qemu-aarch64": "qemu-user", "cmake": "cmake"}
ELSEWHERE = ("bindings/", "avx2.cpp", "avx512.cpp", "bfloat16_products.cpp")
"""Sources that need Python, or are for x86 alone."""


def tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"no {name}: apt install {DEBIAN.get(name, name)}")
    return path


def sources() -> list[Path]:
    paths = [path for room in ("cpp", "plugins") for path in (REPOSITORY / room).rglob("*.cpp")]
    return [path for path in paths if not any(part in path.as_posix() for part in ELSEWHERE)]


@pytest.mark.full
@pytest.mark.parametrize("compiler", [AARCH64, "clang++"])
def test_no_file_has_a_warning(compiler: str) -> None:
    command = [
        tool(compiler), "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-Wno-psabi",
        f"-I{REPOSITORY / 'cpp'}", f"-I{REPOSITORY / 'plugins'}",
        '-DDFLASH_HOST_CODE=""', '-DDFLASH_CUDA_ARCHITECTURES=""',
    ]  # fmt: skip

    def problems(path: Path) -> str:
        return subprocess.run([*command, str(path)], capture_output=True, text=True).stderr

    with ThreadPoolExecutor(2) as pool:
        assert [text for text in pool.map(problems, sources()) if text] == []


def build_portable(directory: Path, compiler: str, *options: str, flags: str = "-O1") -> Path:
    """portable.cpp, linked with the core that CMake builds without Python."""
    compiler_path, cmake = tool(compiler), tool("cmake")
    defines = [
        f"-DCMAKE_CXX_COMPILER={compiler_path}", "-DDFLASH_PYTHON=OFF", "-DDFLASH_CUDA=OFF", "-DDFLASH_WERROR=ON",
        f"-DCMAKE_CXX_FLAGS={flags}",
    ]  # fmt: skip
    build = directory / compiler
    for command in (
        [cmake, "-S", str(REPOSITORY / "cpp"), "-B", str(build), "-DCMAKE_BUILD_TYPE=Release", *defines, *options],
        [cmake, "--build", str(build), "--parallel", "2"],
        [compiler_path, "-std=c++20", *flags.split(), f"-I{REPOSITORY / 'cpp'}",
         str(Path(__file__).with_name("portable.cpp")), str(build / "libdflash_core.a"),
         "-pthread", "-o", str(build / "portable")],
    ):  # fmt: skip
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout[-4000:] + result.stderr
    return build / "portable"


Results = list[tuple[str, list[str]]]
"""(kind and name, values) of each line that portable.cpp prints."""


def results(*command: str) -> Results:
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    lines = [line.split() for line in run.stdout.splitlines()]
    return [(f"{line[0]} {line[1]}", line[2:]) for line in lines]


def assert_same(found: Results, expected: Results) -> None:
    assert [name for name, _ in found] == [name for name, _ in expected]
    assert len(found) == 29
    for (name, others), (_, values) in zip(found, expected, strict=True):
        if name.startswith("exact"):
            assert others == values, name
        else:
            tolerance = 2**-7 if "bfloat16" in name else 1e-4  # a bfloat16 may be rounded to its neighbour
            assert list(map(float, others)) == pytest.approx(list(map(float, values)), rel=tolerance, abs=1e-5), name


@pytest.mark.full
@pytest.mark.parametrize("compiler", [AARCH64, "clang++"])
def test_it_computes_the_same(compiler: str, tmp_path: Path) -> None:
    here = results(str(build_portable(tmp_path, "g++")))
    if compiler == AARCH64:
        qemu = tool("qemu-aarch64")
        system = ("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64")
        there = results(qemu, "-L", "/usr/aarch64-linux-gnu", str(build_portable(tmp_path, compiler, *system)))
    else:
        there = results(str(build_portable(tmp_path, compiler)))
    assert_same(there, here)


@pytest.mark.full
def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    """In the kernels of each instruction set that this CPU has, and these agree.

    The plugin's kernels run under both sanitizers in every test of the emulator.
    """
    flags = "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all"
    program = str(build_portable(tmp_path, "g++", "-DCMAKE_CXX_FLAGS_RELEASE=", flags=flags))
    scalar = results(program, "scalar")
    for isa in ("best", *_C.cpu_features()):  # the best linear layer in BF16 may have products of its own
        assert_same(results(program, isa), scalar)
