# SPDX-License-Identifier: Apache-2.0
"""No library of ours records what its users do."""

from __future__ import annotations

from pathlib import Path

from tests.cli.commands import run
from tests.paths import FIXTURES

TARGET = FIXTURES / "tiny-qwen3"


def test_onnxruntime_writes_no_telemetry(tmp_path: Path) -> None:
    """Its wheel keeps a database of events under ~/.cache unless told not to before it is imported."""
    home = tmp_path / "home"
    home.mkdir()
    engine = tmp_path / "engine"
    environment = {"HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache")}
    assert run("build", FIXTURES / "tiny-qwen3-dflash", "--target", TARGET, "-o", engine, **environment).returncode == 0
    result = run("generate", engine, "def f(", "--target", TARGET, "--max-tokens", 4, **environment)
    assert result.returncode == 0, result.stderr
    assert [path for path in home.rglob("*") if "onnxruntime" in path.name or path.name == "deviceid"] == []
