# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt convert` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.checkpoint.dialect_samples import write_laguna
from tests.cli.commands import run
from tests.paths import FIXTURES


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
