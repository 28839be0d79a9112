# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt doctor`."""

from __future__ import annotations

import json
import platform

import pytest

from tests.cli.commands import run, run_here, run_process


def test_json_is_one_document() -> None:
    result = run("doctor", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    document = json.loads(result.stdout)
    assert document["schema"] == "dflash-trt/doctor/1"
    findings = {finding["name"]: finding for finding in document["findings"]}
    assert findings["Python"]["found"] == platform.python_version()
    assert findings["onnx"]["needed_for"] == ["build", "generate", "chat", "serve", "verify", "capture", "dynamo"]
    for finding in findings.values():
        assert finding["found"] or finding["fix"], finding


def test_the_command_that_fixes_it_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_trt.cli.doctor_machine.package_version", lambda package: None)
    monkeypatch.setenv("COLUMNS", "200")
    run_here("doctor")
    output = capsys.readouterr().out
    assert output.startswith("this machine")
    rows = {line.split("│")[1].strip(): line for line in output.splitlines() if line.startswith("│")}
    assert "nothing" in rows["onnx"]
    assert "build, generate" in rows["onnx"]
    assert "\n  pip install 'dflash-trt[calibrate,observe,run,serve,triton]'\n" in output
    assert platform.python_version() in rows["Python"]
    assert "pip" not in rows["Python"]


def test_nothing_heavy_is_needed() -> None:
    """doctor must work where everything else is broken."""
    script = "import sys\nsys.modules.update(dict.fromkeys(['torch', 'onnx', 'onnxruntime', 'transformers'], None))\n"
    result = run_process("doctor", "--json", script=f"{script}from dflash_trt.cli import main\nmain()")
    assert result.returncode == 0, result.stderr
