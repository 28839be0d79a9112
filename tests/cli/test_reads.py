# SPDX-License-Identifier: Apache-2.0
"""A command parses a checkpoint's config.json, its quantisation and every safetensors header once, and passes it on."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.cli.commands import run_here
from tests.paths import FIXTURES

DRAFT, TARGET = FIXTURES / "tiny-qwen3-dflash", FIXTURES / "tiny-qwen3"


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Counter[bytes]:
    """How often each text was parsed as JSON, by whichever of our two parsers."""
    counts: Counter[bytes] = Counter()

    def counting(parse: Callable[..., Any]) -> Callable[..., Any]:
        def counted(content: bytes | str, *arguments: Any, **options: Any) -> Any:
            counts[content.encode() if isinstance(content, str) else bytes(content)] += 1
            return parse(content, *arguments, **options)

        return counted

    monkeypatch.setattr(json, "loads", counting(json.loads))
    monkeypatch.setattr(msgspec.json, "decode", counting(msgspec.json.decode))
    return counts


def texts(directory: Path) -> dict[str, bytes]:
    """What is JSON in a checkpoint and ours to read, by file."""
    names = ("config.json", "hf_quant_config.json", "model.safetensors.index.json")
    found = {name: (directory / name).read_bytes() for name in names if (directory / name).is_file()}
    for file in directory.glob("*.safetensors"):
        content = file.read_bytes()
        found[file.name] = content[8 : 8 + int.from_bytes(content[:8], "little")]
    return found


def deployment(file: Path, recipe: str) -> Path:
    file.write_text(
        f"description: a fixture\ntarget: {TARGET}\ndraft: {DRAFT}\ngpus: h100x1\npurpose: latency\nrecipe: {recipe}\n"
    )
    return file


def reads(parsed: Counter[bytes], directory: Path) -> dict[str, int]:
    return {name: parsed[text] for name, text in texts(directory).items()}


@pytest.mark.parametrize(
    "words",
    [
        ("inspect", DRAFT, "--target", TARGET),
        ("build", DRAFT, "--target", TARGET, "-o", "OUTPUT"),
        ("build", DRAFT, "--target", TARGET, "-o", "OUTPUT", "--recipe", "nvfp4"),
        ("build", "CONFIG", "-o", "OUTPUT"),
        ("build", "NVFP4", "-o", "OUTPUT"),
        ("build", "CONFIG", "--dry-run"),
        ("quantize", DRAFT, "--target", TARGET, "-o", "OUTPUT", "--recipe", "fp8"),
        ("serve-config", "CONFIG", "--runtime", "trtllm"),
        ("triton-repo", "CONFIG", "-o", "OUTPUT"),
    ],
    ids=lambda words: " ".join(str(getattr(word, "name", word)) for word in words[:2]),
)
def test_a_pair_is_read_once(words: tuple[object, ...], parsed: Counter[bytes], tmp_path: Path) -> None:
    places: dict[object, object] = {
        "OUTPUT": tmp_path / "output",
        "CONFIG": deployment(tmp_path / "bf16.yaml", "bf16"),
        "NVFP4": deployment(tmp_path / "nvfp4.yaml", "nvfp4"),
    }
    run_here(*(places.get(word, word) for word in words))
    assert reads(parsed, DRAFT) == {"config.json": 1, "model.safetensors": 1}
    assert reads(parsed, TARGET) == {"config.json": 1, "model.safetensors": 1}


def test_a_quantised_draft_is_read_once(parsed: Counter[bytes], tmp_path: Path) -> None:
    run_here("quantize", DRAFT, "-o", tmp_path / "draft", "--recipe", "nvfp4")
    parsed.clear()
    run_here("build", tmp_path / "draft", "--target", TARGET, "-o", tmp_path / "engine")
    assert reads(parsed, tmp_path / "draft") == {"config.json": 1, "hf_quant_config.json": 1, "model.safetensors": 1}


def test_a_target_is_read_once(parsed: Counter[bytes]) -> None:
    run_here("inspect", TARGET)
    assert reads(parsed, TARGET) == {"config.json": 1, "model.safetensors": 1}
