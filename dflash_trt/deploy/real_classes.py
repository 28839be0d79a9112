# SPDX-License-Identifier: Apache-2.0
"""Validation by the runtime's own classes, where its package is installed in the release that is asked about."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from dflash_trt.deploy.finding import ERROR, Finding
from dflash_trt.deploy.schema import PACKAGES, Schema

PLACEHOLDER = "model"  # the model is named on trtllm-serve's command line; its presence is not checked here


def installed_version(runtime: str) -> str | None:
    """The installed release of a runtime's package."""
    try:
        return version(PACKAGES[runtime])
    except PackageNotFoundError:
        return None


def check_with_package(schema: Schema, document: dict[str, Any]) -> Iterator[Finding]:
    """What the runtime's own classes say; nothing where that release is not installed."""
    if installed_version(schema.runtime) != schema.version:
        return
    if schema.runtime == "trtllm":
        yield from _check_trtllm(document)
    elif schema.runtime == "vllm":
        yield from _check_vllm(document)


def _check_trtllm(document: dict[str, Any]) -> Iterator[Finding]:
    arguments = import_module("tensorrt_llm.llmapi.llm_args").TorchLlmArgs
    yield from _errors(arguments, {"model": PLACEHOLDER, **document}, "TorchLlmArgs")


def _check_vllm(document: dict[str, Any]) -> Iterator[Finding]:
    """Only the keys of the speculative section: the rest of vLLM's arguments resolves against the model."""
    spec = document.get("speculative_config")
    if not isinstance(spec, dict):
        return
    names = {field.name for field in dataclasses.fields(import_module("vllm.config").SpeculativeConfig)}
    for key in sorted(spec.keys() - names):
        problem = "expected a field of vllm.config.SpeculativeConfig, found an unknown one"
        yield Finding("runtime", ERROR, f"speculative_config.{key}", problem, "remove it")


def _errors(model: Any, values: dict[str, Any], name: str) -> Iterator[Finding]:
    validation_error = import_module("pydantic").ValidationError
    try:
        model(**values)
    except validation_error as problem:
        for item in problem.errors():
            key = ".".join(map(str, item["loc"])) or name
            yield Finding("runtime", ERROR, key, f"{name} says: {' '.join(item['msg'].split())}", "see its message")
