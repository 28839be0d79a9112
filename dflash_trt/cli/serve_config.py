# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt serve-config`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import click
from msgspec import to_builtins

from dflash_trt.checkpoint.source import REPOSITORY_ID
from dflash_trt.cli.completion import GPUS, SOURCE
from dflash_trt.cli.options import PATH, gpu_facts_option, refuse_given, source_options
from dflash_trt.cli.output import print_json, print_table
from dflash_trt.deploy.catalog import known_deployments, known_pair
from dflash_trt.deploy.checker import check, deployment_config, file_configs
from dflash_trt.deploy.cluster.cluster_server import cluster_server, node_script
from dflash_trt.deploy.cluster.dynamo_graph import RUNTIMES as DYNAMO
from dflash_trt.deploy.cluster.dynamo_graph import SERVICE_PORT, dynamo_graph, dynamo_image
from dflash_trt.deploy.cluster.kubernetes import kubernetes_manifests
from dflash_trt.deploy.cluster.slurm import sbatch_script
from dflash_trt.deploy.conversion import convert
from dflash_trt.deploy.deployment_file import METHODS, Method, deployment_path, load_deployment, shipped_deployments
from dflash_trt.deploy.finding import ACCEPTED, ERROR, UNCHECKED, WARNING, Finding, judged, numbered
from dflash_trt.deploy.gpus import GpuFacts, parse_gpus
from dflash_trt.deploy.memory import drafter_in_words
from dflash_trt.deploy.published import missing_parsers
from dflash_trt.deploy.real_classes import check_with_package
from dflash_trt.deploy.render import render
from dflash_trt.deploy.resolve import ResolvedDeployment, draft_deployment, resolve, with_settings
from dflash_trt.deploy.rules.memory_rules import document_load
from dflash_trt.deploy.schema import PACKAGES, Runtime, Schema, load_schema
from dflash_trt.deploy.steps import CONFIGURATION, cluster_steps, server_steps
from dflash_trt.errors import ConfigError, printable
from dflash_trt.files.read import decode, read_text
from dflash_trt.files.strict_yaml import MAX_BYTES
from dflash_trt.files.write import new_file

LAUNCHERS = ("slurm", "kubernetes")
CONVERSION_LACKS = (
    "source", "output", "launcher", "image", "models", "replicas", "method", "file", "host", "port", "settings",
    "is_list", "as_json",
)  # fmt: skip
"""Parameters for a configuration that is written anew, or checked."""


@click.command("serve-config", short_help="Write or check a configuration for trtllm-serve, vLLM or SGLang.")
@click.argument("source", type=SOURCE, required=False)
@click.option(
    "--runtime",
    "runtime_name",
    type=click.Choice([*PACKAGES, *DYNAMO]),
    help="Whose configuration; needed without --list and --from. dynamo-*: a DynamoGraphDeployment.",
)
@click.option("-o", "--output", type=PATH,
              help="Write to this file, and print the steps from it to a served answer.")  # fmt: skip
@click.option("--launcher", type=click.Choice(LAUNCHERS), help="Write an sbatch script or Kubernetes manifests.")
@click.option(
    "--image", help="Container image; the runtime's own release unless given; none: Slurm without containers."
)
@click.option("--models", metavar="DIR", help="Directory of the weights in the cluster. Default: /models.")
@click.option("--replicas", type=click.IntRange(min=1), help="Servers in the cluster. Default: 1.")
@click.option("--method", type=click.Choice(METHODS), default="dflash", show_default=True, help="Decoding method.")
@click.option("--check", "file", type=PATH, help="Check this file instead of writing one.")
@click.option("--from", "command", metavar="FILE|-", type=click.Path(path_type=Path, allow_dash=True),
              help="Write this launch command again, with --draft in the place of its speculation.")  # fmt: skip
@click.option("--version", help="Release of the runtime; checked by the nearest that is known. Default: the newest.")
@source_options
@click.option("--gpus", type=GPUS, help="GPUs, for a SOURCE that is no deployment, or --check: b300x8.")
@gpu_facts_option
@click.option("--host", default="127.0.0.1", show_default=True, help="Address that the server binds.")
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True,
              help="Port that the server binds.")  # fmt: skip
@click.option("--set", "settings", metavar="KEY=VALUE", multiple=True,
              help="Argument of the runtime, over what is written; may be repeated.")  # fmt: skip
@click.option("--list", "is_list", is_flag=True, help="Print the deployments that come with dflash-trt, and stop.")
@click.option("--strict", "is_strict", is_flag=True, help="Refuse warnings, too, except those that SOURCE accepts.")
@click.option("--json", "as_json", is_flag=True, help="Print --list or the findings of --check as one JSON document.")
def serve_config(
    source: str | None, runtime_name: str | None, output: Path | None, launcher: str | None, image: str | None,
    models: str | None, replicas: int | None, method: Method, file: Path | None, command: Path | None,
    version: str | None, target: str | None, draft: str | None, gpus: str | None, gpu_facts: GpuFacts | None,
    host: str, port: int, settings: tuple[str, ...], is_list: bool, is_strict: bool, as_json: bool,
) -> None:  # fmt: skip
    """Write the configuration of SOURCE for a runtime to stdout: YAML for trtllm, a command line for the others.

    SOURCE is a deployment, by its file or by a name that --list shows, or with --target and --gpus an engine
    directory or draft checkpoint; --target is not needed for a draft or target that `dflash-trt drafts` knows. The
    command that starts the server goes to stderr; with -o, stdout has all steps
    to an answer, as a shell script. With --check, report every problem of an existing FILE; SOURCE then says what it
    is deployed on. With --from, change the speculation of an existing command, plain or EAGLE-3, and what DFlash needs
    besides: stderr lists each change with its reason, the rest stays as it is written.

    \b
    Example:
      dflash-trt serve-config --list
      dflash-trt serve-config gpt-oss-120b.b300x8.latency --runtime trtllm -o serve.yaml
      dflash-trt serve-config --from eagle3.sh --draft z-lab/Qwen3-8B-DFlash-b16 > dflash.sh
    """
    if command is not None:
        _convert(command, runtime_name, version, target, draft, gpus, gpu_facts, is_strict=is_strict)
        return
    if is_list:
        if source is not None or file is not None or runtime_name is not None:
            raise click.UsageError("--list shows all deployments: no SOURCE, no --check, no --runtime")
        _print_list(as_json)
        return
    if runtime_name is None:
        if source is not None:
            deployment_path(source)  # names the deployments that begin so
        raise click.MissingParameter(param_hint="'--runtime'", param_type="option")
    is_dynamo = runtime_name in DYNAMO
    runtime: Runtime = DYNAMO[runtime_name] if is_dynamo else runtime_name  # type: ignore[assignment]
    if is_dynamo and launcher is not None:
        raise click.UsageError("--launcher: none for a dynamo runtime, which Dynamo's operator starts")
    if not is_dynamo and launcher is None:
        refuse_given(("image", "models", "replicas"), "is for --launcher and dynamo runtimes")
    schema = load_schema(runtime, version)
    if as_json and file is None:
        raise click.UsageError("--json is for --list and --check: output for a runtime is data already")
    if not host:
        raise click.UsageError("--host: missing address: servers would bind every interface")
    in_pod = is_dynamo or launcher == "kubernetes"
    if in_pod:
        refuse_given(("host",), "has no use here: a pod's server binds 0.0.0.0")
    if is_dynamo:
        refuse_given(("port",), f"has no use here: Dynamo's operator sets the frontend's, {SERVICE_PORT}")
    deployment = None if source is None else read_deployment(source, target, draft, gpus, gpu_facts)
    if file is not None:
        refuse_given(("settings",), "is for a configuration that is written")
        known_gpus = None if gpus is None or deployment else parse_gpus(gpus, "--gpus", gpu_facts)
        configs = file_configs(file, schema, deployment=deployment, gpus=known_gpus, target=target, draft=draft)
        findings: list[Finding] = []
        for number, config in enumerate(configs, 1):
            found = [*check(config), *check_with_package(schema, config.document)]
            findings += found if len(configs) == 1 else numbered(found, number)
        accepted = {} if deployment is None else deployment.accepted_warnings
        _report(file, schema, judged(findings, accepted, is_strict=is_strict), as_json)
        return
    if deployment is None:
        raise click.UsageError("give SOURCE to write a configuration, or --check FILE to check one")
    deployment = with_settings(deployment, runtime, settings)
    rendered = render(deployment, runtime, method, host="0.0.0.0" if in_pod else host, port=port)  # noqa: S104
    config = deployment_config(deployment, schema, rendered.arguments, rendered.environment)
    refuse_errors(str(source), runtime, judged(check(config), deployment.accepted_warnings, is_strict=is_strict))
    if is_dynamo or launcher is not None:
        if is_dynamo:
            image = dynamo_image(runtime, schema.release, image, is_engine_mode=rendered.is_engine_mode)
        server = cluster_server(
            rendered, version=schema.release, image=image, models=models or "/models", replicas=replicas or 1
        )
        write = dynamo_graph if is_dynamo else sbatch_script if launcher == "slurm" else kubernetes_manifests
        steps = partial(cluster_steps, server, str(source), launcher=launcher or "dynamo")
        _print_or_write(write(server), output, steps)
        return
    if deployment.gpus.nodes > 1:
        if runtime == "trtllm" or deployment.tensor_parallel < deployment.gpus.count:
            raise ConfigError(
                f"{source}: expected GPUs of one node for a server that is started by hand, found {deployment.gpus}",
                hint="--launcher slurm or kubernetes, or --runtime dynamo-trtllm",
            )
        rendered = node_script(rendered)
    steps = partial(server_steps, rendered, str(source), version=schema.release)
    _print_or_write(rendered.text, output, steps)
    if runtime == "trtllm" and method == "dflash" and (load := document_load(config)) is not None:
        click.echo(f"\n{drafter_in_words(load)}", err=True)
    if note := missing_parsers(deployment.target, runtime):
        click.echo(f"\n{note}", err=True)
    if output is None:
        click.echo(f"\nwith this text in FILE, start it with:\n  {rendered.start}", err=True)


def _convert(
    file: Path, runtime: str | None, version: str | None, target: str | None, draft: str | None, gpus: str | None,
    gpu_facts: GpuFacts | None, *, is_strict: bool,
) -> None:  # fmt: skip
    """Prints the converted command, and on stderr what changed."""
    refuse_given(CONVERSION_LACKS, "has no use with --from, which keeps all that it does not have to change")
    if runtime not in (None, *PACKAGES):
        raise click.UsageError(f"--runtime {runtime}: expected {', '.join(PACKAGES)} or none, which FILE itself says")
    if draft is None:
        raise click.MissingParameter(param_hint="'--draft'", param_type="option")
    is_stdin = str(file) == "-"
    text = (
        decode(sys.stdin.buffer.read(), file, ConfigError)
        if is_stdin
        else read_text(file, ConfigError, limit=MAX_BYTES)
    )
    known = None if gpus is None else parse_gpus(gpus, "--gpus", gpu_facts)
    done = convert(text, file, draft=draft, runtime=runtime, version=version, target=target, gpus=known)
    for change in done.changes:
        click.echo(printable(f"changed: {change}"), err=True)
    refuse_errors(str(file), PACKAGES[done.schema.runtime], judged(done.findings, {}, is_strict=is_strict))
    if not done.changes:
        click.echo("nothing to change", err=True)
    click.echo(done.text, nl=False)


def _print_or_write(text: str, output: Path | None, steps: Callable[..., str]) -> None:
    """Prints a configuration, or writes it to `output` and prints the steps from there."""
    if output is None:
        click.echo(text, nl=False)
        return
    script = steps(file=output)
    with new_file(output, CONFIGURATION, force=True) as file:
        file.write_text(text, encoding="utf-8")
    click.echo(script, nl=False)


def read_deployment(
    source: str, target: str | None, draft: str | None, gpus: str | None, gpu_facts: GpuFacts | None
) -> ResolvedDeployment:
    """The deployment of a SOURCE: a file, the name of a shipped one, a directory, or a repository of the catalogue."""
    if (path := deployment_path(source)) is not None:
        if gpus is not None or gpu_facts is not None:
            raise click.UsageError("--gpus is for a SOURCE directory; a deployment file names its own")
        return resolve(load_deployment(path), path.stem, draft=draft, target=target)
    is_here, named, asked = Path(source).is_dir(), source, target
    if not is_here:
        pair = known_pair(source)
        if pair is None and not REPOSITORY_ID.fullmatch(source):
            raise ConfigError(
                f"{source}: neither a deployment's file (.yaml) or name, nor a directory or repository id",
                hint="dflash-trt serve-config --list",
            )
        if pair is not None:
            known, usual = pair
            named, target = known.draft, target or usual
            if draft is not None and source != named:  # SOURCE is a target
                named, draft = draft, None
    if target is None or gpus is None:
        deployments = "" if is_here else ", ".join(known_deployments(source))
        raise click.UsageError(
            "a SOURCE that is no deployment needs --gpus and, unless `dflash-trt drafts` knows it, --target"
            + (f"; deployments of it: {deployments}" if deployments else "")
        )
    if draft is not None:
        raise click.UsageError("--draft is for a deployment file; SOURCE is the draft here")
    file = draft_deployment(named, target=target, gpus=gpus, gpu_facts=gpu_facts)
    return resolve(file, Path(source).resolve().name if is_here else Path(named).name, target=asked)


def _print_list(as_json: bool) -> None:
    files = shipped_deployments()
    listed = {name: load_deployment(file) for name, file in files.items()}
    if as_json:
        entries = [{"name": name, "file": str(files[name]), **to_builtins(file)} for name, file in listed.items()]
        print_json("deployments", {"deployments": entries})
        return
    columns = ("name", "target", "GPUs", "purpose", "mode", "recipe")
    rows = [(name, f.target, f.gpus, f.purpose, f.mode, f.recipe) for name, f in listed.items()]
    print_table(f"{len(rows)} deployments", columns, rows)
    click.echo(f"to change one, copy its file from {next(iter(files.values())).parent}", err=True)


def refuse_errors(source: str, runtime: str, findings: Sequence[Finding]) -> None:
    """Print every finding; ConfigError where one is an error."""
    for finding in findings:
        click.echo(printable(str(finding)), err=True)
    _refuse(findings, f"{source}: expected a configuration that {runtime} can run")


def _report(file: Path, schema: Schema, findings: Sequence[Finding], as_json: bool) -> None:
    counts = Counter(finding.severity for finding in findings)
    if as_json:
        document = {"file": str(file), "runtime": schema.runtime, "version": schema.release}
        passed = {"checked_by": schema.version, "passed": not counts[ERROR]}
        print_json("serve-config-check", document | passed | {"findings": findings})
    else:
        for finding in findings:
            click.echo(printable(str(finding)))
        if not counts[ERROR]:
            plural = "" if counts[WARNING] == 1 else "s"
            found = f"{counts[WARNING]} warning{plural}" if counts[WARNING] else "nothing wrong in what was checked"
            others = [f"; {counts[severity]} {severity}" for severity in (ACCEPTED, UNCHECKED) if counts[severity]]
            click.echo(f"{file}: {found} against {schema}{''.join(others)}")
    _refuse(findings, f"{file}: expected a configuration for {schema}")


def _refuse(findings: Sequence[Finding], expected: str) -> None:
    if errors := sum(finding.severity == ERROR for finding in findings):
        raise ConfigError(f"{expected}, found {errors} error{'s' if errors != 1 else ''}")
