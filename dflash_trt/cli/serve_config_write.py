# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt serve-config SOURCE --runtime R`: writes a configuration, and with -o the steps to an answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import click
import msgspec

from dflash_trt.cli.deployment_source import ServeConfigRequest, print_and_refuse, read_deployment
from dflash_trt.deploy.checker import check, deployment_config
from dflash_trt.deploy.cluster import pod_options, slurm
from dflash_trt.deploy.cluster.cluster_server import cluster_server, node_script
from dflash_trt.deploy.cluster.dynamo_graph import dynamo_graph, dynamo_image
from dflash_trt.deploy.cluster.kubernetes import kubernetes_manifests
from dflash_trt.deploy.finding import judged
from dflash_trt.deploy.memory import drafter_in_words
from dflash_trt.deploy.parsers import missing_parsers
from dflash_trt.deploy.render import Rendered, render
from dflash_trt.deploy.resolved_deployment import with_settings
from dflash_trt.deploy.rules.memory_rules import document_load
from dflash_trt.deploy.schema import Schema
from dflash_trt.deploy.steps import CONFIGURATION, cluster_steps, server_steps
from dflash_trt.errors import ConfigError
from dflash_trt.files.write import new_file

WRITERS = {"dynamo": dynamo_graph, "slurm": slurm.sbatch_script, "kubernetes": kubernetes_manifests}
"""Text of a cluster's server, by launcher."""


def write_configuration(request: ServeConfigRequest, schema: Schema) -> None:
    """Print the configuration of SOURCE, or write it to a file and print the steps."""
    if request.source is None:
        raise click.UsageError("give SOURCE to write a configuration, or --check FILE to check one")
    deployment = read_deployment(request.source, request.target, request.draft, request.gpus, request.gpu_facts)
    sbatch, settings = split_settings(request.settings, slurm.PREFIX)
    pod, settings = split_settings(settings, pod_options.PREFIX)
    if sbatch and request.cluster != "slurm":
        raise click.UsageError("--set sbatch.OPTION=VALUE is for --launcher slurm")
    if pod and request.cluster not in ("kubernetes", "dynamo"):
        raise click.UsageError("--set kubernetes.OPTION=VALUE is for --launcher kubernetes and dynamo runtimes")
    deployment = with_settings(deployment, request.runtime, settings)
    host = request.host if request.cluster in (None, "slurm") else "0.0.0.0"  # noqa: S104 - a pod's server
    rendered = render(deployment, request.runtime, request.method, host=host, port=request.port)
    config = deployment_config(deployment, schema, rendered.arguments, rendered.environment)
    findings = judged(check(config), deployment.accepted_warnings, is_strict=request.is_strict)
    print_and_refuse(request.source, request.runtime, findings)
    if request.cluster is not None:
        _write_cluster(request, request.cluster, rendered, schema.release, sbatch, pod)
        return
    if deployment.gpus.nodes > 1:
        rendered = _for_each_node(request.source, rendered)
    steps = partial(server_steps, rendered, request.source, version=schema.release)
    _print_or_write(rendered.text, request.output, steps)
    if request.runtime == "trtllm" and request.method == "dflash" and (load := document_load(config)) is not None:
        click.echo(f"\n{drafter_in_words(load, schema)}", err=True)
    if note := missing_parsers(deployment.target, request.runtime):
        click.echo(f"\n{note}", err=True)
    if request.output is None:
        click.echo(f"\nwith this text in FILE, start it with:\n  {rendered.start('FILE')}", err=True)


def _write_cluster(
    request: ServeConfigRequest,
    cluster: str,
    rendered: Rendered,
    version: str,
    sbatch: dict[str, str],
    pod: dict[str, str],
) -> None:
    image = request.image
    if cluster == "dynamo":
        image = dynamo_image(rendered.runtime, version, image, is_engine_mode=rendered.is_engine_mode)
    server = cluster_server(
        rendered, version=version, image=image, models=request.models or "/models", replicas=request.replicas or 1
    )
    server = msgspec.structs.replace(
        server, sbatch=slurm.sbatch_options(sbatch),
        pod=pod_options.pod_options(pod, rendered.runtime, is_dynamo=cluster == "dynamo"),
    )  # fmt: skip
    steps = partial(cluster_steps, server, str(request.source), launcher=cluster)
    _print_or_write(WRITERS[cluster](server), request.output, steps)


def _for_each_node(source: str, rendered: Rendered) -> Rendered:
    """The server as a script that is started by hand on each of several nodes."""
    gpus = rendered.deployment.gpus
    if rendered.runtime == "trtllm" or rendered.deployment.tensor_parallel < gpus.count:
        raise ConfigError(
            f"{source}: expected GPUs of one node for a server that is started by hand, found {gpus}",
            hint="--launcher slurm or kubernetes, or --runtime dynamo-trtllm",
        )
    return node_script(rendered)


def _print_or_write(text: str, output: Path | None, steps: Callable[..., str]) -> None:
    """Print a configuration, or write it to `output` and print the steps from there."""
    if output is None:
        click.echo(text, nl=False)
        return
    script = steps(file=output)
    with new_file(output, CONFIGURATION, force=True) as file:
        file.write_text(text, encoding="utf-8")
    click.echo(script, nl=False)


OPTION = re.compile(r"([a-z]+(?:-[a-z]+)*)=(.+)", re.ASCII)


def split_settings(settings: Sequence[str], prefix: str) -> tuple[dict[str, str], list[str]]:
    """Value by option of the settings that begin with `prefix` and a dot, and the other settings.

    Raises ConfigError for another form.
    """
    options, others = dict[str, str](), list[str]()
    for setting in settings:
        if not setting.startswith(f"{prefix}."):
            others.append(setting)
        elif match := OPTION.fullmatch(setting.removeprefix(f"{prefix}.")):
            options[match[1]] = match[2]
        else:
            raise ConfigError(f"--set {setting}: expected {prefix}.OPTION=VALUE")
    return options, others
