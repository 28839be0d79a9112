# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt build`, `quantize` and `convert` from the outside: what they write, and what they refuse."""

import json
import os
import shutil
from pathlib import Path

import pytest

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.target_checkpoint import read_target
from dflash_trt.engine.manifest import read_manifest
from dflash_trt.runtime.checked_pair import find_target
from tests.cli.commands import run, run_process
from tests.paths import FIXTURES

# Neither torch nor modelopt nor onnx can be imported.


DRAFT, TARGET = FIXTURES / "tiny-gpt-oss-dflash", FIXTURES / "tiny-gpt-oss"
QWEN_DRAFT, QWEN = FIXTURES / "tiny-qwen3-dflash", FIXTURES / "tiny-qwen3"


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
    assert "does not name its target" in run(*generate).stderr


def test_an_engine_finds_its_target_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative --target is kept relative to the engine: both can be moved together, and reached by a link."""
    place = tmp_path / "a"
    shutil.copytree(TARGET, place / "models" / "target")
    shutil.copytree(DRAFT, place / "models" / "draft")
    monkeypatch.chdir(place / "models")
    assert run("build", "draft", "--target", "./target", "-o", "../engine").returncode == 0

    def found(engine: str) -> str:
        name, directory = find_target(Path(engine), read_manifest(Path(engine)), None)
        assert read_target(directory).spec.model_type == "gpt_oss"
        return name

    assert found("../engine") == str(place / "models" / "target")
    for elsewhere, engine, name in ((place / "engine", ".", "../models/target"), (place, "engine", "models/target")):
        monkeypatch.chdir(elsewhere)
        assert found(engine) == name
    monkeypatch.chdir("/")
    assert found(str(place / "engine")) == str(place / "models" / "target")
    place.rename(tmp_path / "b")
    assert found(str(tmp_path / "b" / "engine")) == str(tmp_path / "b" / "models" / "target")
    (tmp_path / "link").symlink_to(tmp_path / "b" / "engine")
    assert found(str(tmp_path / "link")) == str(tmp_path / "b" / "models" / "target")
    shutil.rmtree(tmp_path / "b" / "models")
    missing = run("generate", tmp_path / "link", "a b").stderr
    assert f"built for target {tmp_path / 'b' / 'models' / 'target'}, which is no directory here" in missing


@pytest.mark.parametrize("command", ["build", "inspect", "capture"])
def test_swapped_arguments_are_named(command: str, tmp_path: Path) -> None:
    output = ["-o", tmp_path / "out", *(["--prompts", "p"] if command == "capture" else [])]
    more = [] if command == "inspect" else output
    swapped = run(command, TARGET, "--target", DRAFT, *more)
    assert (swapped.returncode, swapped.stdout) == (1, "")
    assert f"draft and target are swapped: {DRAFT} is a draft, {TARGET} is not" in swapped.stderr
    twice = run(command, DRAFT, "--target", DRAFT, *more)
    assert f"{DRAFT} is a DFlash draft, not a target" in twice.stderr
    assert list(tmp_path.iterdir()) == []


BUILD = ["build", DRAFT, "--target", TARGET]
NEEDS_TARGET = "--to speculators needs --target"


@pytest.mark.parametrize(
    ("code", "arguments", "words"),
    [
        (1, [*BUILD, "--recipe", "nvfp5"], "expected a recipe (bf16, fp8"),
        (1, [*BUILD, "--recipe", "nvfp5"], "(nearest recipe: nvfp4)"),
        (2, [*BUILD, "--calibration", "features"], "--calibration needs a recipe"),
        (2, ["quantize", DRAFT, "--recipe", "nvfp4-w4a16", "--calibration", "features"],
         "--recipe nvfp4-w4a16 quantises weights only and needs no --calibration"),
        (1, ["quantize", DRAFT, "--recipe", "bf16", "--target", QWEN],
         "expected qwen3 (target), found gpt_oss (draft)"),
        (2, ["convert", QWEN_DRAFT, "--to", "speculators"], NEEDS_TARGET),
        (2, ["convert", QWEN_DRAFT, "--to", "zlab", "--target", QWEN], NEEDS_TARGET),
    ],
)  # fmt: skip
def test_a_refusal_leaves_nothing(code: int, arguments: list[object], words: str, tmp_path: Path) -> None:
    result = run(*arguments, "-o", tmp_path / "out")
    assert result.returncode == code
    assert words in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_is_not_unicode_is_refused(tmp_path: Path) -> None:
    """onnx takes paths as UTF-8 only."""
    result = run("build", DRAFT, "--target", TARGET, "-o", os.fsdecode(os.fsencode(tmp_path) + b"/engine\xff"))
    assert result.returncode == 1
    assert "is not UTF-8" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_deployment_without_a_recipe_is_not_calibrated(tmp_path: Path) -> None:
    draft = tmp_path / "mine.yaml"
    draft.write_text(f"description: x\ntarget: {TARGET}\ndraft: {DRAFT}\ngpus: b300x1\npurpose: latency\n")
    result = run("build", draft, "--target", TARGET, "-o", tmp_path / "engine", "--calibration", "features")
    assert result.returncode == 2
    assert "--calibration needs a recipe" in result.stderr
    assert not (tmp_path / "engine").exists()


BARE = "import sys; sys.modules.update(torch=None, modelopt=None, onnx=None); from dflash_trt.cli import main; main()"


def test_quantize(tmp_path: Path) -> None:
    output = tmp_path / "q"
    options = ("-o", output, "--recipe", "nvfp4", "--calibration", "none", "--target", TARGET)
    result = run_process("quantize", DRAFT, *options, script=BARE)
    assert (result.returncode, result.stdout) == (0, f"{output}\n")
    assert result.stderr == (
        "15 linear layers: 14 NVFP4, 1 dense; 18 other tensors copied unchanged; 868.5 KiB -> 316.6 KiB\n"
        f"next: dflash-trt build {output} --target {TARGET} -o engine\n"
    )
    assert run("quantize", DRAFT, "-o", tmp_path / "w4a16", "--recipe", "nvfp4-w4a16").returncode == 0


def test_a_checkpoint_moves_to_speculators(tmp_path: Path) -> None:
    result = run("convert", QWEN_DRAFT, "-o", tmp_path / "out", "--to", "speculators", "--target", QWEN)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(tmp_path / "out")
    assert "zlab -> speculators" in result.stderr
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(QWEN)
    again = run("convert", QWEN_DRAFT, "-o", tmp_path / "out", "--to", "zlab")
    assert (again.returncode, "replace it with --force" in again.stderr) == (1, True)


@pytest.mark.parametrize(
    ("command", "arguments", "expected"),
    [
        ("quantize", [QWEN_DRAFT, "--recipe", "nvfp4"], {"dense_layers": 1}),
        ("convert", [QWEN_DRAFT, "--to", "modelopt"], {"from": "zlab", "to": "modelopt"}),
        ("triton-repo", ["gpt-oss-120b.b300x8.latency"], {"model": "tensorrt_llm", "runtime": "trtllm"}),
        ("capture",
         [QWEN_DRAFT, "--target", QWEN, "--prompts", FIXTURES / "prompts.jsonl", "--max-prompts", 2, "--max-tokens", 8],
         {"sequences": 2, "answer_tokens": 16}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_document_names_what_was_written(
    command: str, arguments: list[object], expected: dict[str, object], tmp_path: Path
) -> None:
    output = tmp_path / "features.safetensors"
    result = run(command, *arguments, "-o", output, "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert output.exists()
    assert {"schema": f"dflash-trt/{command}/1", "output": str(output), **expected}.items() <= document.items()
