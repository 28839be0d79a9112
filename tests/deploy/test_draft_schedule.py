# SPDX-License-Identifier: Apache-2.0
"""Draft lengths by batch: one schedule in a deployment, the words of each runtime, and refusals."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dflash_trt.deploy.checker import check, deployment_config
from dflash_trt.deploy.deployment_file import load_deployment
from dflash_trt.deploy.draft_schedule import read_schedule, trtllm_schedule, vllm_schedule
from dflash_trt.deploy.render import render
from dflash_trt.deploy.resolve import ResolvedDeployment, resolve
from dflash_trt.deploy.schema import Runtime, load_schema
from dflash_trt.errors import ConfigError
from tests.deploy.deployments import BUILD_CONFIGS

SCHEDULE = {1: 9, 17: 4, 65: 0}


def scheduled(schedule: dict[int, int], **changes: Any) -> ResolvedDeployment:
    file = load_deployment(BUILD_CONFIGS / "gpt-oss-120b.b300x8.latency.yaml")
    return resolve(msgspec.structs.replace(file, draft_schedule=schedule, **changes), "x")


def arguments(deployment: ResolvedDeployment, runtime: Runtime) -> dict[str, Any]:
    return render(deployment, runtime, "dflash", host="127.0.0.1", port=8000).arguments


def test_the_words_of_each_runtime() -> None:
    """TensorRT-LLM counts up to a batch, vLLM from one to another; both end where the deployment does."""
    schedule = read_schedule(SCHEDULE, 9, "x")
    assert trtllm_schedule(((1, 9), (17, 4), (65, 1)), 256) == {16: 9, 64: 4, 256: 1}
    assert vllm_schedule(schedule, 256) == [[1, 16, 9], [17, 64, 4], [65, 256, 0]]
    assert trtllm_schedule(schedule, 64) == {16: 9, 64: 4}
    assert vllm_schedule(schedule, 16) == [[1, 16, 9]]


@pytest.mark.parametrize("runtime", ["trtllm", "vllm"])
def test_a_scheduled_deployment_passes_its_own_check(runtime: Runtime) -> None:
    deployment = scheduled(SCHEDULE if runtime == "vllm" else {1: 9, 17: 4, 65: 1}, max_batch_size=128)
    spec = arguments(deployment, runtime)["speculative_config"]
    expected = {"draft_len_schedule": {16: 9, 64: 4, 128: 1}}
    if runtime == "vllm":
        expected = {"num_speculative_tokens_per_batch_size": [[1, 16, 9], [17, 64, 4], [65, 128, 0]]}
    assert expected.items() <= spec.items()
    config = deployment_config(deployment, load_schema(runtime, None), arguments(deployment, runtime))
    assert [finding for finding in check(config) if finding.severity == "error"] == []


def test_without_one_nothing_is_written() -> None:
    deployment = resolve(load_deployment(BUILD_CONFIGS / "gpt-oss-120b.b300x8.latency.yaml"), "x")
    assert "draft_len_schedule" not in arguments(deployment, "trtllm")["speculative_config"]


def test_a_step_without_drafts_is_never_written_for_tensorrt_llm() -> None:
    """The worker returns before it stores the step's context rows."""
    with pytest.raises(ConfigError, match="expected 1 or more drafts for every batch with TensorRT-LLM, found 0") as no:
        arguments(scheduled(SCHEDULE, max_batch_size=128), "trtllm")
    assert str(no.value.hint).startswith("set max_batch_size to 64, or write 1")
    assert arguments(scheduled(SCHEDULE, max_batch_size=64), "trtllm")["speculative_config"]["draft_len_schedule"]


def test_sglang_refuses_it() -> None:
    with pytest.raises(ConfigError, match="expected one draft length, which is all that SGLang takes"):
        arguments(scheduled(SCHEDULE), "sglang")


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ({2: 9}, "expected to begin with batch 1 and num_draft_tokens 9, found {2: 9, ...}"),
        ({1: 4}, "expected to begin with batch 1 and num_draft_tokens 9, found {1: 4, ...}"),
        ({1: 9, 8: 10}, "expected at most num_draft_tokens 9, found 10 from batch 8 on"),
    ],
)
def test_schedules_that_cannot_be_meant(schedule: dict[int, int], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        scheduled(schedule)
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("change", "severity", "words"),
    [
        ({"draft_len_schedule": {4: 8, 64: 2}}, "error", "expected max_draft_len 9 at first and never more"),
        ({"draft_len_schedule": {4: 9, 8: 10, 64: 2}}, "error", "expected max_draft_len 9 at first and never more"),
        ({"draft_len_schedule": {4: 9, 8: 2}}, "error", "found none beyond batch 8; write 1"),
        ({"draft_len_schedule": {4: 9, 64: 0}}, "error", "a step without drafts stores no context"),
        ({"draft_len_schedule": {64: 9}, "max_concurrency": 8}, "error", "expected it or max_concurrency, found both"),
        ({"draft_len_schedule": {"a": 9}}, "error", "expected batch sizes and draft lengths"),
    ],
)
def test_files_of_others(change: dict[str, Any], severity: str, words: str) -> None:
    deployment = scheduled({1: 9})
    document = arguments(deployment, "trtllm")
    document["speculative_config"] = {**document["speculative_config"], **change}
    findings = check(deployment_config(deployment, load_schema("trtllm", None), document))
    (finding,) = [finding for finding in findings if finding.rule == "draft-schedule"]
    assert finding.severity == severity
    assert words in str(finding)
