# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt build --dry-run`: settings, memory and trtexec's lines, without building."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from dflash_trt.checkpoint.quantization import Quantization
from dflash_trt.cli.build_request import BuildRequest, asked_plans, refuse_for_deployment
from dflash_trt.cli.output import human_bytes, print_json, print_table
from dflash_trt.deploy.deployment_file import load_deployment
from dflash_trt.deploy.dry_run import as_text, dry_run
from dflash_trt.deploy.memory import MAX_BATCH, MAX_TOKENS, POOL_FRACTION, GpuMemory
from dflash_trt.deploy.resolve import resolve
from dflash_trt.deploy.resolved_deployment import ResolvedDeployment, plan_sizes
from dflash_trt.deploy.schema import TITLES
from dflash_trt.engine.manifest import read_manifest, read_parts
from dflash_trt.engine.plans.build_checks import check_build, check_gpus, check_limits
from dflash_trt.engine.plans.preview import drafter_memory, trtexec_commands
from dflash_trt.errors import ConfigError


def print_deployment_dry_run(config: Path, request: BuildRequest) -> None:
    """Prints what `config` resolves to; raises ConfigError, after printing, where its runtime could not serve it."""
    refuse_for_deployment()
    file, name = load_deployment(config), config.stem
    deployment = resolve(file, name, target=request.target)
    report = dry_run(deployment)
    has_plans = request.has_plans or file.mode == "engine"
    commands = _planned_commands(deployment, request.output or Path(name), request) if has_plans else []
    if request.as_json:
        print_json("dry-run", msgspec.structs.asdict(report) | {"trtexec": commands})
    else:
        rows = [(setting.key, as_text(setting.value), setting.source) for setting in report.settings]
        print_table(f"{name} (settings {report.digest})", ("setting", "value", "from"), rows)
        if report.memory is not None:
            _print_memory(deployment, report.memory)
        for command in commands:  # one line each, whole, to be copied
            click.echo(command)
        for finding in report.findings:
            click.echo(finding, err=True)
    if errors := report.num_errors():
        raise ConfigError(f"{name}: {TITLES[report.runtime]} cannot run this configuration: {errors} error(s)")


def print_plan_dry_run(engine: Path, request: BuildRequest) -> None:
    """Prints how the plans of an engine directory would be built."""
    manifest = read_manifest(engine)
    algorithms = manifest.quantization.algorithms()
    options = asked_plans(manifest.plan_options, algorithms, request)
    check_build(manifest.draft, algorithms, options, has_timing_cache=request.cache is not None)
    part, of_part = read_parts(engine, manifest)[0]
    commands = trtexec_commands(
        engine, manifest.draft, manifest.quantization, manifest.num_ranks, options, request.cache
    )
    memory = drafter_memory(of_part, options, part)
    if request.as_json:
        print_json("plan-dry-run", {"options": options, "memory": memory, "trtexec": commands})
        return
    rows = [(field, as_text(value)) for field, value in msgspec.to_builtins(options).items()]
    rows += [(f"memory.{field}", human_bytes(size)) for field, size in msgspec.to_builtins(memory).items()]
    print_table(f"plans of {engine.name}", ("what", "value"), rows)
    for command in commands:
        click.echo(command)
    if options.runtime == "tensorrt_rtx":
        built_for = ", ".join(options.compute_capabilities)
        click.echo(f"TensorRT-RTX has no trtexec; without --dry-run the plans for SM {built_for} are built here")


def _planned_commands(deployment: ResolvedDeployment, output: Path, request: BuildRequest) -> list[str]:
    """trtexec commands for the plans of `output`, which need not exist yet."""
    algorithms = set(deployment.algorithms.values())
    options = asked_plans(plan_sizes(deployment), algorithms, request)
    major, minor = deployment.gpus.gpu.compute_capability
    served = msgspec.structs.replace(
        options, compute_capabilities=options.compute_capabilities or (f"{major}.{minor}",)
    )
    check_gpus(algorithms, served)
    spec = deployment.draft_sizes.spec
    check_limits(spec, options.max_batch_size, options.max_seq_len)
    num_ranks = deployment.num_ranks if deployment.mode == "engine" else 1
    quantization = Quantization(modules=deployment.algorithms, fp8_kv_cache=False)  # a quantised cache changes no axis
    return trtexec_commands(output, spec, quantization, num_ranks, options, request.cache)


def _print_memory(deployment: ResolvedDeployment, memory: GpuMemory) -> None:
    gpu = deployment.gpus.gpu
    rows = [(item.name, human_bytes(item.bytes), item.how) for item in memory.items]
    rows += [("not counted", "?", what) for what in memory.unknown]
    fraction = deployment.kv_cache_fraction if deployment.usual_runtime == "trtllm" else POOL_FRACTION
    pool = f"{fraction:g} of the rest"
    if memory.full_requests is not None:
        pool += f": {memory.full_requests} requests of {deployment.max_seq_len} tokens"
    rows.append(("cache pool", human_bytes(memory.pool_bytes), pool))
    for name, largest, bound, other in (
        ("max_batch_size", memory.largest_batch, MAX_BATCH, "max_seq_len"),
        ("max_seq_len", memory.largest_context, MAX_TOKENS, "max_batch_size"),
    ):
        most = "any" if largest == bound else str(largest)
        rows.append((f"largest {name}", most, f"that fits with this {other}"))
    print_table(f"memory of each {gpu.title} ({human_bytes(memory.capacity_bytes)})", ("what", "size", "how"), rows)
