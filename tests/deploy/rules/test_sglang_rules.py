# SPDX-License-Identifier: Apache-2.0
"""Arguments of SGLang that other methods left in a command, and servers apart for prefill and decode."""

from __future__ import annotations

import pytest

from dflash_trt.deploy.finding import ERROR, UNCHECKED, WARNING
from tests.deploy.rules.commands import found, sglang

BASE = sglang("z-lab/Qwen3-8B-DFlash-b16")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--speculative-eagle-topk 4", "in place of trtllm_mha"),
        ("--speculative-eagle-topk 1 --page-size 64", "in place of trtllm_mha"),
        ("--speculative-eagle-topk 4 --attention-backend fa3", "which SGLang sets to 1"),
        ("--speculative-num-steps 3", "which SGLang sets to 1"),
        ("--speculative-eagle-topk 1 --speculative-num-steps 1", None),
    ],
)
def test_arguments_of_eagle(flags: str, words: str | None) -> None:
    findings = found(f"{BASE} {flags}", "eagle-arguments")
    assert [finding.severity for finding in findings] == [WARNING] * (words is not None)
    assert all(str(words) in finding.problem for finding in findings)
    assert found(f"{sglang('d', algorithm='EAGLE3')} {flags}", "eagle-arguments") == []


def test_prefill_and_decode_apart() -> None:
    flags = "--disaggregation-decode-enable-radix-cache --disaggregation-mode"
    assert [f.severity for f in found(f"{BASE} --disaggregation-mode prefill", "disaggregated")] == [UNCHECKED]
    assert [f.severity for f in found(f"{BASE} {flags} decode", "disaggregated")] == [UNCHECKED, ERROR]


def test_the_earlier_flag_of_attention_data_parallelism() -> None:
    assert [f.key for f in found(f"{BASE} --dp 2 --enable-dp-attention", "dp-attention")] == ["enable_dp_lm_head"]
    assert found(f"{BASE} --dp 2", "dp-attention") == []
