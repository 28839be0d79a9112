# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt quantize` from the outside; what it writes is tested in tests/quantize."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.checkpoint.dialect_samples import write_laguna
from tests.cli.commands import run, run_process
from tests.paths import FIXTURES

# Neither torch nor modelopt nor onnx can be imported.
BARE = "import sys; sys.modules.update(torch=None, modelopt=None, onnx=None); from dflash_trt.cli import main; main()"


def test_command(tmp_path: Path) -> None:
    draft, target = FIXTURES / "tiny-gpt-oss-dflash", FIXTURES / "tiny-gpt-oss"
    output = tmp_path / "q"
    options = ("-o", output, "--recipe", "nvfp4", "--calibration", "none", "--target", target)
    result = run_process("quantize", draft, *options, script=BARE)
    assert (result.returncode, result.stdout) == (0, f"{output}\n")
    assert result.stderr == (
        "15 linear layers: 14 NVFP4, 1 dense; 18 other tensors copied unchanged; 868.5 KiB -> 316.6 KiB\n"
        f"next: dflash-trt build {output} --target {target} -o engine\n"
    )


def test_calibration_for_weights_only_is_refused(tmp_path: Path) -> None:
    draft = FIXTURES / "tiny-gpt-oss-dflash"
    result = run("quantize", draft, "-o", tmp_path / "q", "--recipe", "nvfp4-w4a16", "--calibration", "features")
    assert result.returncode == 2
    assert "quantises weights only and needs no --calibration" in result.stderr
    assert run("quantize", draft, "-o", tmp_path / "q", "--recipe", "nvfp4-w4a16").returncode == 0


def test_swapped_target(tmp_path: Path) -> None:
    result = run(
        "quantize", FIXTURES / "tiny-gpt-oss-dflash", "-o", tmp_path / "q", "--recipe", "bf16",
        "--target", FIXTURES / "tiny-qwen3",
    )  # fmt: skip
    assert result.returncode == 1
    assert "expected qwen3 (target), found gpt_oss (draft)" in result.stderr
    assert not (tmp_path / "q").exists()


def test_a_checkpoint_moves_to_speculators(tmp_path: Path) -> None:
    draft, target = FIXTURES / "tiny-qwen3-dflash", FIXTURES / "tiny-qwen3"
    result = run("convert", draft, "-o", tmp_path / "out", "--to", "speculators", "--target", target)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(tmp_path / "out")
    assert "zlab -> speculators" in result.stderr
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(target)
    again = run("convert", draft, "-o", tmp_path / "out", "--to", "zlab")
    assert (again.returncode, "replace it with --force" in again.stderr) == (1, True)


def test_the_target_is_for_speculators_alone(tmp_path: Path) -> None:
    draft = FIXTURES / "tiny-qwen3-dflash"
    for options in (["--to", "speculators"], ["--to", "zlab", "--target", FIXTURES / "tiny-qwen3"]):
        result = run("convert", draft, "-o", tmp_path / "out", *options)
        assert result.returncode == 2
        assert "--to speculators needs --target" in result.stderr


def test_what_cannot_be_said_is_one_error(tmp_path: Path) -> None:
    draft = write_laguna(tmp_path / "draft")
    result = run("convert", draft, "-o", tmp_path / "out", "--to", "modelopt")
    assert result.returncode == 1
    assert "tap_norms: expected False, which is what the layout modelopt can represent, found True" in result.stderr
    assert not (tmp_path / "out").exists()


DRAFT, TARGET = FIXTURES / "tiny-qwen3-dflash", FIXTURES / "tiny-qwen3"


@pytest.mark.parametrize(
    ("command", "arguments", "expected"),
    [
        ("quantize", [DRAFT, "--recipe", "nvfp4"], {"dense_layers": 1}),
        ("convert", [DRAFT, "--to", "modelopt"], {"from": "zlab", "to": "modelopt"}),
        ("triton-repo", ["gpt-oss-120b.b300x8.latency"], {"model": "tensorrt_llm", "runtime": "trtllm"}),
        (
            "capture",
            [DRAFT, "--target", TARGET, "--prompts", FIXTURES / "prompts.jsonl", "--max-prompts", 2, "--max-tokens", 8],
            {"sequences": 2, "answer_tokens": 16},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_document_names_what_was_written(
    command: str, arguments: list[object], expected: dict[str, object], tmp_path: Path
) -> None:
    output = tmp_path / "features.safetensors"
    result = run(command, *arguments, "-o", output, "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert output.exists()
    assert {"schema": f"dflash-trt/{command}/1", "output": str(output), **expected}.items() <= document.items()
