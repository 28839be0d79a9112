# SPDX-License-Identifier: Apache-2.0
"""The schema files against the runtimes' own classes, on machines that have them: drift is caught there."""

from __future__ import annotations

import dataclasses
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_trt.deploy import real_classes
from dflash_trt.deploy.real_classes import check_with_package, installed_version
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
    monkeypatch.setattr(real_classes, "installed_version", lambda runtime: "0.0")
    for schema in schemas().values():
        assert list(check_with_package(schema, {"zzz": 1})) == []


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
