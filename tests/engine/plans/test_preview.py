# SPDX-License-Identifier: Apache-2.0
"""What --dry-run prints, on a machine without TensorRT."""

from __future__ import annotations

import shlex
from pathlib import Path

import msgspec
import pytest

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.engine.plans.compile import TimingCache
from dflash_trt.engine.plans.plan import PlanOptions
from dflash_trt.engine.plans.preview import trtexec_commands
from dflash_trt.engine.plans.tensorrt_api import installed_library

OPTIONS = PlanOptions(max_batch_size=2, max_seq_len=64, max_num_tokens=100, hardware_compatibility="ampere_plus")


def commands(draft_dir: Path, engine: Path, options: PlanOptions, cache: TimingCache | None) -> list[list[str]]:
    draft = read_draft(draft_dir).spec
    return [shlex.split(line) for line in trtexec_commands(engine, draft, 1, options, cache)]


def test_trtexec_commands(draft_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library, engine = tmp_path / "plugin.so", tmp_path / "engine"
    library.touch()
    monkeypatch.setenv("DFLASH_TRT_PLUGIN", str(library))
    context, draft = commands(draft_dir, engine, OPTIONS, TimingCache(file=Path("t.cache")))
    common = [
        "--stronglyTyped",
        "--skipInference",
        "--profilingVerbosity=detailed",
        "--maxAuxStreams=0",
        "--memPoolSize=workspace:4096M",
    ]
    assert context[:8] == [
        "trtexec", f"--onnx={engine / 'context.onnx'}", f"--saveEngine={engine / 'context.plan'}", *common
    ]  # fmt: skip
    assert context[8:14] == [
        "--hardwareCompatibilityLevel=ampere+", "--timingCacheFile=t.cache", "--profile=0",
        *(f"--{bound}Shapes=target_hidden:16x144,positions:16" for bound in ("min", "opt", "max")),
    ]  # fmt: skip
    assert f"--dynamicPlugins={library}" in draft
    assert not any(word.startswith("--setPluginsToSerialize") for word in draft)
    assert [word for word in draft if word.startswith("--profile")] == ["--profile=0", "--profile=1"]
    assert "context_pointers:3,context_layout:5,page_table:1x1" in next(
        word for word in draft if word.startswith("--minShapes")
    )


def test_portable_and_reproducible(draft_dir: Path, tmp_path: Path) -> None:
    options = msgspec.structs.replace(OPTIONS, version_compatible=True, hardware_compatibility="none")
    cache = TimingCache(file=Path("t"), reproducible=True)
    context, draft = commands(draft_dir, tmp_path / "engine", options, cache)
    library = installed_library()  # where it will be
    plugin = {f"--setPluginsToSerialize={library}", f"--dynamicPlugins={library}"}  # the first alone registers nothing
    assert {"--versionCompatible", *plugin, "--errorOnTimingCacheMiss"} <= set(draft)
    assert not plugin & set(context)
    assert not any(word.startswith("--hardwareCompatibilityLevel") for word in context)
