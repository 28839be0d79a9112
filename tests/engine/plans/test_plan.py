# SPDX-License-Identifier: Apache-2.0
"""Plans and the machines that run them, refusals of others, and the GPUs that the driver (a fake libcuda) reports."""

import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.engine.plans import machine
from dflash_trt.engine.plans.build_checks import check_limits
from dflash_trt.engine.plans.machine import Gpu, check_precision, gpu, parse_gpus, visible_gpus
from dflash_trt.engine.plans.plan import Compatibility, Here, Plan, check_plan, is_served
from dflash_trt.engine.plans.tensorrt_api import RuntimeName
from dflash_trt.errors import BuildError, EngineError, MissingDependencyError
from tests.checkpoint.samples import refusal
from tests.contract.machine import RTX_5090
from tests.paths import FIXTURES

# Signatures: cuda.h 13.0.
CUDA = """
#include <stdio.h>
#include <string.h>
int cuInit(unsigned int flags) { return flags != 0 ? 1 : STATUS; }
int cuDeviceGetCount(int* count) { *count = COUNT; return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = 10 + ordinal; return 0; }
int cuDeviceGetName(char* name, int length, int device) {
  snprintf(name, length, "GPU of handle %d", device);
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = attribute == 75 ? device : attribute == 76 ? 3 : -1;
  return 0;
}
int cuDriverGetVersion(int* version) { *version = 12090; return 0; }
int cuDeviceGetUuid_v2(char* uuid, int device) { memset(uuid, device, 16); return 0; }
"""


def driver(directory: Path, monkeypatch: pytest.MonkeyPatch, *, count: int, status: int = 0) -> None:
    source, library = directory / "cuda.c", directory / f"libcuda-{count}-{status}.so"
    source.write_text(CUDA)
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    define = [f"-DCOUNT={count}", f"-DSTATUS={status}"]
    subprocess.run([compiler, "-shared", "-fPIC", *define, "-o", str(library), str(source)], check=True)
    monkeypatch.setattr(machine, "DRIVER", str(library))


def test_visible_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(tmp_path, monkeypatch, count=2)
    first = Gpu(name="GPU of handle 10", compute_capability="10.3", uuid="0a0a0a0a-0a0a-0a0a-0a0a-0a0a0a0a0a0a")
    assert visible_gpus()[0] == gpu() == first
    assert gpu(1).name == "GPU of handle 11"
    assert machine.driver_version() == "12.9"
    message = refusal(lambda: gpu(2), MissingDependencyError)
    assert "expected GPU 2, found 2 that this process may use\nhint: look at CUDA_VISIBLE_DEVICES" in message


def test_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(tmp_path, monkeypatch, count=0)
    assert visible_gpus() == []
    assert "expected GPU 0, found 0" in refusal(gpu, MissingDependencyError)


def test_a_driver_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(tmp_path, monkeypatch, count=1, status=100)
    assert "cuInit: expected 0, found error 100" in refusal(visible_gpus, MissingDependencyError)


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "DRIVER", "libcuda-of-nobody.so.1")
    message = refusal(visible_gpus, MissingDependencyError)
    assert "no NVIDIA driver found (libcuda-of-nobody.so.1)" in message
    assert "https://www.nvidia.com/drivers" in message


B300 = Gpu(name="NVIDIA B300", compute_capability="10.3")
GB300 = Gpu(name="NVIDIA GB300", compute_capability="10.3")
H200 = Gpu(name="NVIDIA H200", compute_capability="9.0")
L40S = Gpu(name="NVIDIA L40S", compute_capability="8.9")
GB10 = Gpu(name="NVIDIA GB10", compute_capability="12.1")
T4 = Gpu(name="Tesla T4", compute_capability="7.5")
FILES = {"draft.onnx": "a", "model.safetensors": "b"}
PLAN = Plan(
    file="draft.plan", made_from=FILES, runtime="tensorrt", version="11.1.0.106", gpu="NVIDIA B300",
    compute_capabilities=("10.3",), plugin_sha256="p", workspace_bytes=1, hardware_compatibility="none",
    version_compatible=False, profiles=(),
)  # fmt: skip
RTX_PLAN = msgspec.structs.replace(
    PLAN, runtime="tensorrt_rtx", version="1.7.1.116", gpu=None, compute_capabilities=("8.9", "12.0")
)
SPEC = read_draft(FIXTURES / "tiny-gpt-oss-dflash").spec
DIRECTORY = Path("engine")


def here(
    gpu: Gpu = B300, version: str = PLAN.version, runtime: RuntimeName = "tensorrt", plugin: str | None = "p"
) -> Here:
    return Here(runtime=runtime, version=version, gpu=gpu, plugin_sha256=plugin)


@pytest.mark.parametrize(
    ("text", "found"),
    [("sm89", ("8.9",)), ("sm120,sm89", ("8.9", "12.0")), ("RTX 5090,rtx-pro-6000", ("12.0",)),
     ("gb10,A100,l40s,rtx3090,rtx4090", ("8.0", "8.6", "8.9", "12.1"))],
)  # fmt: skip
def test_names_of_gpus(text: str, found: tuple[str, ...]) -> None:
    assert parse_gpus(text) == found


@pytest.mark.parametrize("text", ["", "sm90", "h100", "portable", "sm89,,sm120", "12"])
def test_gpus_that_tensorrt_rtx_does_not_serve(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected sm80 .* --backend tensorrt"):
        parse_gpus(text)


@pytest.mark.parametrize(
    ("algorithm", "sm", "words"),
    [("NVFP4", (10, 0), None), ("NVFP4", (12, 0), None), ("FP8", (8, 9), None),
     ("NVFP4", (9, 0), "NVFP4: expected a GPU of SM 10.0 or newer, found SM 9.0\n"
      "hint: build --recipe fp8, int4-w4a16 or bf16"),
     ("NVFP4", (8, 0), "expected a GPU of SM 10.0 or newer, found SM 8.0\nhint: build --recipe int4-w4a16 or bf16"),
     ("W4A16_NVFP4", (12, 0), "W4A16_NVFP4: expected weights that TensorRT multiplies as they are"),
     ("FP8", (8, 6), "FP8: expected a GPU of SM 8.9 or newer, found SM 8.6")],
)  # fmt: skip
def test_precisions(algorithm: str, sm: tuple[int, int], words: str | None) -> None:
    if words is None:
        check_precision({algorithm}, [sm])
    else:
        assert words in refusal(lambda: check_precision({algorithm}, [sm]), BuildError)


@pytest.mark.parametrize(
    ("facts", "batch", "context", "words"),
    [
        ({}, 256, 131072, None),
        ({"head_dim": 256, "block_size": 32}, 1, 1, None),
        ({"head_dim": 80}, 1, 1, "plugin's head_dim: expected 64, 96, 128 or 256, found 80\nhint: run the draft"),
        ({"block_size": 33}, 1, 1, "plugin's block: expected 1 to 32, found 33\nhint: run the draft in ONNX"),
        ({}, 257, 1, "plugin's batch: expected 0 to 256, found 257\nhint: lower max_batch_size"),
        ({}, 1, 131073, "max_seq_len: expected at most 131072, which the attention plugin reads, found 131073"),
    ],
)
def test_limits_of_the_plugin(facts: dict[str, int], batch: int, context: int, words: str | None) -> None:
    """Asked of the plugin's own check; TensorRT would ask it after minutes, on the GPU machine."""
    spec = msgspec.structs.replace(SPEC, **facts)
    if words is None:
        check_limits(spec, batch, context)
    else:
        assert words in refusal(lambda: check_limits(spec, batch, context), BuildError)


@pytest.mark.parametrize(
    ("compatibility", "served"),
    [("none", [B300]), ("same_compute_capability", [B300, GB300]), ("ampere_plus", [B300, GB300, H200])],
)
def test_gpus(compatibility: Compatibility, served: list[Gpu]) -> None:
    plan = msgspec.structs.replace(PLAN, hardware_compatibility=compatibility)
    assert [gpu for gpu in (B300, GB300, H200, T4) if is_served(plan, here(gpu))] == served


@pytest.mark.parametrize(("gpu", "is_right"), [(L40S, True), (RTX_5090, True), (B300, False), (GB10, False)])
def test_gpus_of_a_list(gpu: Gpu, is_right: bool) -> None:
    """Models of any name, with a compute capability of the list, under the same release."""
    assert is_served(RTX_PLAN, here(gpu, "1.7.1.116", "tensorrt_rtx")) is is_right
    assert not is_served(RTX_PLAN, here(gpu, "1.7.1.117", "tensorrt_rtx"))
    assert not is_served(RTX_PLAN, here(gpu, "1.7.1.116"))


@pytest.mark.parametrize(
    ("version", "exact", "compatible"),
    [("11.1.0.106", True, True), ("11.1.0.106.post1", True, True), ("11.1.0.107", False, True),
     ("11.4.0.1", False, True), ("11.0.0.200", False, False), ("12.0.0.1", False, False), ("10.15.1.29", False, False)],
)  # fmt: skip
def test_versions(version: str, exact: bool, compatible: bool) -> None:
    assert is_served(PLAN, here(B300, version)) is exact
    portable = msgspec.structs.replace(PLAN, version_compatible=True)
    assert is_served(portable, here(B300, version)) is compatible


@pytest.mark.parametrize("version", ["", "11", "²", "11.²", "9" * 5001, "11.1\n"])
def test_what_is_no_version(version: str) -> None:
    document = msgspec.to_builtins(PLAN)
    assert msgspec.convert(document, Plan) == PLAN
    with pytest.raises(msgspec.ValidationError, match=r"\$\.version"):
        msgspec.convert(document | {"version": version}, Plan)


def test_the_refusal_names_both_machines() -> None:
    message = refusal(lambda: check_plan(PLAN, DIRECTORY, FILES, here(H200, "11.4.0.106")), EngineError)
    assert message == (
        "engine/draft.plan: built for SM 10.3 (NVIDIA B300) with TensorRT 11.1.0.106: expected it here, found SM 9.0"
        " (NVIDIA H200) with TensorRT 11.4.0.106\nhint: rebuild: dflash-trt build --plans-for engine"
    )
    message = refusal(lambda: check_plan(RTX_PLAN, DIRECTORY, FILES, here(H200)), EngineError)
    assert (
        "built for SM 8.9, 12.0 with TensorRT-RTX 1.7.1.116: expected it here, found SM 9.0 (NVIDIA H200) with TensorRT"
        in message
    )


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("found", ["c", None])
def test_the_refusal_names_the_file_that_changed(name: str, found: str | None) -> None:
    files = {key: value for key, value in (FILES | {name: found}).items() if value}
    message = refusal(lambda: check_plan(PLAN, DIRECTORY, files, here()), EngineError)  # type: ignore[arg-type]
    assert f"engine/draft.plan: built from {name}: expected sha256 {FILES[name]}, found {found}" in message


def test_the_plugin_library_is_the_one_it_was_built_with() -> None:
    check_plan(PLAN, DIRECTORY, FILES, here())
    message = refusal(lambda: check_plan(PLAN, DIRECTORY, FILES, here(plugin="q")), EngineError)
    assert "expected the plugin it was built with, host code sha256 p, found q" in message
    for carried in (
        msgspec.structs.replace(PLAN, version_compatible=True),  # the plan holds the plugin
        msgspec.structs.replace(PLAN, plugin_sha256=None),  # this plan needs none
    ):
        assert not carried.needs_plugin
        check_plan(carried, DIRECTORY, FILES, here(plugin=None))
