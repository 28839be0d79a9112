# SPDX-License-Identifier: Apache-2.0
"""What `dflash-trt build --dry-run` prints."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from dflash_trt.cli.output import human_bytes, print_json, print_table
from dflash_trt.cli.plan_options import PlanRequest
from dflash_trt.deploy.deployment_file import DeploymentFile
from dflash_trt.deploy.dry_run import as_text, dry_run
from dflash_trt.deploy.memory import MAX_BATCH, MAX_TOKENS, GpuMemory
from dflash_trt.deploy.resolve import ResolvedDeployment, plan_sizes, resolve
from dflash_trt.engine.drafter_memory import drafter_memory
from dflash_trt.engine.manifest import read_manifest, read_parts
from dflash_trt.engine.plans.plan import check_limits, check_precision
from dflash_trt.errors import ConfigError


def print_dry_run(
    file: DeploymentFile, name: str, output: Path, plans: PlanRequest, *, target: str | None, as_json: bool
) -> None:
    """Prints what `file` resolves to; raises ConfigError, after printing, where TensorRT-LLM could not run it."""
    deployment = resolve(file, name, target=target)
    report = dry_run(deployment)
    commands = _planned_commands(deployment, output, plans) if plans.is_wanted or file.mode == "engine" else []
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


def print_plan_dry_run(engine: Path, plans: PlanRequest, *, as_json: bool) -> None:
    """Prints how the plans of an engine directory would be built."""
    from dflash_trt.engine.plans.trtexec import trtexec_commands

    manifest = read_manifest(engine)
    options = plans.options(manifest.plan_options)
    check_precision(manifest.quantization.algorithms(), options.hardware_compatibility, None)
    check_limits(manifest.draft, options.max_batch_size, options.max_seq_len)
    part, of_part = read_parts(engine, manifest)[0]
    commands = trtexec_commands(engine, manifest.draft, manifest.num_ranks, options, plans.timing_cache)
    memory = drafter_memory(of_part, options, part)
    if as_json:
        print_json("plan-dry-run", {"options": options, "memory": memory, "trtexec": commands})
        return
    rows = [(field, as_text(value)) for field, value in msgspec.to_builtins(options).items()]
    rows += [(f"memory.{field}", human_bytes(size)) for field, size in msgspec.to_builtins(memory).items()]
    print_table(f"plans of {engine.name}", ("what", "value"), rows)
    _print_commands(commands)


def _planned_commands(deployment: ResolvedDeployment, output: Path, plans: PlanRequest) -> list[str]:
    """trtexec's lines for an engine directory that need not be there yet."""
    from dflash_trt.engine.plans.trtexec import trtexec_commands

    options = plans.options(plan_sizes(deployment))
    gpu = deployment.gpus.gpu
    check_precision(set(deployment.algorithms.values()), options.hardware_compatibility, gpu.compute_capability)
    spec = deployment.draft_sizes.spec
    check_limits(spec, options.max_batch_size, options.max_seq_len)
    ranks = deployment.num_ranks if deployment.mode == "engine" else 1
    return trtexec_commands(output, spec, ranks, options, plans.timing_cache)


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
