# SPDX-License-Identifier: Apache-2.0
"""Commands that write a file or directory print its path, or with --json one document that names it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.commands import run
from tests.paths import FIXTURES

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
