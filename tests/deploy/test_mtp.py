# SPDX-License-Identifier: Apache-2.0
"""`--method mtp`: the target's MTP layers are read or refused, and configurations of it checked."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt.deploy.checker import check
from dflash_trt.deploy.finding import ERROR, UNCHECKED, WARNING
from dflash_trt.deploy.resolve import draft_deployment, resolve
from dflash_trt.deploy.schema import Runtime, load_schema
from dflash_trt.deploy.schema_check import check_schema
from dflash_trt.deploy.sizes import target_sizes
from dflash_trt.errors import CheckpointError, ConfigError
from tests.checkpoint.samples import edit_config
from tests.cli.commands import run
from tests.deploy.deployments import NAMES, RUNTIMES, arguments, config_of, findings, rendered, resolved, served_methods
from tests.deploy.rules.commands import found
from tests.paths import FIXTURES

DRAFT = FIXTURES / "tiny-qwen3-dflash"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / "tiny-qwen3", tmp_path / "target"))


def layers(target: Path) -> int | None:
    sizes = target_sizes(str(target))
    assert sizes is not None
    return sizes.num_mtp_layers


def test_layers_are_those_that_the_configuration_counts_and_the_files_hold(target: Path) -> None:
    """A quantised copy can keep the count and drop the tensors."""
    assert layers(target) == 0
    assert layers(edit_config(target, mtp_num_hidden_layers=1)) == 0
    tensors = load_file(target / "model.safetensors")
    save_file(tensors | {"mtp.fc.weight": torch.zeros(2, 2)}, target / "model.safetensors")
    assert layers(target) == 1
    assert layers(edit_config(target, "mtp_num_hidden_layers", num_nextn_predict_layers=2)) == 2
    (target / "model.safetensors").unlink()
    assert layers(target) == 2
    assert layers(edit_config(target, num_nextn_predict_layers=0)) == 0
    for wrong in (-1, "1", True):
        with pytest.raises(CheckpointError, match="num_nextn_predict_layers: expected an integer from 0"):
            layers(edit_config(target, num_nextn_predict_layers=wrong))


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_target_without_layers_is_refused_by_name(runtime: Runtime) -> None:
    with pytest.raises(ConfigError, match="found none in openai/gpt-oss-120b") as refused:
        rendered("gpt-oss-120b.b300x8.latency", runtime, "mtp")
    assert refused.value.hint == "compare with --method eagle3"
    with pytest.raises(ConfigError, match="found none in openai/gpt-oss-20b") as refused:
        rendered("gpt-oss-20b.h100x1.latency", runtime, "mtp")
    assert refused.value.hint == "compare with --method none"
    with pytest.raises(ConfigError, match=r"whether moonshotai/Kimi-K2\.5 has MTP layers is not known"):
        rendered("kimi-k2.5.b300x8.latency", runtime, "mtp")


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_what_is_written_has_no_findings(runtime: Runtime) -> None:
    names = [name for name in NAMES if "mtp" in served_methods(name) and runtime in resolved(name).runtimes]
    assert len(names) > 10
    for name in names:
        severe = {str(each) for each in findings(name, runtime, "mtp") if each.severity in (ERROR, WARNING)}
        assert severe <= {str(each) for each in findings(name, runtime, "none")}


def test_the_draft_length(target: Path) -> None:
    """vLLM runs its MTP layers in turn, each as often."""
    (target / "model.safetensors").unlink()
    edit_config(target, num_nextn_predict_layers=2)
    file = draft_deployment(str(DRAFT), target=str(target), gpus="b200x1")
    for K, expected in ((None, ERROR), (4, None), (1, None)):
        changed = file if K is None else msgspec.structs.replace(file, mtp_draft_tokens=K)
        deployment = resolve(changed, "x")
        written = arguments(deployment, "vllm", "mtp")
        assert written["speculative_config"] == {"method": "mtp", "num_speculative_tokens": K or 3}
        rules = {each.rule: each.severity for each in check(config_of(deployment, "vllm", written))}
        assert rules.get("mtp-layers") == expected
    assert arguments(deployment, "sglang", "mtp")["speculative_num_draft_tokens"] == 2


@pytest.mark.parametrize(
    ("command", "severities"),
    [
        ("vllm serve Qwen/Qwen3.8-27B --spec-method mtp --spec-tokens 3", []),
        ("vllm serve Qwen/Qwen3.8-27B --spec-method qwen3_5_mtp --spec-tokens 3", []),
        ("vllm serve Qwen/Qwen3-8B --spec-method mtp --spec-tokens 3", [ERROR]),
        ("vllm serve me/unknown --spec-method mtp --spec-tokens 3", [UNCHECKED]),
        ("vllm serve google/gemma-4-31B-it --spec-method mtp --spec-model a/assistant --spec-tokens 3", []),
        ("sglang serve --model-path Qwen/Qwen3.5-4B --speculative-algorithm NEXTN", []),
        ("sglang serve --model-path openai/gpt-oss-20b --speculative-algorithm NEXTN", [ERROR]),
        ("sglang serve --model-path Qwen/Qwen3-8B --speculative-algorithm DFLASH", []),
    ],
)
def test_a_command_is_checked_for_the_layers_of_its_target(command: str, severities: list[str]) -> None:
    assert [finding.severity for finding in found(command, "mtp-layers")] == severities


def test_vllm_needs_the_draft_length() -> None:
    (finding,) = found("vllm serve Qwen/Qwen3.8-27B --spec-method mtp", "missing-key")
    assert finding.key == "speculative_config.num_speculative_tokens"


@pytest.mark.parametrize("version", ["1.3.0rc27", "1.4.0rc1"])
def test_keys_of_tensorrt_llm(version: str) -> None:
    def rules(**section: object) -> list[str]:
        document = {"speculative_config": {"decoding_type": "MTP", "max_draft_len": 3} | section}
        return [each.rule for each in check_schema(load_schema("trtllm", version), document)]

    assert rules(use_relaxed_acceptance_for_thinking=True, relaxed_topk=10) == []
    assert rules(relaxed_top_k=10) == ["unknown-key"]
    assert rules(attention_backend="TRTLLM") == ["unknown-key"]
    assert rules(max_draft_len=-1) == ["out-of-range"]


def test_the_command_line(target: Path) -> None:
    words = ("serve-config", DRAFT, "--gpus", "b200x1", "--runtime", "vllm", "--method", "mtp")
    refused = run(*words, "--target", target)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert f"expected MTP layers, found none in {target}" in refused.stderr
