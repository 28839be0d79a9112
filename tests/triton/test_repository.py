# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt triton-repo` as a user runs it, and what it writes, byte for byte: tests/golden/triton/."""

from __future__ import annotations

import shutil
from pathlib import Path

import click
import msgspec
import pytest
import torch
import tritonclient.grpc.model_config_pb2 as schema
import yaml
from google.protobuf import text_format

from dflash_trt import LLM, SamplingParams
from dflash_trt.deploy.checker import check
from dflash_trt.deploy.file_configs import file_configs
from dflash_trt.deploy.schema import load_schema
from dflash_trt.errors import BuildError, CheckpointError, ConfigError, EngineError
from dflash_trt.triton.model_file import EmbeddedModel, TritonConfig, read_model
from dflash_trt.triton.repository import instructions, write_repository
from tests.cli.commands import run, run_here
from tests.deploy.deployments import BUILD_CONFIGS, rendered
from tests.paths import FIXTURES, REPOSITORY
from tests.triton.conftest import TARGET

GOLDEN = REPOSITORY / "tests" / "golden" / "triton"
LATENCY = BUILD_CONFIGS / "gpt-oss-120b.b300x8.latency.yaml"
NVFP4 = BUILD_CONFIGS / "gpt-oss-120b.b300x8.nvfp4.yaml"
FILES = ("config.pbtxt", "1/model.py", "1/model.yaml")


def written(*arguments: object, output: Path, name: str = "tensorrt_llm") -> dict[str, str]:
    """The files of the model, all that there are."""
    run_here("triton-repo", *arguments, "-o", output)
    found = {str(file.relative_to(output / name)): file.read_text() for file in output.rglob("*") if file.is_file()}
    assert found.keys() == set(FILES)
    return found


def test_text_is_frozen(tmp_path: Path) -> None:
    """After a wanted change: python -m tests.triton.test_repository"""
    text = written(LATENCY, output=tmp_path / "models")
    assert text == {file: (GOLDEN / Path(file).name).read_text() for file in FILES}
    assert text == written(LATENCY, output=tmp_path / "again")


def test_config_is_of_tritons_own_schema(tmp_path: Path) -> None:
    for option, decoupled in ((), True), (("--unary",), False):
        output = tmp_path / f"models{decoupled}"
        text = written(LATENCY, *option, "--name", "mine", output=output, name="mine")["config.pbtxt"]
        config = text_format.Parse(text, schema.ModelConfig())
        assert (config.name, config.backend, config.max_batch_size) == ("mine", "python", 0)
        assert config.model_transaction_policy.decoupled is decoupled
        assert [tensor.name for tensor in config.input if not tensor.optional] == ["text_input"]
        assert {"acceptance_rate", "total_accepted_draft_tokens"} <= {tensor.name for tensor in config.output}
        assert read_model(output / "mine" / "1" / "model.yaml").triton_config.decoupled is decoupled


@pytest.mark.parametrize(
    ("name", "method"), [(LATENCY.stem, "dflash"), (LATENCY.stem, "eagle3"), ("gpt-oss-120b.h200x8.throughput", "none")]
)
def test_model_yaml_is_what_trtllm_serve_gets(name: str, method: str, tmp_path: Path) -> None:
    """Arguments equal those of serve-config, plus the model, and pass the checks."""
    text = written(BUILD_CONFIGS / f"{name}.yaml", "--method", method, output=tmp_path / "models")["1/model.yaml"]
    document = yaml.safe_load(text)
    config = document.pop("triton_config")
    assert document.pop("model") == "openai/gpt-oss-120b"
    assert document == rendered(name, "trtllm", method).arguments  # type: ignore[arg-type]
    assert config["runtime"] == "trtllm"
    file = tmp_path / "models" / "tensorrt_llm" / "1" / "model.yaml"
    findings = check(file_configs(file, load_schema("trtllm", None), gpus=None, target=None, draft=None)[0])
    assert [finding for finding in findings if finding.severity == "error"] == []


def test_engine_mode_is_said(tmp_path: Path) -> None:
    text = written(NVFP4, output=tmp_path / "models")["1/model.yaml"]
    assert yaml.safe_load(text)["triton_config"]["engine_mode"] is True


def test_what_trtllm_cannot_run_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "large.yaml"
    file.write_text(NVFP4.read_text() + "draft_attention: VANILLA\nmax_batch_size: 4096\nmax_num_tokens: 65536\n")
    with pytest.raises(ConfigError, match="cannot run in trtllm"):
        run_here("triton-repo", file, "-o", tmp_path / "models")
    assert not (tmp_path / "models").exists()


def test_stdout_is_the_repository_and_stderr_the_commands(tmp_path: Path) -> None:
    result = run("triton-repo", LATENCY, "-o", tmp_path / "models")
    assert (result.returncode, result.stdout) == (0, f"{tmp_path / 'models'}\n")
    addresses = " ".join(f"--{service}-address=127.0.0.1" for service in ("http", "grpc", "metrics"))
    server = f"tritonserver --model-repository={tmp_path / 'models'} {addresses} --disable-auto-complete-config"
    assert f"\n  {server}\n" in result.stderr
    assert "mpirun" not in result.stderr  # NVIDIA's own model forgets its job: one process that spawns ranks
    assert "curl -sf 127.0.0.1:8000/v2/health/ready" in result.stderr


def test_only_its_own_repository_is_replaced(tmp_path: Path) -> None:
    output = tmp_path / "models"
    written(LATENCY, output=output)
    with pytest.raises(BuildError, match="already exists"):
        run_here("triton-repo", LATENCY, "-o", output)
    run_here("triton-repo", LATENCY, "-o", output, "--method", "none", "--force")
    assert "speculative_config" not in (output / "tensorrt_llm/1/model.yaml").read_text()
    (output / "another_model").mkdir()
    with pytest.raises(BuildError, match="already exists and is not a repository that this command wrote"):
        run_here("triton-repo", LATENCY, "-o", output, "--force")
    assert list(tmp_path.iterdir()) == [output]


@pytest.mark.parametrize("name", ["../../evil", "/tmp/evil", "", ".", "..", "a/b", "a\n", "-v", "a b", "é", "a" * 200])
def test_a_name_is_a_folders(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--name: expected letters, digits"):
        run_here("triton-repo", LATENCY, "-o", tmp_path / "deep" / "models", f"--name={name}")
    with pytest.raises(ConfigError, match="--name: expected letters, digits"):
        write_repository(tmp_path / "deep" / "models", name, {}, TritonConfig(runtime="trtllm"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("host", ["--trace", "a\nb"])
def test_a_host_is_no_option_of_what_is_printed(host: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--host: expected"):
        instructions(tmp_path, "model", host=host)
    assert "curl -sf '127.0.0.1;reboot:8000/v2" in instructions(tmp_path, "model", host="127.0.0.1;reboot")


def test_embedded_needs_an_engine_that_fits(engine: Path, tmp_path: Path) -> None:
    options = ("--runtime", "embedded", "-o", tmp_path / "models")
    with pytest.raises(EngineError, match="is not an engine directory: found a checkpoint"):
        run_here("triton-repo", FIXTURES / "tiny-gpt-oss-dflash", "--target", TARGET, *options)
    with pytest.raises(CheckpointError, match="does not fit target"):
        run_here("triton-repo", engine, "--target", FIXTURES / "tiny-qwen3", *options)
    assert not (tmp_path / "models").exists()


def test_embedded_from_a_deployment_file(engine: Path, tmp_path: Path) -> None:
    file = tmp_path / "tiny.yaml"
    draft = FIXTURES / "tiny-gpt-oss-dflash"
    file.write_text(f"description: a fixture\ntarget: {TARGET}\ndraft: {draft}\ngpus: h100x1\npurpose: latency\n")
    text = written(file, "--runtime", "embedded", "--draft", engine, output=tmp_path / "models")["1/model.yaml"]
    document = yaml.safe_load(text)
    assert document.pop("triton_config") == msgspec.structs.asdict(TritonConfig(runtime="embedded"))
    assert document == {"engine": str(engine), "target": str(TARGET), "max_batch_size": 16}


def test_a_repository_is_read_from_everywhere(engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has a directory of its own: model.yaml has absolute paths for what is here."""
    monkeypatch.chdir(tmp_path)
    for name, source in (("engine", engine), ("draft", FIXTURES / "tiny-gpt-oss-dflash"), ("target", TARGET)):
        shutil.copytree(source, name)
    text = written("engine", "--target", "target", "--runtime", "embedded", output=Path("embedded"))["1/model.yaml"]
    document = yaml.safe_load(text)
    assert (document["engine"], document["target"]) == (str(tmp_path / "engine"), str(tmp_path / "target"))
    file = Path("models.yaml")
    file.write_text("description: x\ntarget: target\ndraft: draft\ngpus: b300x1\npurpose: latency\nrecipe: bf16\n")
    document = yaml.safe_load(written(file, output=Path("trtllm"))["1/model.yaml"])
    assert document["model"] == str(tmp_path / "target")


def test_the_targets_type_reaches_the_model(engine: Path, tmp_path: Path) -> None:
    options = ("--target", TARGET, "--runtime", "embedded", "--max-batch-size", 1)
    assert "dtype" not in written(engine, *options, output=tmp_path / "default")["1/model.yaml"]
    text = written(engine, *options, "--dtype", "bfloat16", output=tmp_path / "models")["1/model.yaml"]
    assert yaml.safe_load(text)["dtype"] == "bfloat16"
    model = read_model(tmp_path / "models" / "tensorrt_llm" / "1" / "model.yaml")
    assert isinstance(model, EmbeddedModel)
    with LLM(model.engine, model.target, max_batch_size=model.max_batch_size, dtype=model.dtype) as llm:
        assert llm.backend.session.target.model.dtype == torch.bfloat16
        assert llm.generate([5, 6, 7], SamplingParams(max_tokens=2))[0].token_ids


@pytest.mark.parametrize(
    "arguments",
    [["--gpus", "b300x8", "--runtime", "embedded"], ["--method", "none", "--runtime", "embedded"],
     ["--max-batch-size", "4"], ["--dtype", "bfloat16"]],
)  # fmt: skip
def test_wrong_usage(arguments: list[str], tmp_path: Path) -> None:
    with pytest.raises(click.UsageError):
        run_here("triton-repo", LATENCY, "-o", tmp_path / "models", *arguments)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("model: x\n", "missing key triton_config"),
        ("model: x\ntriton_config: {runtime: vllm}\n", "Invalid enum value 'vllm'"),
        ("model: x\ntriton_config: {runtime: trtllm, decoupld: true}\n", "decoupld"),
        ("engine: x\ntarget: y\ntriton_config: {runtime: embedded, max_batch_size: 8}\n", "max_batch_size"),
        ("engine: x\ntarget: y\nbatch: 3\ntriton_config: {runtime: embedded}\n", "batch"),
        ("target: x\ntriton_config: {runtime: embedded}\n", "engine"),
        ("engine: x\ndevice: gpu\ntriton_config: {runtime: embedded}\n", "device: "),
        (
            "engine: x\ncache_gib: 0\ntriton_config: {runtime: embedded}\n",
            "model.yaml: cache_gib: expected more than 0",
        ),
        ("a: [\n", "expected YAML"),
    ],
)
def test_model_files_that_are_none(text: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "model.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_model(file)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        for file, text in written(LATENCY, output=Path(scratch) / "models").items():
            (GOLDEN / Path(file).name).write_text(text)
