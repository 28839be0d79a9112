# SPDX-License-Identifier: Apache-2.0
"""The checker knows what the catalogue knows of a draft."""

from __future__ import annotations

import pytest

from dflash_trt.deploy.finding import ERROR, UNCHECKED, WARNING
from dflash_trt.deploy.trained_target import is_copy
from tests.deploy.rules.commands import found, sglang, vllm
from tests.paths import FIXTURES

DEEPSEEK, PLAIN = "deepseek-ai/dflash_qwen3_8b_block7", "z-lab/Qwen3-8B-DFlash-b16"
LEFT_OUT = ""


@pytest.mark.parametrize(
    ("command", "severity", "words"),
    [
        (vllm(DEEPSEEK), WARNING, "under 1 % acceptance"),
        (vllm("deepseek-ai/dspark_qwen3_8b_block7"), WARNING, "expected dspark"),
        (vllm("z-lab/Kimi-K2.5-DFlash", target="moonshotai/Kimi-K2.5"), UNCHECKED, "whether vllm serves"),
        (vllm(PLAIN), None, ""),
        (sglang(PLAIN), None, ""),
        (vllm(DEEPSEEK, method="--speculative-config.method dspark"), None, ""),
        ("vllm serve Qwen/Qwen3-8B", None, ""),
    ],
)  # fmt: skip
def test_what_a_runtime_serves(command: str, severity: str | None, words: str) -> None:
    findings = found(command, "catalogue")
    assert [finding.severity for finding in findings] == ([] if severity is None else [severity])
    assert all(words in str(finding) for finding in findings)


def test_facts_of_a_draft_that_the_catalogue_alone_has() -> None:
    command = vllm(DEEPSEEK, method="--speculative-config.method dspark").replace("tokens 5", "tokens 9")
    (finding,) = found(command, "draft-length")
    assert finding.severity == ERROR
    assert "at most 7 (block_size 7" in finding.problem


@pytest.mark.parametrize(
    ("draft", "target", "is_found"),
    [
        ("z-lab/Qwen3.5-27B-DFlash", "Qwen/Qwen3.6-27B", True),
        ("z-lab/Kimi-K2.5-DFlash", "moonshotai/Kimi-K2.6", True),
        (PLAIN, "Qwen/Qwen3-8B-Base", True),
        (PLAIN, "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", True),
        ("z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat", "meta-llama/Llama-3.1-8B", True),
        (PLAIN, "Qwen/Qwen3-8B-FP8", False),
        (PLAIN, "RedHatAI/Qwen3-8B-FP8-dynamic", False),
        (PLAIN, "/models/mine", False),
        ("mine/draft", "Qwen/Qwen3-8B", False),
    ],
)
def test_a_draft_for_another_target(draft: str, target: str, is_found: bool) -> None:
    for command in (vllm(draft, target=target), sglang(draft, target=target)):
        assert [finding.severity for finding in found(command, "trained-pair")] == [WARNING] * is_found


@pytest.mark.parametrize(
    "name", ["nvidia/Qwen3-8B-NVFP4", "a/qwen3-8b.w4a16-g128", "b/Qwen3-8B-AWQ-4bit", "Qwen/Qwen3-8B"]
)
def test_quantised_copies(name: str) -> None:
    assert is_copy(name, "Qwen/Qwen3-8B")
    assert not is_copy(name, "Qwen/Qwen3-4B")
    assert not is_copy(f"{name}-Thinking", "Qwen/Qwen3-8B")


@pytest.mark.parametrize(
    ("draft", "expected"),
    [
        (PLAIN, []),  # by "dflash" in its path
        ("/m/z-lab-eagle3/Qwen3-8B-DFlash-b16", []),  # nothing is known of it
        (str(FIXTURES / "tiny-qwen3-dflash"), []),
        ("deepseek-ai/dspark_qwen3_8b_block7", []),
        (DEEPSEEK, ["expected dspark"]),
    ],
)
def test_a_method_that_is_left_out(draft: str, expected: list[str]) -> None:
    findings = found(vllm(draft, method=LEFT_OUT), "draft-method")
    assert [finding.severity for finding in findings] == [WARNING] * len(expected)
    assert all(words in finding.problem for words, finding in zip(expected, findings, strict=True))


@pytest.mark.parametrize(("folder", "method"), [("eagle3-runs", "eagle3"), ("runs", "draft_model")])
def test_a_path_that_decides_wrongly(folder: str, method: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    place = tmp_path_factory.mktemp(folder) / "drafter"
    place.symlink_to(FIXTURES / "tiny-qwen3-dflash")
    (finding,) = found(vllm(str(place), method=LEFT_OUT), "draft-method")
    assert f"vLLM makes {method}" in finding.problem
    assert finding.fix == "write dflash"


@pytest.mark.parametrize(
    ("command", "is_found"),
    [(f"{vllm(PLAIN)} --max-model-len 131072", True), (vllm(PLAIN), False),
     (f"{vllm('z-lab/gpt-oss-20b-DFlash', target='openai/gpt-oss-20b')} --max-model-len 131072", False)],
)  # fmt: skip
def test_positions_that_are_not_known(command: str, is_found: bool) -> None:
    assert [finding.severity for finding in found(command, "context-length")] == [UNCHECKED] * is_found
