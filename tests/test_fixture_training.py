# SPDX-License-Identifier: Apache-2.0
"""The script that made the fixtures still runs; its results are looked at where they are used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.target_checkpoint import check_pair, read_target
from tests.paths import REPOSITORY


@pytest.mark.full
@pytest.mark.parametrize("pair", ["gpt-oss", "qwen3"])
def test_a_few_steps_of_every_stage(pair: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.train_fixtures", "--pair", pair, "--smoke", "--output", str(tmp_path)]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    draft, target = read_draft(tmp_path / f"tiny-{pair}-dflash"), read_target(tmp_path / f"tiny-{pair}")
    check_pair(draft.spec, target.spec, draft_name="draft", target_name="target")
