# SPDX-License-Identifier: Apache-2.0
"""`--method ngram`: written for each runtime, and configurations of it checked."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dflash_trt.deploy.checker import check
from dflash_trt.deploy.finding import ERROR, UNCHECKED, WARNING
from dflash_trt.deploy.resolve import resolve
from dflash_trt.deploy.schema import Runtime, load_schema
from dflash_trt.deploy.schema_check import check_schema
from tests.deploy.deployments import NAMES, RUNTIMES, arguments, config_of, findings, resolved
from tests.deploy.rules.commands import found

SGLANG = "sglang serve --model-path Qwen/Qwen3-8B --speculative-algorithm NGRAM"
VLLM = "vllm serve Qwen/Qwen3-8B --spec-method"


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_what_is_written_has_no_findings(runtime: Runtime) -> None:
    for name in (each for each in NAMES if runtime in resolved(each).runtimes):
        severe = {str(each) for each in findings(name, runtime, "ngram") if each.severity in (ERROR, WARNING)}
        assert severe <= {str(each) for each in findings(name, runtime, "none")}, name


@pytest.mark.parametrize("K", [None, 3])
def test_every_runtime_drafts_a_chain_of_as_many_tokens(K: int | None) -> None:
    file = resolved("qwen3-8b.h200x1.latency").file
    changed = file if K is None else msgspec.structs.replace(file, ngram_draft_tokens=K)
    deployment, length = resolve(changed, "x"), K or 5
    assert deployment.draft_length("ngram") == length
    sections = {runtime: arguments(deployment, runtime, "ngram") for runtime in RUNTIMES}
    vllm, trtllm = sections["vllm"]["speculative_config"], sections["trtllm"]["speculative_config"]
    assert vllm == {"method": "ngram", "num_speculative_tokens": length}
    assert trtllm == {"decoding_type": "NGram", "max_draft_len": length, "is_public_pool": False}
    drafts = {key: value for key, value in sections["sglang"].items() if key.startswith("speculative")}
    assert drafts == {
        "speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": length + 1,
        "speculative_ngram_max_bfs_breadth": 1,
    }  # fmt: skip


def test_nothing_else_of_drafts_is_written_for_it() -> None:
    """The sampler's settings are those of drafters inside TensorRT-LLM's model; prefixes are cached as without."""
    file = msgspec.structs.replace(resolved("qwen3-8b.h200x1.latency").file, use_rejection_sampling=True)
    section: dict[str, Any] = arguments(resolve(file, "x"), "trtllm", "ngram")["speculative_config"]
    assert section.keys() == {"decoding_type", "max_draft_len", "is_public_pool"}
    for runtime in RUNTIMES:
        assert resolved("qwen3-8b.h200x1.latency").reuses_prefixes(runtime, "ngram")


@pytest.mark.parametrize(
    ("command", "rule", "severities"),
    [
        (f"{VLLM} ngram", "missing-key", [ERROR]),
        (f"{VLLM} ngram_gpu", "missing-key", [ERROR]),
        (f"{VLLM} ngram --spec-tokens 3", "missing-key", []),
        (f"{VLLM} ngram --spec-tokens 3 -sc.prompt_lookup_min 4 -sc.prompt_lookup_max 2", "ngram-lengths", [ERROR]),
        (f"{VLLM} ngram --spec-tokens 3 -sc.prompt_lookup_min 2 -sc.prompt_lookup_max 4", "ngram-lengths", []),
        (SGLANG, "ngram-tree", [UNCHECKED]),
        (f"{SGLANG} --page-size 64", "ngram-tree", [ERROR]),
        (f"{SGLANG} --page-size 64 --attention-backend flashinfer", "ngram-tree", []),
        (f"{SGLANG} --page-size 64 --speculative-ngram-max-bfs-breadth 1", "ngram-tree", []),
        (f"{SGLANG} --page-size 1", "ngram-tree", []),
        (f"{SGLANG} --attn-dp-size 2", "dp-attention", [ERROR]),
        (f"{SGLANG} --enable-dp-attention --dp-size 2", "dp-attention", [ERROR]),
    ],
)
def test_a_command_is_checked(command: str, rule: str, severities: list[str]) -> None:
    assert [finding.severity for finding in found(command, rule)] == severities


@pytest.mark.parametrize("version", ["1.3.0rc27", "1.4.0rc1"])
def test_keys_of_tensorrt_llm(version: str) -> None:
    def rules(**section: object) -> list[str]:
        document = {"speculative_config": {"decoding_type": "NGram", "max_draft_len": 5} | section}
        return [each.rule for each in check_schema(load_schema("trtllm", version), document)]

    assert rules(max_matching_ngram_size=3, is_keep_all=False, is_use_oldest=False, is_public_pool=True) == []
    assert rules(max_ngram_size=3) == ["unknown-key"]
    assert rules(max_matching_ngram_size=0) == ["out-of-range"]


@pytest.mark.parametrize("K", [None, 0])
def test_tensorrt_llm_refuses_it_without_a_draft_length(K: int | None) -> None:
    deployment = resolved("qwen3-8b.h200x1.latency")
    written = arguments(deployment, "trtllm", "ngram")
    written["speculative_config"]["max_draft_len"] = K
    assert ("missing-key", ERROR) in {
        (each.rule, each.severity) for each in check(config_of(deployment, "trtllm", written))
    }
