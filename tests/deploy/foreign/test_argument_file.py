# SPDX-License-Identifier: Apache-2.0
"""Files of arguments that a command names, and YAML alone, read as vLLM and SGLang read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_trt.deploy.checker import check
from dflash_trt.deploy.file_configs import file_configs
from dflash_trt.deploy.finding import ERROR, UNCHECKED, WARNING, Finding
from dflash_trt.deploy.rules.checked_config import CheckedConfig
from dflash_trt.deploy.schema import load_schema
from dflash_trt.errors import ConfigError

K24 = "speculative-config: {method: dflash, model: z-lab/Qwen3-8B-DFlash-b16, num_speculative_tokens: 24}\n"


def read(tmp_path: Path, text: str, *, name: str = "run.sh", runtime: str = "vllm", **files: str) -> CheckedConfig:
    (tmp_path / name).write_text(text)
    for each, content in files.items():
        (tmp_path / f"{each}.yaml").write_text(content)
    (config,) = file_configs(tmp_path / name, load_schema(runtime))
    return config


def rules(config: CheckedConfig, severity: str = ERROR) -> dict[str, Finding]:
    return {finding.rule: finding for finding in check(config) if finding.severity == severity}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no-enable-prefix-caching: true", {"enable_prefix_caching": False}),
        ("disable-prefix-caching: true", {"enable_prefix_caching": False}),
        ("speculative-config: '{\"model\": \"d\"}'", {"speculative_config": {"model": "d"}}),
        ("speculative-config.num_speculative_tokens: 3", {"speculative_config": {"num_speculative_tokens": 3}}),
        ("speculative_config: {model: d}", {"speculative_config": {"model": "d"}}),
        ("served-model-name: [a, b]", {"served_model_name": ["a", "b"]}),
        ("max-num-seqs: '8'", {"max_num_seqs": 8}),
        ("enforce-eager: false\nlora-modules: []", {}),
    ],
)  # fmt: skip
def test_yaml_of_vllm(text: str, expected: dict[str, Any], tmp_path: Path) -> None:
    config = read(tmp_path, f"port: 1\n{text}\n", name="vllm.yaml")
    assert config.document == {"port": 1} | expected
    assert config.reading == []


@pytest.mark.parametrize("program", ["vllm serve m", "python -m vllm.entrypoints.openai.api_server --model m"])
def test_the_file_of_a_command(program: str, tmp_path: Path) -> None:
    """The command's own arguments win, and what the file says is checked."""
    config = read(tmp_path, f"{program} --config c.yaml --port 2", c=f"port: 1\nmax-num-seqs: 5\n{K24}")
    assert (config.document["port"], config.document["max_num_seqs"]) == (2, 5)
    assert "at most 15" in rules(config)["draft-length"].problem


def test_the_file_of_sglang(tmp_path: Path) -> None:
    text = "speculative-num-draft-tokens: 17\ntp: 2\nenable-metrics: true\ndisable-radix-cache: false\n"
    command = "sglang serve --model-path Qwen/Qwen3-8B --speculative-algorithm DFLASH --config c.yaml --tp 4"
    command += " --speculative-draft-model-path z-lab/Qwen3-8B-DFlash-b16"
    config = read(tmp_path, command, runtime="sglang", c=text)
    assert {"tp_size": 4, "enable_metrics": True}.items() <= config.document.items()
    assert "disable_radix_cache" not in config.document
    assert "at most 16" in rules(config)["draft-length"].problem
    refused = read(tmp_path, "sglang serve --model m --config c.yaml", runtime="sglang", c="enable-lora: true\n")
    assert rules(refused)["refused-key"].key == "enable-lora"


def test_false_is_dropped_by_vllm_serve(tmp_path: Path) -> None:
    """The top-level parser looks for --no-x among its own options, and has none."""
    text = "enable-prefix-caching: false\n"
    dropped = read(tmp_path, "vllm serve m --config c.yaml", c=text)
    assert "enable_prefix_caching" not in dropped.document
    assert rules(dropped, WARNING)["dropped-key"].fix == "write no-enable-prefix-caching: true"
    module = read(tmp_path, "python -m vllm.entrypoints.openai.api_server --model m --config c.yaml", c=text)
    assert module.document["enable_prefix_caching"] is False
    assert module.reading == []
    assert "zzz" in rules(read(tmp_path, "vllm serve m --config c.yaml", c="zzz: false\n"))["unknown-key"].key


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("vllm serve m --config no.yaml", r"names 'no\.yaml', which is not beside it"),
        ("vllm serve m --config a.json", r"must end in \.yaml or \.yml"),
        ("vllm serve m --config", "names no file"),
        ("vllm serve m --config a.yaml --config b.yaml", "given twice"),
        ("vllm serve m --config list.yaml", r"expected a mapping of arguments, found \[1, 2\]"),
        ("sglang serve --model m --config number.yaml", "expected names of arguments as keys, found 1"),
        ("trtllm-serve m --config list.yaml", r"expected a mapping of arguments, found \[1, 2\]"),
    ],
)
def test_files_that_are_refused(command: str, said: str, tmp_path: Path) -> None:
    runtime = next(name for name in ("vllm", "sglang", "trtllm") if command.startswith(name))
    with pytest.raises(ConfigError, match=said):
        read(tmp_path, command, runtime=runtime, list="[1, 2]", number="1: 2")


@pytest.mark.parametrize("command", ["vllm serve m", "sglang serve --model m", "trtllm-serve m"])
def test_a_file_elsewhere_is_not_opened(command: str, tmp_path: Path) -> None:
    """Neither an absolute path, one above the script's folder, nor a link that leads there; no rule judges the rest."""
    (folder := tmp_path / "folder").mkdir()
    (tmp_path / "c.yaml").write_text("port: 1\nmax_batch_size: 1\n")
    (folder / "link.yaml").symlink_to(tmp_path / "c.yaml")
    runtime = next(name for name in ("vllm", "sglang", "trtllm") if command.startswith(name))
    for name in (tmp_path / "c.yaml", "../c.yaml", "link.yaml"):
        config = read(folder, f"{command} --config {name}", runtime=runtime)
        assert "port" not in config.document
        (finding,) = check(config)
        assert (finding.rule, finding.severity) == ("unopened-file", UNCHECKED)


@pytest.mark.parametrize("command", ["vllm serve m", "sglang serve --model m", "trtllm-serve m"])
def test_a_file_that_only_the_shell_can_name(command: str, tmp_path: Path) -> None:
    (finding,) = check(read(tmp_path, f"{command} --config $FILE", runtime=command.split()[0].removesuffix("-serve")))
    assert (finding.rule, finding.severity) == ("unopened-file", UNCHECKED)


@pytest.mark.parametrize("command", ["vllm serve m --config=c.yaml", "sglang serve --model m --config=c.yaml"])
def test_a_joined_name_is_ignored_by_the_runtime(command: str, tmp_path: Path) -> None:
    config = read(tmp_path, command, runtime=command.split()[0], c="port: 1\n")
    assert "port" not in config.document
    assert rules(config)["unopened-file"].fix == "write --config, a space and the file"


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("source env.sh\n. ./more.sh\nvllm serve m", ["variables that env.sh sets", "variables that ./more.sh sets"]),
        ("bash -c 'source a.sh; vllm serve m'", ["variables that a.sh sets"]),
        ("docker run --env-file a.env vllm/vllm-openai m", ["variables that a.env sets"]),
        ("docker run --env-file=a.env vllm/vllm-openai m", ["variables that a.env sets"]),
        ("vllm serve m --hf-config-path c.json", ["what is in c.json"]),
        ("vllm serve m", []),
    ],
)
def test_files_that_are_not_opened_are_listed(text: str, problems: list[str], tmp_path: Path) -> None:
    unread = [finding for finding in read(tmp_path, text).reading if finding.rule == "unread-file"]
    assert [finding.problem for finding in unread] == problems
    assert all(finding.severity == UNCHECKED for finding in unread)


def test_dotted_keys_replace_the_whole_value(tmp_path: Path) -> None:
    command = """vllm serve m --speculative-config '{"method": "dflash"}' --speculative-config.model d"""
    config = read(tmp_path, command)
    assert config.document["speculative_config"] == {"model": "d"}
    assert [finding.rule for finding in config.reading] == ["replaced"]
