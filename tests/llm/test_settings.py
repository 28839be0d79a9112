# SPDX-License-Identifier: Apache-2.0
"""Settings of `LLM` that nobody can serve: one RequestError each, before the target is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_trt.errors import RequestError
from dflash_trt.llm import LLM
from dflash_trt.runtime import session
from tests.checkpoint.samples import refusal
from tests.paths import FIXTURES

TARGET = str(FIXTURES / "tiny-qwen3")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"cache_gib": 1e308}, "cache_gib: expected more than 0 and at most 1048576 GiB, found 1e+308"),
        ({"cache_gib": float("nan")}, "cache_gib: expected"),
        ({"cache_gib": 0}, "cache_gib: expected"),
        ({"cache_gib": True}, "cache_gib: expected"),
        ({"cache_gib": "4"}, "cache_gib: expected"),
        ({"max_batch_size": 10**9}, "max_batch_size: expected memory for the caches of 1000000000 requests"),
        ({"max_batch_size": 2**70}, "max_batch_size: expected at most 2147483647"),
        ({"max_batch_size": 0}, "max_batch_size: expected at least 1"),
        ({"prefill_chunk": 2**31}, "prefill_chunk: expected at most 2147483647"),
        ({"prefill_chunk": 1.5}, "prefill_chunk: expected at least 1"),
        ({"draft_length": 8}, "draft length: expected 0 to 7"),
        ({"dtype": "float16"}, "dtype: expected auto, float32 or bfloat16, found 'float16'"),
        ({"device": "tpu"}, "device: expected auto, cpu or cuda"),
    ],
)
def test_settings(settings: dict[str, Any], words: str, engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_late(*_: object, **__: object) -> None:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(session, "load_model", too_late)
    assert words in refusal(lambda: LLM(engine, TARGET, **settings), RequestError)


@pytest.mark.parametrize("path", [3, b"engine"])
def test_paths(path: Any, engine: Path) -> None:
    assert "engine: expected a path" in refusal(lambda: LLM(path, TARGET), RequestError)
    assert "target: expected a path" in refusal(lambda: LLM(engine, path), RequestError)


def test_other_runtime_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="ours"), session.room_for(1):
        raise RuntimeError("ours")
