# SPDX-License-Identifier: Apache-2.0
"""Schedules and limits of drafting: what vLLM's own validation refuses, and what was not looked up."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest

from dflash_trt.deploy.finding import ERROR, UNCHECKED, WARNING
from tests.deploy.rules.commands import found, vllm
from tests.deploy.wheels import VLLM, definitions, sources

SCHEDULES: list[tuple[str, str | None]] = [
    ("[[1, 8, 5], [9, 64, 3]]", None),
    ("[[9, 64, 3], [1, 8, 5]]", None),
    ("[[1, 8, 5], [16, 64, 0]]", None),
    ("[[2, 8, 5]]", ERROR),
    ("[[1, 8, 5], [8, 9, 3]]", ERROR),
    ("[[8, 1, 5]]", ERROR),
    ("[[1, 8, -1]]", ERROR),
    ("[[1, 8]]", ERROR),
    ("[]", ERROR),
    ("[[0, 8, 1]]", ERROR),
]


def findings(schedule: str) -> list[str]:
    flag = f"--speculative-config.num_speculative_tokens_per_batch_size '{schedule}'"
    return [finding.severity for finding in found(f"{vllm('z-lab/Qwen3-8B-DFlash-b16')} {flag}", "draft-schedule")]


@pytest.mark.parametrize(("schedule", "severity"), [*SCHEDULES, ("[[1, 8, 9]]", WARNING)])
def test_schedules_of_vllm(schedule: str, severity: str | None) -> None:
    assert findings(schedule) == ([] if severity is None else [severity])


@pytest.mark.full
@pytest.mark.parametrize(("schedule", "severity"), SCHEDULES)
def test_they_are_those_that_vllm_takes(schedule: str, severity: str | None) -> None:
    namespace: dict[str, Any] = {}
    name = "validate_and_normalize_dynamic_sd_schedule"
    definitions(sources(*VLLM) / "vllm/v1/spec_decode/dynamic/utils.py", [name], namespace)
    with pytest.raises(ValueError, match=r"range|Range|Each|empty|values") if severity else contextlib.nullcontext():
        namespace[name](json.loads(schedule))


BOTH = "acceptance_rate_window_size: 9, acceptance_rate_threshold: 0.3"


@pytest.mark.parametrize(
    ("keys", "rule", "severities"),
    [
        ("max_concurrency: 2", "max-concurrency", [UNCHECKED]),
        ("max_concurrency: 8", "max-concurrency", []),
        ("acceptance_rate_threshold: 0.3", "acceptance-threshold", [WARNING]),
        ("acceptance_rate_window_size: 9", "acceptance-threshold", [WARNING]),
        (BOTH, "acceptance-threshold", []),
        (BOTH + "}\nenable_attention_dp: true\nmoe_config: {", "acceptance-threshold", [UNCHECKED]),
    ],
)
def test_switches_of_tensorrt_llm(keys: str, rule: str, severities: list[str]) -> None:
    section = f"{{decoding_type: DFlash, speculative_model: d, max_draft_len: 3, {keys}}}"
    text = f"cat > c.yaml <<E\nmax_batch_size: 8\nspeculative_config: {section}\nE\ntrtllm-serve m --config c.yaml"
    assert [finding.severity for finding in found(text, rule)] == severities
