# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt build`, quantising on the way."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.engine.manifest import read_manifest
from tests.cli.commands import run
from tests.paths import FIXTURES

DRAFT, TARGET = FIXTURES / "tiny-gpt-oss-dflash", FIXTURES / "tiny-gpt-oss"


def test_recipe_is_quantize_and_build(tmp_path: Path) -> None:
    """In one go or in two: the same engine but for what the manifest says of its source."""
    at_once = run("build", DRAFT, "--target", TARGET, "-o", tmp_path / "engine", "--recipe", "nvfp4")
    assert (at_once.returncode, at_once.stdout) == (0, f"{tmp_path / 'engine'}\n")
    assert "15 linear layers: 14 NVFP4, 1 dense" in at_once.stderr
    assert run("quantize", DRAFT, "-o", tmp_path / "draft", "--recipe", "nvfp4").returncode == 0
    assert run("build", tmp_path / "draft", "--target", TARGET, "-o", tmp_path / "other").returncode == 0

    manifest, other = read_manifest(tmp_path / "engine"), read_manifest(tmp_path / "other")
    assert manifest.sha256 == other.sha256
    assert (manifest.source.name, manifest.source.recipe) == ("tiny-gpt-oss-dflash", "nvfp4")
    assert manifest.source.sha256.keys() == {"config.json", "model.safetensors"}
    assert manifest.quantization == read_draft(tmp_path / "draft").quantization
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft", "engine", "other"]


def test_an_engine_names_its_target(tmp_path: Path) -> None:
    """Commands need no --target while it is where it was and the same; a checkpoint of the same facts is accepted."""
    target, engine = tmp_path / "target", tmp_path / "engine"
    shutil.copytree(TARGET, target)
    assert run("build", DRAFT, "--target", target, "-o", engine).returncode == 0
    generate = ("generate", engine, "a b", "--max-tokens", 4)
    assert run(*generate).returncode == 0

    config = target / "config.json"
    config.write_text(config.read_text() + "\n")
    assert f"{config} has changed since {engine} was built" in (changed := run(*generate)).stderr
    assert f"accept it as it is: --target {target}" in changed.stderr
    target.rename(tmp_path / "moved")
    assert f"built for target {target}, which is no directory here" in (missing := run(*generate)).stderr
    assert "hint: give --target" in missing.stderr
    assert run(*generate, "--target", tmp_path / "moved").returncode == 0

    manifest = json.loads((engine / "manifest.json").read_text())
    del manifest["target_source"]
    (engine / "manifest.json").write_text(json.dumps(manifest))
    assert "expected a manifest that names the target, found none" in run(*generate).stderr


@pytest.mark.parametrize("command", ["build", "inspect", "capture"])
def test_swapped_arguments_are_named(command: str, tmp_path: Path) -> None:
    output = ["-o", tmp_path / "out", *(["--prompts", "p"] if command == "capture" else [])]
    more = [] if command == "inspect" else output
    swapped = run(command, TARGET, "--target", DRAFT, *more)
    assert (swapped.returncode, swapped.stdout) == (1, "")
    assert f"draft and target are swapped: {DRAFT} is a draft, {TARGET} is not" in swapped.stderr
    twice = run(command, DRAFT, "--target", DRAFT, *more)
    assert f"{DRAFT}: expected a target, found a DFlash draft" in twice.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_failed_recipe_leaves_nothing(tmp_path: Path) -> None:
    result = run("build", DRAFT, "--target", TARGET, "-o", tmp_path / "engine", "--recipe", "nvfp5")
    assert result.returncode == 1
    assert "expected a recipe (bf16, fp8" in result.stderr
    assert "(nearest recipe: nvfp4)" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_is_not_unicode_is_refused(tmp_path: Path) -> None:
    """onnx takes paths as UTF-8 only."""
    result = run("build", DRAFT, "--target", TARGET, "-o", os.fsdecode(os.fsencode(tmp_path) + b"/engine\xff"))
    assert result.returncode == 1
    assert "expected a path in UTF-8, found other bytes" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["checkpoint", "deployment"])
def test_calibration_without_a_recipe_is_refused(kind: str, tmp_path: Path) -> None:
    draft = DRAFT
    if kind == "deployment":
        draft = tmp_path / "mine.yaml"
        draft.write_text(f"description: x\ntarget: {TARGET}\ndraft: {DRAFT}\ngpus: b300x1\npurpose: latency\n")
    result = run("build", draft, "--target", TARGET, "-o", tmp_path / "engine", "--calibration", "features")
    assert result.returncode == 2
    assert "--calibration needs a recipe" in result.stderr
    assert not (tmp_path / "engine").exists()
