# SPDX-License-Identifier: Apache-2.0
"""Arguments of runtimes that no key stands for: written over the others, for the method that they fit, and checked."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from dflash_trt.deploy.deployment_file import load_deployment
from dflash_trt.deploy.resolve import resolve
from dflash_trt.deploy.resolved_deployment import with_settings
from dflash_trt.deploy.schema import Runtime, load_schema
from tests.cli.commands import run
from tests.deploy.deployments import BUILD_CONFIGS, NAMES, RUNTIMES, rendered, resolved

NAME = "qwen3-8b.h200x1.latency"
ARGUMENTS = {
    "vllm": ["--attention-backend FLASH_ATTN", "--max-num-seqs", "7", "--speculative-config.attention-backend TRITON"],
    "sglang": ["--attention-backend fa3", "--speculative-draft-attention-backend fa4"],
    "trtllm": {"max_batch_size": 7, "kv_cache_config": {"tokens_per_block": 64}},
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    document = yaml.safe_load((BUILD_CONFIGS / f"{NAME}.yaml").read_text())
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(document | {"runtime_arguments": ARGUMENTS}))
    return path


def test_they_win_and_those_of_drafts_are_for_drafts(file: Path) -> None:
    vllm, plain = (run("serve-config", file, "--runtime", "vllm", "--method", m).stdout for m in ("dflash", "none"))
    for text in (vllm, plain):
        assert "--attention-backend FLASH_ATTN" in text
        assert "--max-num-seqs 7 " in text
    assert '"attention_backend": "TRITON"}' in vllm
    assert "--speculative-config" not in plain
    sglang = run("serve-config", file, "--runtime", "sglang", "--method", "none").stdout
    assert "--attention-backend fa3" in sglang
    assert "fa4" not in sglang
    trtllm = yaml.safe_load(run("serve-config", file, "--runtime", "trtllm").stdout)
    assert trtllm["max_batch_size"] == 7
    assert trtllm["kv_cache_config"]["tokens_per_block"] == 64
    assert trtllm["kv_cache_config"]["free_gpu_memory_fraction"] == 0.9


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_set_is_an_argument_of_the_file_and_changes_the_digest(runtime: Runtime, file: Path) -> None:
    setting = {"trtllm": "kv_cache_config.tokens_per_block=32", "vllm": "max-num-seqs=5", "sglang": "page_size=64"}
    ours = resolve(load_deployment(file), "mine")
    assert with_settings(ours, runtime, []) == ours
    text = run("serve-config", file, "--runtime", runtime, "--set", setting[runtime]).stdout
    assert {"trtllm": "tokens_per_block: 32", "vllm": "--max-num-seqs 5 ", "sglang": "--page-size 64"}[runtime] in text
    assert f"settings {ours.digest}" not in text


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("zzz=3", "zzz: not known to this schema"),
        ("max_num_seqz=3", "write max_num_seqs"),
        ("max_num_seqs=many", "max_num_seqs: expected an integer or null, found 'many'"),
        ("model_tag=other", "expected arguments that nothing else decides, found model_tag"),
        ("port=1", "expected arguments that nothing else decides, found port"),
        ("max_num_seqs", "--set: expected KEY=VALUE, found 'max_num_seqs'"),
        ("speculative_config.num_speculative_tokens=99", "expected at most 15"),
    ],
)
def test_they_are_checked_like_the_rest(setting: str, said: str) -> None:
    refused = run("serve-config", NAME, "--runtime", "vllm", "--set", setting)
    assert refused.returncode == 1
    assert said in refused.stderr
    assert refused.stdout == ""


SPECULATION = {
    "trtllm": ("speculative_config.enable_penalty=false", "enable_penalty: false"),
    "vllm": ("speculative_config.draft_sample_method=greedy", '"draft_sample_method": "greedy"'),
    "sglang": ("speculative_num_steps=2", "--speculative-num-steps 2"),
}


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("method", ["dflash", "eagle3", "ngram"])
def test_set_reaches_the_drafts_of_every_method(method: str, runtime: Runtime, file: Path) -> None:
    setting, written = SPECULATION[runtime]
    words = ("serve-config", file, "--runtime", runtime, "--set", setting)
    assert written in run(*words, "--method", method).stdout
    refused = run(*words, "--method", "none")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "--method none decodes without drafts" in refused.stderr


@pytest.mark.parametrize("method", ["eagle3", "none"])
def test_a_files_short_flags_of_drafts_are_dflashs(method: str, tmp_path: Path) -> None:
    document = yaml.safe_load((BUILD_CONFIGS / f"{NAME}.yaml").read_text())
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(document | {"runtime_arguments": {"vllm": ["--spec-tokens 7"]}}))
    assert "spec-tokens" not in run("serve-config", path, "--runtime", "vllm", "--method", method).stdout


@pytest.mark.parametrize(("runtime", "key"), [("vllm", "gpu_memory_utilization"), ("sglang", "mem_fraction_static")])
def test_a_share_of_the_pool_that_is_tensorrt_llms_alone(runtime: Runtime, key: str, tmp_path: Path) -> None:
    document = yaml.safe_load((BUILD_CONFIGS / f"{NAME}.yaml").read_text())
    document.pop("runtime_arguments")
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(document | {"kv_cache_fraction": 0.6}))
    said = f"{key}: expected a share of the GPU's memory, found none: kv_cache_fraction 0.6"
    assert said in run("serve-config", path, "--runtime", runtime).stderr
    assert said not in run("serve-config", path, "--runtime", runtime, "--set", f"{key}=0.8").stderr
    assert "kv_cache_fraction" not in run("serve-config", path, "--runtime", "trtllm").stderr


def test_words_that_are_no_flags_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    document = yaml.safe_load((BUILD_CONFIGS / f"{NAME}.yaml").read_text())
    path.write_text(yaml.safe_dump(document | {"runtime_arguments": {"sglang": ["attention-backend fa3"]}}))
    refused = run("serve-config", path, "--runtime", "sglang")
    assert refused.returncode == 1
    assert "runtime_arguments.sglang: error: attention-backend: expected a flag" in refused.stderr


def test_shipped_arguments_are_known_and_change_something() -> None:
    for name in NAMES:
        arguments = resolved(name).runtime_arguments
        for runtime in resolved(name).runtimes:
            found = arguments.of(runtime, name)
            assert found.keys() <= load_schema(runtime).properties().keys()
            assert found.items() <= rendered(name, runtime).arguments.items() or "speculative_config" in found


def test_authors_settings_are_there_with_their_source_or_were_not_found() -> None:
    for name in NAMES:
        text = (BUILD_CONFIGS / f"{name}.yaml").read_text()
        _, is_there, block = text.partition("runtime_arguments:")
        assert is_there or "# Authors' settings: " in text, name
        head, *lines = block.splitlines() or [""]
        assert all("#" in head + line for line in lines if not line.startswith("    ")), name
