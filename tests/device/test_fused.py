# SPDX-License-Identifier: Apache-2.0
"""The tools that torch.compile needs on this machine."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import pytest

from dflash_trt.device import fused


def test_what_compiling_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "find_spec", lambda name: object())
    monkeypatch.setattr(shutil, "which", lambda name: None)
    fused.why_not_compiled.cache_clear()
    assert fused.why_not_compiled() == "a C compiler"
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    fused.why_not_compiled.cache_clear()
    assert fused.why_not_compiled() == str(tmp_path / "Python.h")
    (tmp_path / "Python.h").touch()
    fused.why_not_compiled.cache_clear()
    assert fused.why_not_compiled() is None
    fused.why_not_compiled.cache_clear()
