# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt serve-config` as a user runs it, and repository ids where a deployment or an engine is expected."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import click
import pytest
import yaml

from dflash_trt.deploy.catalog import known_deployments, known_pair
from dflash_trt.deploy.schema import PACKAGES
from dflash_trt.engine.manifest import read_manifest
from dflash_trt.errors import ConfigError
from tests.cli.commands import run, run_here
from tests.deploy.deployments import BUILD_CONFIGS, NAMES, RUNTIMES, rendered
from tests.paths import FIXTURES
from tests.test_imports import loaded_by

LATENCY = BUILD_CONFIGS / "gpt-oss-120b.b300x8.latency.yaml"
NVFP4 = BUILD_CONFIGS / "gpt-oss-120b.b300x8.nvfp4.yaml"


def test_stdout_is_the_file() -> None:
    result = run("serve-config", LATENCY, "--runtime", "trtllm")
    assert result.returncode == 0
    assert result.stdout == rendered(LATENCY.stem, "trtllm").text


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_what_is_written_passes_the_check(runtime: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_here("serve-config", LATENCY, "--runtime", runtime)
    file = tmp_path / "written"
    file.write_text(capsys.readouterr().out)
    run_here("serve-config", LATENCY, "--runtime", runtime, "--check", file, "--json")
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "dflash-trt/serve-config-check/1"
    assert document["passed"] is True
    assert {finding["severity"] for finding in document["findings"]} <= {"warning", "not checked"}
    run_here("serve-config", LATENCY, "--runtime", runtime, "--check", file)
    verdict = capsys.readouterr().out.splitlines()[-1]
    assert verdict.startswith(f"{file}: ")
    assert f" against {PACKAGES[runtime]} {document['version']}" in verdict  # type: ignore[index]


@pytest.mark.parametrize(
    "option",
    [("--method", "mtp"), ("-o", "x"), ("--launcher", "slurm"), ("--host", "a"), ("--port", "1"), ("--set", "a=1")],
)
def test_a_check_refuses_what_only_writing_uses(option: tuple[str, str]) -> None:
    with pytest.raises(click.UsageError, match=r"is for a configuration that is written"):
        run_here("serve-config", "--check", LATENCY, "--runtime", "vllm", *option)


def test_a_broken_file_exits_with_1_and_lists_everything(tmp_path: Path) -> None:
    file = tmp_path / "broken.yaml"
    document = yaml.safe_load(rendered(LATENCY.stem, "trtllm").text)
    document |= {"max_batch_siz": 64, "max_num_tokens": 100}
    file.write_text(yaml.safe_dump(document))
    result = run("serve-config", "--check", file, "--runtime", "trtllm", "--version", "1.4.0rc1", "--gpus", "b300x8")
    assert result.returncode == 1
    lines = result.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines if "[unknown-key]" in line or "[token-budget]" in line] == [
        "error", "error",
    ]  # fmt: skip
    assert result.stderr.startswith(f"error: {file} cannot run in tensorrt_llm 1.4.0rc1: 2 errors")


def test_a_release_without_a_schema_is_written_and_checked_with_a_warning(tmp_path: Path) -> None:
    """By the nearest schema; a key that it lacks may have come since, a slip may not."""
    file, release = tmp_path / "serve.yaml", ("--runtime", "trtllm", "--version", "1.4.0rc4")
    written = run("serve-config", LATENCY, *release, "-o", file)
    assert written.returncode == 0
    differs = "found 1.4.0rc4, compared with 1.4.0rc1: keys, defaults and limits that came, went or changed between"
    assert differs in written.stderr
    assert "tensorrt-llm/release:1.4.0rc4" in written.stdout
    checked = run("serve-config", LATENCY, *release, "--check", file)
    assert checked.returncode == 0
    assert "warning: --version: " in checked.stdout
    assert differs in checked.stdout
    by = "1 warning against tensorrt_llm 1.4.0rc4 by the schema of 1.4.0rc1, the nearest that is known"
    assert by in checked.stdout.splitlines()[-1]
    file.write_text(file.read_text() + "max_batch_siz: 1\n")
    assert run("serve-config", LATENCY, *release, "--check", file).returncode == 1
    assert run("serve-config", LATENCY, *release, "--strict").returncode == 1
    file.write_text("vllm serve Qwen/Qwen3-8B --a-flag-that-came-since 1\n")
    for version, code in (("0.33.0", 1), ("0.34.0", 0)):
        assert run("serve-config", "--check", file, "--runtime", "vllm", "--version", version).returncode == code


def test_engine_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Built from a deployment file, named like it, and served from its directory."""
    config = tmp_path / "tiny.yaml"
    config.write_text(
        f"description: a fixture\ntarget: {FIXTURES / 'tiny-gpt-oss'}\ndraft: {FIXTURES / 'tiny-gpt-oss-dflash'}\n"
        "gpus: b300x1\npurpose: latency\nmode: engine\nrecipe: nvfp4\n"
    )
    engine = tmp_path / "engine"
    run_here("build", config, "-o", engine)
    manifest = json.loads((engine / "manifest.json").read_text())
    assert manifest["source"]["recipe"] == "nvfp4"
    capsys.readouterr()
    run_here("serve-config", engine, "--target", FIXTURES / "tiny-gpt-oss", "--gpus", "b300x1", "--runtime", "trtllm")
    output = capsys.readouterr()
    document = yaml.safe_load(output.out)
    spec = read_manifest(engine).draft
    assert document["speculative_config"] == {
        "decoding_type": "DFlash", "speculative_model": str(engine), "max_draft_len": 7,
        "attention_backend": "TRTLLM", "target_layer_ids": list(spec.target_layer_ids),
        "mask_token_id": spec.mask_token_id, "enable_penalty": True,
    }  # fmt: skip
    assert "python -m dflash_trt.trtllm trtllm-serve" in output.err
    run_here("serve-config", config, "--draft", engine, "--runtime", "trtllm")
    assert yaml.safe_load(capsys.readouterr().out)["speculative_config"] == document["speculative_config"]
    monkeypatch.chdir(tmp_path)  # a name that only this directory knows would be read in another
    run_here("serve-config", "engine", "--target", FIXTURES / "tiny-gpt-oss", "--gpus", "b300x1", "--runtime", "trtllm")
    assert yaml.safe_load(capsys.readouterr().out)["speculative_config"] == document["speculative_config"]


def test_checkpoints_and_files_that_are_refused(tmp_path: Path) -> None:
    draft, target = FIXTURES / "tiny-gpt-oss-dflash", FIXTURES / "tiny-gpt-oss"
    with pytest.raises(ConfigError, match=": 1 error"):
        run_here(
            "serve-config", draft, "--target", target, "--gpus", "h100x1", "--runtime", "trtllm",
            "--set", f"speculative_config.speculative_model={draft}",
        )  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        run_here("serve-config", "--check", tmp_path, "--runtime", "trtllm")
    assert caught.value.message == f"cannot read {tmp_path}: Is a directory"


@pytest.mark.parametrize("runtime", ["trtllm", "vllm", "sglang"])
@pytest.mark.parametrize("key", ["purpose:", "purpse:"])
def test_a_deployment_is_no_configuration_of_a_runtime(runtime: str, key: str, tmp_path: Path) -> None:
    file = tmp_path / "my deployment.yaml"
    file.write_text(NVFP4.read_text().replace("purpose:", key))
    with pytest.raises(ConfigError) as caught:
        run_here("serve-config", "--check", file, "--runtime", runtime)
    expected = f"{file}: expected a configuration of {runtime}, found a deployment, from which one is written"
    assert caught.value.message == expected
    assert f"dflash-trt serve-config '{file}' --runtime {runtime}" in str(caught.value.hint)


def test_what_cannot_run_is_refused_before_anything_starts(tmp_path: Path) -> None:
    file = tmp_path / "large.yaml"
    file.write_text(NVFP4.read_text() + "max_batch_size: 4096\nmax_num_tokens: 65536\ndraft_attention: VANILLA\n")
    result = run("serve-config", file, "--runtime", "trtllm")
    assert result.returncode == 1
    assert result.stdout == ""
    assert "[context-arena]" in result.stderr
    assert re.search(r"lower to max_batch_size \d+ or max_seq_len \d+", result.stderr)
    assert run("build", file, "--dry-run").returncode == 1
    file = tmp_path / "hopper.yaml"
    file.write_text(NVFP4.read_text().replace("b300x8", "h200x8"))
    result = run("serve-config", file, "--runtime", "trtllm")
    assert result.returncode == 1
    assert (
        "NVFP4: expected a GPU of SM 10.0 or newer, found SM 9.0; build --recipe fp8, int4-w4a16 or bf16"
        in result.stderr
    )
    assert "[precision]" in result.stderr
    assert "found SM 9.0" in run("build", file, "--dry-run").stderr


def test_dry_run_says_where_every_value_came_from(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run_here("build", NVFP4, "--dry-run", "--json")
    document = json.loads(capsys.readouterr().out)
    settings = {entry["key"]: (entry["value"], entry["source"]) for entry in document["settings"]}
    assert settings["gpus"] == ("b300x8", "file")
    assert settings["mode"] == ("engine", "file")
    assert settings["max_batch_size"] == (64, "default for latency")
    assert settings["num_draft_tokens"] == (9, "block_size - 1, published facts")
    assert settings["draft_attention"] == ("TRTLLM", "engine mode on SM 10.3")
    assert settings["kv_cache_fraction"] == (0.9, "default")
    assert settings["speculative_config.context_recompute_tail"] == ("0", "schema: TensorRT-LLM 1.4.0rc1")
    assert document["memory"]["fits"] is True
    assert document["draft"]["block_size"] == 10
    config = tmp_path / "tiny.yaml"
    config.write_text(
        f"description: a fixture\ntarget: {FIXTURES / 'tiny-qwen3'}\ndraft: {FIXTURES / 'tiny-qwen3-dflash'}\n"
        "gpus: h100x1\npurpose: throughput\nmax_seq_len: 512\n"
    )
    run_here("build", config, "--dry-run")
    text = " ".join(capsys.readouterr().out.split())
    for words in ("block_size - 1,", "checkpoint", "default for throughput", "memory of each H100 SXM 80 GB", "1/1 of"):
        assert words in text


def test_a_draft_that_is_not_here(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        run_here("serve-config", LATENCY, "--runtime", "vllm", "--draft", tmp_path / "no-such-directory")
    assert caught.value.hint == "check the path to the checkpoint"


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve-config", "--runtime", "trtllm"], ["serve-config", LATENCY], ["serve-config", "--list", "--check", "f"],
        ["serve-config", "--list", "--runtime", "vllm"], ["serve-config", LATENCY, "--runtime", "tgi"],
        ["serve-config", LATENCY, "--runtime", "trtllm", "--gpus", "b300x8"],
        ["serve-config", LATENCY, "--runtime", "trtllm", "--json"],
        ["serve-config", FIXTURES / "tiny-qwen3-dflash", "--runtime", "trtllm"],
        ["serve-config", LATENCY, "--runtime", "trtllm", "--host", ""], ["build", NVFP4, "--recipe", "fp8"],
        *(["build", FIXTURES / "tiny-qwen3-dflash", *words] for words in (["--dry-run"], ["--json"], ["-o", "x"])),
    ],
)  # fmt: skip
def test_wrong_usage(arguments: list[object]) -> None:
    with pytest.raises(click.UsageError):
        run_here(*arguments)


def test_the_list_of_shipped_deployments(capsys: pytest.CaptureFixture[str]) -> None:
    run_here("serve-config", "--list", "--json")
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "dflash-trt/deployments/1"
    assert [entry["name"] for entry in document["deployments"]] == NAMES
    assert all(Path(entry["file"]).stem == entry["name"] and entry["description"] for entry in document["deployments"])


@pytest.mark.parametrize("pattern", ["gpt-oss-120b.b300", "OPENAI/gpt-oss-120b", "oss*nvfp4"])
def test_the_list_by_a_pattern(pattern: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_here("serve-config", "--list", pattern, "--json")
    names = [entry["name"] for entry in json.loads(capsys.readouterr().out)["deployments"]]
    assert NVFP4.stem in names
    assert len(names) < len(NAMES)
    with pytest.raises(ConfigError, match="matches nowhere"):
        run_here("serve-config", "--list", "nowhere")


@pytest.mark.parametrize("content", ["- 1\n", "just words\n", "vllm serve 'open\n", "a: [\n"])
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_files_that_are_no_configuration(tmp_path: Path, content: str, runtime: str) -> None:
    file = tmp_path / "file"
    file.write_text(content)
    with pytest.raises(ConfigError, match="expected"):
        run_here("serve-config", "--check", file, "--runtime", runtime)


def test_nothing_heavy_is_loaded(tmp_path: Path) -> None:
    """Writing a configuration needs neither a framework nor the network."""
    shutil.copy(LATENCY, tmp_path / "mine.yaml")
    arguments = ["serve-config", str(tmp_path / "mine.yaml"), "--runtime", "trtllm"]
    assert loaded_by(f"sys.argv[1:] = {arguments}; from dflash_trt.cli import main; main()") == {"jsonschema"}


def test_strict_refuses_warnings_that_the_file_does_not_accept(tmp_path: Path) -> None:
    kimi = BUILD_CONFIGS / "kimi-k2.5.b300x8.latency.yaml"
    accepted = run("serve-config", kimi, "--runtime", "trtllm", "--strict")
    assert accepted.returncode == 0, accepted.stderr
    assert "accepted: model: expected a target whose layers are captured" in accepted.stderr
    assert "warning" not in accepted.stderr
    file = tmp_path / "kimi.yaml"
    file.write_text("".join(line for line in kimi.open() if not line.startswith("accepted_warnings")))
    assert run("serve-config", file, "--runtime", "trtllm").returncode == 0
    refused = run("serve-config", file, "--runtime", "trtllm", "--strict")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "error: model: expected a target whose layers are captured" in refused.stderr


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
@pytest.mark.parametrize("command", ["verify", "dynamo"])
def test_where_an_engine_is_expected_the_command_that_makes_it_is_whole(command: str, source: str) -> None:
    refused = run(command, source)
    assert refused.returncode == 1
    assert f"{source} is a repository, not an engine directory" in refused.stderr
    assert f"dflash-trt build {DRAFT} --target {TARGET} -o engine" in refused.stderr
    assert f"dflash-trt serve-config --list {source}" in refused.stderr


@pytest.mark.parametrize(
    "command", [("estimate", TARGET, "--tau", 3), ("tune", DRAFT, "--tau", 3, "--slo", 9),
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
    assert (pair[0].target, pair[1]) == ("Qwen/Qwen3-8B", "RedHatAI/Qwen3-8B-FP8-dynamic")
    assert known_pair("some/model") is None
    assert known_deployments("some/model") == []
