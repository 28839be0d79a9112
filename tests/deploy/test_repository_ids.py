# SPDX-License-Identifier: Apache-2.0
"""Drafts and targets by repository id, where a deployment or an engine is expected: used, or the command that fits."""

from __future__ import annotations

import pytest

from dflash_trt.deploy.catalog import known_deployments, known_pair
from tests.cli.commands import run

DRAFT, TARGET = "z-lab/gpt-oss-20b-DFlash", "openai/gpt-oss-20b"


@pytest.mark.parametrize("source", [DRAFT, TARGET])
def test_a_deployment_of_known_ids_needs_the_gpus_alone(source: str) -> None:
    written = run("serve-config", source, "--gpus", "h100x1", "--runtime", "vllm")
    assert written.returncode == 0, written.stderr
    assert f"vllm serve {TARGET} " in written.stdout
    assert f'"model": "{DRAFT}"' in written.stdout
    whole = run("serve-config", DRAFT, "--target", TARGET, "--gpus", "h100x1", "--runtime", "vllm")
    assert written.stdout == whole.stdout


def test_a_target_takes_the_draft_that_is_given() -> None:
    other = "z-lab/Qwen3.6-27B-DFlash"
    written = run("serve-config", "Qwen/Qwen3.5-27B", "--draft", other, "--gpus", "h200x1", "--runtime", "vllm")
    assert "vllm serve Qwen/Qwen3.5-27B " in written.stdout
    assert f'"model": "{other}"' in written.stdout
    refused = run("serve-config", DRAFT, "--draft", DRAFT, "--gpus", "h100x1", "--runtime", "vllm")
    assert "--draft is for a deployment file" in refused.stderr


@pytest.mark.parametrize("source", [DRAFT, TARGET])
@pytest.mark.parametrize("command", ["serve", "chat"])
def test_where_an_engine_is_expected_the_command_that_makes_it_is_whole(command: str, source: str) -> None:
    refused = run(command, source)
    assert refused.returncode == 1
    assert f"found the repository {source}" in refused.stderr
    assert f"dflash-trt build {DRAFT} --target {TARGET} -o engine" in refused.stderr
    assert "dflash-trt serve-config gpt-oss-20b.b200x1.latency" in refused.stderr


@pytest.mark.parametrize(
    "command", [("estimate", TARGET, "--tau", 3), ("tune", DRAFT, "--tau", 3, "--slo", 9), ("try", TARGET),
                ("serve-config", TARGET, "--runtime", "vllm")],
)  # fmt: skip
def test_where_a_deployment_is_expected_those_of_the_id_are_named(command: tuple[object, ...]) -> None:
    refused = run(*command)
    assert refused.returncode in (1, 2)
    assert "gpt-oss-20b.b200x1.latency" in refused.stderr


def test_an_id_that_nobody_knows_is_fetched_or_refused() -> None:
    """No test has a network: the hub's own refusal is shown."""
    for command in (
        ("serve-config", "some/draft", "--target", TARGET, "--gpus", "h100x1", "--runtime", "vllm"),
        ("serve-config", "qwen3-8b.h200x1.latency", "--target", "some/draft", "--runtime", "vllm"),
        ("serve-config", "qwen3-8b.h200x1.latency", "--draft", "some/draft", "--runtime", "vllm"),
        ("estimate", "qwen3-8b.h200x1.latency", "--target", "some/draft", "--tau", 3),
    ):
        refused = run(*command)
        assert refused.returncode == 1
        assert "some/draft: no files in the Hugging Face cache, and HF_HUB_OFFLINE is set" in refused.stderr


def test_copies_of_a_target_have_its_draft_and_others_none() -> None:
    pair = known_pair("RedHatAI/Qwen3-8B-FP8-dynamic")
    assert pair is not None
    assert (pair[0].target, pair[1]) == ("Qwen/Qwen3-8B", "RedHatAI/Qwen3-8B-FP8-dynamic")
    assert known_pair("some/model") is None
    assert known_deployments("some/model") == []
