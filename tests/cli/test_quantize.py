# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt quantize` from the outside; what it writes is tested in tests/quantize."""

from __future__ import annotations

from pathlib import Path

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
    assert "quantises weights only: it has no use for --calibration" in result.stderr
    assert run("quantize", draft, "-o", tmp_path / "q", "--recipe", "nvfp4-w4a16").returncode == 0


def test_swapped_target(tmp_path: Path) -> None:
    result = run(
        "quantize", FIXTURES / "tiny-gpt-oss-dflash", "-o", tmp_path / "q", "--recipe", "bf16",
        "--target", FIXTURES / "tiny-qwen3",
    )  # fmt: skip
    assert result.returncode == 1
    assert "expected qwen3 (target), found gpt_oss (draft)" in result.stderr
    assert not (tmp_path / "q").exists()
