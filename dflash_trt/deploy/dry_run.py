# SPDX-License-Identifier: Apache-2.0
"""A resolved deployment on its usual runtime: every setting with its origin, the memory of one GPU, and findings."""

from __future__ import annotations

from typing import Any

import msgspec

from dflash_trt.deploy.checker import check, deployment_config
from dflash_trt.deploy.deployment_file import DeploymentFile
from dflash_trt.deploy.finding import ERROR, Finding, judged
from dflash_trt.deploy.gpus import Gpus
from dflash_trt.deploy.memory import GpuMemory, gpu_memory
from dflash_trt.deploy.render import render
from dflash_trt.deploy.resolve import resolve
from dflash_trt.deploy.resolved_deployment import ResolvedDeployment
from dflash_trt.deploy.rules.checked_config import CheckedConfig
from dflash_trt.deploy.rules.memory_rules import check_memory, document_load
from dflash_trt.deploy.schema import Runtime, load_schema
from dflash_trt.deploy.sizes import DraftSizes
from dflash_trt.errors import ConfigError


class Setting(msgspec.Struct, frozen=True):
    """One value and its source."""

    key: str
    value: Any
    source: str


class DryRun(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `build --dry-run`, in the order of its JSON."""

    name: str
    digest: str
    runtime: Runtime
    """Runtime that memory and findings are about."""
    settings: list[Setting]
    draft: dict[str, Any]
    memory: GpuMemory | None
    findings: list[Finding]

    def num_errors(self) -> int:
        """Number of findings that keep the runtime from serving it."""
        return sum(finding.severity == ERROR for finding in self.findings)


def dry_run(deployment: ResolvedDeployment) -> DryRun:
    """The settings, memory and findings of a deployment on its usual runtime."""
    config = _config(deployment)
    load = document_load(config)
    sources = deployment.sources
    keys = [key for key in (*DeploymentFile.__struct_fields__, "moe_backend") if key in sources]
    settings = [Setting(key, _value(deployment, key), sources[key]) for key in keys]
    return DryRun(
        name=deployment.name,
        digest=deployment.digest,
        runtime=deployment.usual_runtime,
        settings=[*settings, *_defaults(config)],
        draft=_draft(deployment.draft_sizes),
        memory=None if load is None else gpu_memory(load, config.schema),
        findings=judged(check(config), deployment.accepted_warnings),
    )


def fitting_deployment(file: DeploymentFile, name: str, *, draft: str, target: str) -> ResolvedDeployment:
    """`file` resolved with checkpoints that are here; raises ConfigError where its GPUs have too little memory."""
    deployment = resolve(file, name, draft=draft, target=target)
    for finding in check_memory(_config(deployment)):
        if finding.severity == ERROR:
            raise ConfigError(f"{name}: {finding}")
    return deployment


def as_text(value: Any) -> str:
    """A setting's value as YAML writes it, on one line; '-' for none."""
    if value is None:
        return "-"
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return str(value).lower() if isinstance(value, bool) else str(value)


def _config(deployment: ResolvedDeployment) -> CheckedConfig:
    rendered = render(deployment, deployment.usual_runtime, "dflash", host="127.0.0.1", port=8000)
    return deployment_config(deployment, load_schema(rendered.runtime), rendered.arguments, rendered.environment)


def _defaults(config: CheckedConfig) -> list[Setting]:
    """TensorRT-LLM's defaults of speculative_config keys that are not set."""
    schema = config.schema
    if schema.runtime != "trtllm":
        return []
    speculative_config = config.document["speculative_config"]
    source = f"schema: TensorRT-LLM {schema.version}"
    return [
        Setting(f"speculative_config.{key}", as_text(described["default"]), source)
        for key, described in schema.properties("DFlashDecodingConfig").items()
        if key not in speculative_config and described.get("default") is not None
    ]


def _draft(draft: DraftSizes) -> dict[str, Any]:
    """Facts of the draft and their origin."""
    facts = {"name": draft.name, "origin": draft.origin, "num_layers": draft.spec.num_layers}
    return facts | msgspec.structs.asdict(draft.spec) | {"quantized": draft.quantized}


def _value(deployment: ResolvedDeployment, key: str) -> Any:
    value = getattr(deployment if hasattr(deployment, key) else deployment.file, key)
    return str(value) if isinstance(value, Gpus) else msgspec.to_builtins(value)
