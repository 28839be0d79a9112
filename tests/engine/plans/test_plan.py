# SPDX-License-Identifier: Apache-2.0
"""Which machine runs which plan, and how another one is refused."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.engine.plans.machine import Gpu
from dflash_trt.engine.plans.plan import Compatibility, Plan, check_limits, check_plan, check_precision, is_served
from dflash_trt.errors import BuildError, EngineError
from tests.checkpoint.samples import refusal
from tests.paths import FIXTURES

B300 = Gpu(name="NVIDIA B300", compute_capability="10.3")
GB300 = Gpu(name="NVIDIA GB300", compute_capability="10.3")
H200 = Gpu(name="NVIDIA H200", compute_capability="9.0")
T4 = Gpu(name="Tesla T4", compute_capability="7.5")
FILES = {"draft.onnx": "a", "model.safetensors": "b"}
PLAN = Plan(
    file="draft.plan", made_from=FILES, tensorrt="11.1.0.106", gpu="NVIDIA B300", compute_capability="10.3",
    plugin_sha256="p", workspace_bytes=1, hardware_compatibility="none", version_compatible=False, profiles=(),
)  # fmt: skip
SPEC = read_draft(FIXTURES / "tiny-gpt-oss-dflash").spec
DIRECTORY = Path("engine")


@pytest.mark.parametrize(
    ("algorithm", "sm", "words"),
    [
        ("NVFP4", (10, 0), None),
        ("NVFP4", (12, 0), None),
        ("FP8", (8, 9), None),
        ("NVFP4", (9, 0), "NVFP4: expected a GPU of SM 10.0 or newer, found SM 9.0\nhint: build --recipe fp8 or bf16"),
        ("W4A16_NVFP4", (8, 0), "expected a GPU of SM 10.0 or newer, found SM 8.0\nhint: build --recipe bf16"),
        ("FP8", (8, 6), "FP8: expected a GPU of SM 8.9 or newer, found SM 8.6"),
    ],
)
def test_precisions(algorithm: str, sm: tuple[int, int], words: str | None) -> None:
    if words is None:
        check_precision({algorithm}, "none", sm)
    else:
        assert words in refusal(lambda: check_precision({algorithm}, "none", sm), BuildError)


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
    assert [gpu for gpu in (B300, GB300, H200, T4) if is_served(plan, gpu, PLAN.tensorrt)] == served


@pytest.mark.parametrize(
    ("version", "exact", "compatible"),
    [
        ("11.1.0.106", True, True),
        ("11.1.0.106.post1", True, True),
        ("11.1.0.107", False, True),
        ("11.4.0.1", False, True),
        ("11.0.0.200", False, False),
        ("12.0.0.1", False, False),
        ("10.15.1.29", False, False),
    ],
)
def test_versions(version: str, exact: bool, compatible: bool) -> None:
    assert is_served(PLAN, B300, version) is exact
    portable = msgspec.structs.replace(PLAN, version_compatible=True)
    assert is_served(portable, B300, version) is compatible


@pytest.mark.parametrize("version", ["", "11", "²", "11.²", "9" * 5001, "11.1\n"])
def test_what_is_no_version(version: str) -> None:
    document = msgspec.to_builtins(PLAN)
    assert msgspec.convert(document, Plan) == PLAN
    with pytest.raises(msgspec.ValidationError, match=r"\$\.tensorrt"):
        msgspec.convert(document | {"tensorrt": version}, Plan)


def test_the_refusal_names_both_machines() -> None:
    message = refusal(lambda: check_plan(PLAN, DIRECTORY, FILES, H200, "11.4.0.106", "p"), EngineError)
    assert message == (
        "engine/draft.plan: built for SM 10.3 (NVIDIA B300) with TensorRT 11.1.0.106: expected it here, found SM 9.0"
        " (NVIDIA H200) with TensorRT 11.4.0.106\nhint: rebuild: dflash-trt build --plans-for engine"
    )


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("found", ["c", None])
def test_the_refusal_names_the_file_that_changed(name: str, found: str | None) -> None:
    files = {key: value for key, value in (FILES | {name: found}).items() if value}
    message = refusal(lambda: check_plan(PLAN, DIRECTORY, files, B300, PLAN.tensorrt, "p"), EngineError)  # type: ignore[arg-type]
    assert f"engine/draft.plan: built from {name}: expected sha256 {FILES[name]}, found {found}" in message


def test_the_plugin_library_is_the_one_it_was_built_with() -> None:
    check_plan(PLAN, DIRECTORY, FILES, B300, PLAN.tensorrt, "p")
    message = refusal(lambda: check_plan(PLAN, DIRECTORY, FILES, B300, PLAN.tensorrt, "q"), EngineError)
    assert "expected the plugin library it was built with, sha256 p, found q" in message
    for carried in (
        msgspec.structs.replace(PLAN, version_compatible=True),  # the plan holds the plugin
        msgspec.structs.replace(PLAN, plugin_sha256=None),  # and this one needs none
    ):
        assert not carried.needs_plugin
        check_plan(carried, DIRECTORY, FILES, B300, PLAN.tensorrt, None)
