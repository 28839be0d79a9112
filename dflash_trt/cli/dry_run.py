# SPDX-License-Identifier: Apache-2.0
"""What `dflash-trt build --dry-run` prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from dflash_trt.cli.output import human_bytes, print_json, print_table
from dflash_trt.deploy.deployment_file import load_deployment
from dflash_trt.deploy.dry_run import as_text, dry_run
from dflash_trt.deploy.memory import MAX_BATCH, MAX_TOKENS, GpuMemory
from dflash_trt.deploy.resolve import ResolvedDeployment, plan_sizes, resolve
from dflash_trt.engine.drafter_memory import drafter_memory
from dflash_trt.engine.manifest import read_manifest, read_parts
from dflash_trt.engine.plans.plan import PlanOptions, check_limits, check_precision
from dflash_trt.engine.plans.timing_cache import TimingCache
from dflash_trt.errors import ConfigError


def print_dry_run(
    config: Path, output: Path, changes: dict[str, Any] | None, timing_cache: TimingCache | None, *,
    target: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Prints what `config` resolves to; raises ConfigError, after printing, where TensorRT-LLM could not run it.

    `changes` are the given fields of PlanOptions; None: plans are built in engine mode only.
    """
    file, name = load_deployment(config), config.stem
    deployment = resolve(file, name, target=target)
    report = dry_run(deployment)
    has_plans = changes is not None or file.mode == "engine"
    commands = _planned_commands(deployment, output, changes or {}, timing_cache) if has_plans else []
    if as_json:
        print_json("dry-run", msgspec.structs.asdict(report) | {"trtexec": commands})
    else:
        rows = [(setting.key, as_text(setting.value), setting.source) for setting in report.settings]
        print_table(f"{name} (settings {report.digest})", ("setting", "value", "from"), rows)
        if report.memory is not None:
            _print_memory(deployment, report.memory)
        _print_commands(commands)
        for finding in report.findings:
            click.echo(finding, err=True)
    if errors := report.num_errors():
        raise ConfigError(f"{name}: TensorRT-LLM cannot run this configuration: {errors} error(s)")


def print_plan_dry_run(
    engine: Path, changes: dict[str, Any], timing_cache: TimingCache | None, *, as_json: bool
) -> None:
    """Prints how the plans of an engine directory would be built, with `changes` of its PlanOptions."""
    from dflash_trt.engine.plans.trtexec import trtexec_commands

    manifest = read_manifest(engine)
    options = msgspec.structs.replace(manifest.plan_options or PlanOptions(), **changes)
    check_precision(manifest.quantization.algorithms(), options.hardware_compatibility, None)
    check_limits(manifest.draft, options.max_batch_size, options.max_seq_len)
    part, of_part = read_parts(engine, manifest)[0]
    commands = trtexec_commands(engine, manifest.draft, manifest.num_ranks, options, timing_cache)
    memory = drafter_memory(of_part, options, part)
    if as_json:
        print_json("plan-dry-run", {"options": options, "memory": memory, "trtexec": commands})
        return
    rows = [(field, as_text(value)) for field, value in msgspec.to_builtins(options).items()]
    rows += [(f"memory.{field}", human_bytes(size)) for field, size in msgspec.to_builtins(memory).items()]
    print_table(f"plans of {engine.name}", ("what", "value"), rows)
    _print_commands(commands)


def _planned_commands(
    deployment: ResolvedDeployment, output: Path, changes: dict[str, Any], timing_cache: TimingCache | None
) -> list[str]:
    """trtexec's lines for an engine directory that need not be there yet."""
    from dflash_trt.engine.plans.trtexec import trtexec_commands

    options = msgspec.structs.replace(plan_sizes(deployment), **changes)
    gpu = deployment.gpus.gpu
    check_precision(set(deployment.algorithms.values()), options.hardware_compatibility, gpu.compute_capability)
    spec = deployment.draft_sizes.spec
    check_limits(spec, options.max_batch_size, options.max_seq_len)
    num_ranks = deployment.draft_tensor_parallel if deployment.mode == "engine" else 1
    return trtexec_commands(output, spec, num_ranks, options, timing_cache)


def _print_commands(commands: list[str]) -> None:
    """One line each, whole, to be copied."""
    for command in commands:
        click.echo(command)


def _print_memory(deployment: ResolvedDeployment, memory: GpuMemory) -> None:
    gpu = deployment.gpus.gpu
    rows = [(item.name, human_bytes(item.bytes), item.how) for item in memory.items]
    rows += [("not counted", "?", what) for what in memory.unknown]
    pool = f"{deployment.kv_cache_fraction:g} of the rest"
    if memory.full_requests is not None:
        pool += f": {memory.full_requests} requests of {deployment.max_seq_len} tokens"
    rows += [
        ("cache pool", human_bytes(memory.pool_bytes), pool),
        ("largest max_batch_size", _bounded(memory.largest_batch, MAX_BATCH), "that fits with this max_seq_len"),
        ("largest max_seq_len", _bounded(memory.largest_context, MAX_TOKENS), "that fits with this max_batch_size"),
    ]
    print_table(f"memory of each {gpu.title} ({human_bytes(memory.capacity_bytes)})", ("what", "size", "how"), rows)


def _bounded(number: int, bound: int) -> str:
    return "any" if number == bound else str(number)
