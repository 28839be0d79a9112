# SPDX-License-Identifier: Apache-2.0
"""plugins/ is built, tested, installed and linked with CMake alone, and compiles against TensorRT's own headers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.plugins import abi
from tests.plugins.cases import GPT_OSS
from tests.plugins.test_compile import configure

pytestmark = pytest.mark.full

CMAKE = """
cmake_minimum_required(VERSION 3.25)
project(consumer LANGUAGES CXX)
set(CMAKE_CXX_STANDARD 20)
find_package(dflash_trt_plugins 5 REQUIRED)
add_executable(consumer consumer.cpp)
target_link_libraries(consumer dflash_trt_plugins::dflash_trt_plugins dflash_trt_plugins::dflash_plugin_core)
"""
CONSUMER = """
#include <cstdio>
#include <kv_injection_attention/check.h>
#include <kv_injection_attention/kernel.h>
using namespace dflash::kv_injection;
int main() {
  Params params{};
  std::printf("%s\\n", check_params(params)->c_str());
  params.batch = 1;
  std::printf("%s\\n", dflash_launch_attention(params, Kernel::kBest));
}
"""


def run(*command: str | Path) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(folder: Path, **options: str) -> Path:
    result = configure(folder, DFLASH_CUDA="OFF", **options)
    assert result.returncode == 0, result.stderr
    run("cmake", "--build", folder)
    return folder


def test_a_stranger_builds_tests_installs_and_links_it(tmp_path: Path) -> None:
    built = build(tmp_path / "build")
    assert "100% tests passed, 0 tests failed out of 1" in run("ctest", "--test-dir", built)
    prefix = tmp_path / "prefix"
    run("cmake", "--install", built, "--prefix", prefix)
    built.rename(tmp_path / "moved")  # nothing installed may lead back to it
    (tmp_path / "CMakeLists.txt").write_text(CMAKE)
    (tmp_path / "consumer.cpp").write_text(CONSUMER)
    run("cmake", "-S", tmp_path, "-B", tmp_path / "consumer", f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", tmp_path / "consumer")
    refused, not_run = run(tmp_path / "consumer" / "consumer").splitlines()
    assert refused == "block: expected 1 to 32, found 0"
    assert not_run.startswith("this library was built without CUDA")


def tensorrt_root() -> Path:
    root = Path(os.environ.get("TENSORRT_ROOT", "/usr/local/tensorrt"))
    if not (root / "include" / "NvInferRuntime.h").is_file():
        pytest.skip("no TensorRT headers: point TENSORRT_ROOT to a folder that has them in include/")
    return root


def test_the_plugin_is_the_same_with_tensorrts_own_headers(tmp_path: Path) -> None:
    """Virtual functions are called by their slots, which our declaration and TensorRT's have to agree on."""
    found = []
    for name, options in (("ours", {}), ("sdk", {"TENSORRT_ROOT": str(tensorrt_root())})):
        creator = abi.Creator(build(tmp_path / name, **options) / "libdflash_trt_plugins.so")
        values = [abi.attribute(name, value) for name, value in GPT_OSS.attributes().items()]
        plugin = creator.create(values, abi.BUILD)
        assert plugin is not None
        shape = plugin.output_shape([abi.DimsExprs(2, (7, 8))] * 9, {GPT_OSS.N * GPT_OSS.D: 42})
        found.append(
            (creator.names(), creator.field_names(), plugin.names(), plugin.serialized(), plugin.tactics(),
             plugin.num_outputs(), shape[0], list(shape[1].d[:2]), plugin.output_types([abi.BF16] * 9))
        )  # fmt: skip
    assert found[0] == found[1]
    assert found[0][-2:] == ([7, 42], (0, [abi.BF16]))
