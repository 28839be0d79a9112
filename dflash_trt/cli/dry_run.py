# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt build --dry-run`: every setting with its origin, the memory of one GPU, and how trtexec would build."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from dflash_trt.cli.output import human_bytes, print_json, print_table
from dflash_trt.cli.plan_options import PlanRequest
from dflash_trt.deploy.checker import check, deployment_config
from dflash_trt.deploy.deployment_file import DeploymentFile
from dflash_trt.deploy.finding import ERROR, Finding
from dflash_trt.deploy.gpus import Gpus
from dflash_trt.deploy.memory import MAX_BATCH, MAX_TOKENS, GpuMemory, gpu_memory
from dflash_trt.deploy.resolve import ResolvedDeployment, plan_sizes, resolve
from dflash_trt.deploy.rules.checked_config import CheckedConfig
from dflash_trt.deploy.rules.memory_rules import check_memory, document_load
from dflash_trt.deploy.schema import load_schema
from dflash_trt.deploy.sizes import DraftSizes
from dflash_trt.deploy.trtllm_arguments import trtllm_arguments
from dflash_trt.engine.drafter_memory import drafter_memory
from dflash_trt.engine.graphs import graph_signatures
from dflash_trt.engine.manifest import read_manifest
from dflash_trt.engine.plan import check_precision
from dflash_trt.errors import ConfigError

# What a deployment says to a runtime; the rest of it are facts and their origin.
SETTINGS = (
    "target", "draft", "gpus", "purpose", "mode", "recipe", "tensor_parallel", "expert_parallel", "max_batch_size",
    "max_num_tokens", "max_seq_len", "draft_tokens", "draft_schedule", "draft_attention", "kv_cache_dtype",
    "kv_cache_fraction", "prefix_reuse", "moe_backend", "eagle3",
)  # fmt: skip


def print_dry_run(
    file: DeploymentFile, name: str, output: Path, plans: PlanRequest, *, target: str | None, as_json: bool
) -> None:
    """Prints what `file` resolves to; raises ConfigError, after printing, where TensorRT-LLM could not run it."""
    deployment = resolve(file, name, target=target)
    config = _config(deployment)
    findings = check(config)
    load = document_load(config)
    memory = None if load is None else gpu_memory(load)
    commands = _planned_commands(deployment, output, plans) if plans.is_wanted or file.mode == "engine" else []
    if as_json:
        print_json("dry-run", _document(deployment, config, findings, memory) | {"trtexec": commands})
    else:
        rows = [(key, _text(getattr(deployment, key)), deployment.sources[key]) for key in SETTINGS]
        print_table(f"{name} (settings {deployment.digest})", ("setting", "value", "from"), [*rows, *_defaults(config)])
        if memory is not None:
            _print_memory(deployment, memory)
        _print_commands(commands)
        for finding in findings:
            click.echo(finding, err=True)
    if errors := sum(finding.severity == ERROR for finding in findings):
        raise ConfigError(f"{name}: expected a configuration that TensorRT-LLM can run, found {errors} error(s)")


def print_plan_dry_run(engine: Path, plans: PlanRequest, *, as_json: bool) -> None:
    """Prints how the plans of an engine directory would be built."""
    from dflash_trt.builder.tensorrt.trtexec import trtexec_commands

    manifest = read_manifest(engine)
    options = plans.options(manifest.plan_options)
    check_precision(manifest.quantization.algorithms(), options.hardware_compatibility, None)
    commands = trtexec_commands(engine, manifest.graphs, options, plans.timing_cache)
    memory = drafter_memory(manifest, options, engine)
    if as_json:
        print_json("plan-dry-run", {"options": options, "memory": memory, "trtexec": commands})
        return
    rows = [(field, _text(value)) for field, value in msgspec.to_builtins(options).items()]
    rows += [(f"memory.{field}", human_bytes(size)) for field, size in msgspec.to_builtins(memory).items()]
    print_table(f"plans of {engine.name}", ("what", "value"), rows)
    _print_commands(commands)


def fitting_deployment(file: DeploymentFile, name: str, *, draft: str, target: str) -> ResolvedDeployment:
    """`file` resolved with checkpoints that are here; raises ConfigError where its GPUs have too little memory."""
    deployment = resolve(file, name, draft=draft, target=target)
    for finding in check_memory(_config(deployment)):
        if finding.severity == ERROR:
            raise ConfigError(f"{name}: {finding}")
    return deployment


def _planned_commands(deployment: ResolvedDeployment, output: Path, plans: PlanRequest) -> list[str]:
    """trtexec's lines for an engine directory that need not be there yet."""
    from dflash_trt.builder.tensorrt.trtexec import trtexec_commands

    spec = deployment.draft_sizes.spec
    graphs = graph_signatures(spec, fp8_cache=False)  # inputs have the same axes with an FP8 cache
    options = plans.options(plan_sizes(deployment))
    check_precision(
        set(deployment.algorithms.values()),
        options.hardware_compatibility,
        deployment.gpus.gpu.compute_capability,
    )
    return trtexec_commands(output, graphs, options, plans.timing_cache)


def _print_commands(commands: list[str]) -> None:
    """One line each, whole, to be copied."""
    for command in commands:
        click.echo(command)


def _config(deployment: ResolvedDeployment) -> CheckedConfig:
    return deployment_config(deployment, load_schema("trtllm", None), trtllm_arguments(deployment, "dflash"))


def _defaults(config: CheckedConfig) -> list[tuple[str, str, str]]:
    """What the runtime takes for keys of the speculative section that nobody gives."""
    schema = config.schema
    properties = schema.properties("DFlashDecodingConfig")
    given = config.document["speculative_config"]
    source = f"schema: TensorRT-LLM {schema.version}"
    return [
        (f"speculative_config.{key}", _text(described["default"]), source)
        for key, described in properties.items()
        if key not in given and described.get("default") is not None
    ]


def _document(
    deployment: ResolvedDeployment, config: CheckedConfig, findings: list[Finding], memory: GpuMemory | None
) -> dict[str, object]:
    settings = [
        {"key": key, "value": _plain(getattr(deployment, key)), "source": deployment.sources[key]} for key in SETTINGS
    ]
    settings += [{"key": key, "value": value, "source": source} for key, value, source in _defaults(config)]
    return {
        "name": deployment.name,
        "digest": deployment.digest,
        "settings": settings,
        "draft": _draft(deployment.draft_sizes),
        "memory": memory,
        "findings": findings,
    }


def _draft(draft: DraftSizes) -> dict[str, object]:
    """What is known of it, and from where."""
    known = {"name": draft.name, "origin": draft.origin, "num_layers": draft.spec.num_layers}
    return known | msgspec.structs.asdict(draft.spec) | {"quantized": draft.quantized}


def _print_memory(deployment: ResolvedDeployment, memory: GpuMemory) -> None:
    gpu = deployment.gpus.gpu
    rows = [(item.name, human_bytes(item.bytes), item.how) for item in memory.items]
    rows += [("not counted", "?", what) for what in memory.unknown]
    rows.append(("cache pool", human_bytes(memory.pool_bytes), _pool(deployment, memory)))
    rows.append(
        ("largest max_batch_size", _bounded(memory.largest_batch, MAX_BATCH), "that fits with this max_seq_len")
    )
    rows.append(
        ("largest max_seq_len", _bounded(memory.largest_context, MAX_TOKENS), "that fits with this max_batch_size")
    )
    print_table(f"memory of each {gpu.title} ({human_bytes(memory.capacity_bytes)})", ("what", "size", "how"), rows)


def _pool(deployment: ResolvedDeployment, memory: GpuMemory) -> str:
    share = f"{deployment.kv_cache_fraction:g} of the rest"
    if memory.full_requests is None:
        return share
    return f"{share}: {memory.full_requests} requests of {deployment.max_seq_len} tokens"


def _bounded(number: int, bound: int) -> str:
    return "any" if number == bound else str(number)


def _plain(value: Any) -> object:
    return str(value) if isinstance(value, Gpus) else msgspec.to_builtins(value)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    plain = _plain(value)
    if isinstance(plain, dict):
        return ", ".join(f"{key} {item}" for key, item in plain.items())
    return str(plain).lower() if isinstance(plain, bool) else str(plain)
