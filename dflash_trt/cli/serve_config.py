# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt serve-config`: the command line of four commands: write, --check, --from and --list."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import click
import msgspec

from dflash_trt.cli.completion import GPUS, SOURCE
from dflash_trt.cli.deployment_source import ServeConfigRequest
from dflash_trt.cli.options import PATH, gpu_facts_option, refuse_given, source_options
from dflash_trt.cli.output import print_json, print_table
from dflash_trt.cli.serve_config_check import check_file
from dflash_trt.cli.serve_config_from import convert_command
from dflash_trt.cli.serve_config_write import write_configuration
from dflash_trt.deploy.cluster.dynamo_graph import RUNTIMES as DYNAMO
from dflash_trt.deploy.cluster.dynamo_graph import SERVICE_PORT
from dflash_trt.deploy.deployment_file import METHODS, deployment_path, load_deployment, shipped_deployments
from dflash_trt.deploy.schema import PACKAGES, load_schema
from dflash_trt.errors import ConfigError

LAUNCHERS = ("slurm", "kubernetes")
CONVERSION_LACKS = (
    "source", "output", "launcher", "image", "models", "replicas", "method", "file", "host", "port", "settings",
    "is_list", "as_json",
)  # fmt: skip
"""Parameters that only write or check a configuration."""
WRITTEN = ("settings", "output", "launcher", "image", "models", "replicas", "method", "host", "port")
"""Parameters that only write one."""
LIST = "dflash-trt serve-config --list"


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
    "--image",
    metavar="IMAGE",
    help="Container image; the runtime's own release unless given; none: Slurm without containers.",
)
@click.option("--models", metavar="DIR", help="Directory of the weights in the cluster. Default: /models.")
@click.option("--replicas", type=click.IntRange(min=1), help="Servers in the cluster. Default: 1.")
@click.option("--method", type=click.Choice(METHODS), default="dflash", show_default=True, help="Decoding method.")
@click.option("--check", "file", type=PATH, help="Check this file instead of writing one.")
@click.option("--from", "command", metavar="FILE|-", type=click.Path(path_type=Path, allow_dash=True),
              help="Write this launch command again, with --draft in the place of its speculation.")  # fmt: skip
@click.option("--version", metavar="VERSION",
              help="Release of the runtime; checked by the nearest that is known. Default: the newest.")  # fmt: skip
@source_options
@click.option("--gpus", type=GPUS, help="GPUs, for a SOURCE that is no deployment, or --check: b300x8.")
@gpu_facts_option
@click.option(
    "--host", metavar="ADDRESS", default="127.0.0.1", show_default=True, help="Address that the server binds."
)
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True,
              help="Port that the server binds.")  # fmt: skip
@click.option("--set", "settings", metavar="KEY=VALUE", multiple=True,
              help="Argument of the runtime, or sbatch. or kubernetes.OPTION=VALUE, over what is written.")  # fmt: skip
@click.option(
    "--list",
    "is_list",
    is_flag=True,
    help="Print the shipped deployments, all or those that match SOURCE: qwen3*h200.",
)
@click.option("--strict", "is_strict", is_flag=True, help="Refuse warnings, too, except those that SOURCE accepts.")
@click.option("--json", "as_json", is_flag=True, help="Print --list or the findings of --check as one JSON document.")
def serve_config(**parameters: Any) -> None:
    """Write the configuration of SOURCE for a runtime to stdout: YAML for trtllm, a command line for the others.

    SOURCE is a deployment, by its file or by a name that --list shows, or with --target and --gpus an engine
    directory or draft checkpoint; --target is not needed for a draft or target that `dflash-trt drafts` knows. The
    command that starts the server goes to stderr; with -o, stdout has all steps to an answer, as a shell script. With
    --check, report every problem of an existing FILE; SOURCE then says what it is deployed on. With --from, change an
    existing command, with EAGLE-3 or without speculation, to DFlash: stderr lists each change with its reason, the
    rest stays as it is written.

    \b
    Example:
      dflash-trt serve-config --list qwen3
      dflash-trt serve-config gpt-oss-120b.b300x8.latency --runtime trtllm -o serve.yaml
      dflash-trt serve-config --from eagle3.sh --draft z-lab/Qwen3-8B-DFlash-b16 > dflash.sh
    """
    request = ServeConfigRequest(**parameters)
    if request.command is not None:
        refuse_given(CONVERSION_LACKS, "has no use with --from, which keeps all that it does not have to change")
        convert_command(request.command, request)
    elif request.is_list:
        refuse_given(("file", "runtime_name"), "has no use with --list")
        _print_list(request.source, request.as_json)
    else:
        _write_or_check(request)


def _write_or_check(request: ServeConfigRequest) -> None:
    if request.runtime_name is None:
        if request.source is not None:
            deployment_path(request.source)  # an error for the beginning of several names
        option = next(each for each in click.get_current_context().command.params if each.name == "runtime_name")
        raise click.MissingParameter(param=option, ctx=click.get_current_context())
    if request.cluster == "dynamo" and request.launcher is not None:
        raise click.UsageError("--launcher: none for a dynamo runtime, which Dynamo's operator starts")
    if request.cluster is None:
        refuse_given(("image", "models", "replicas"), "is for --launcher and dynamo runtimes")
    schema = load_schema(request.runtime, request.version)
    if request.as_json and request.file is None:
        raise click.UsageError("--json is for --list and --check: output for a runtime is data already")
    if not request.host:
        raise click.UsageError("--host: missing address: servers would bind every interface")
    if request.cluster in ("dynamo", "kubernetes"):
        refuse_given(("host",), "has no use here: a pod's server binds 0.0.0.0")
    if request.cluster == "dynamo":
        refuse_given(("port",), f"has no use here: Dynamo's operator sets the frontend's, {SERVICE_PORT}")
    if request.file is not None:
        refuse_given(WRITTEN, "is for a configuration that is written")
        check_file(request.file, request, schema)
    else:
        write_configuration(request, schema)


def _print_list(pattern: str | None, as_json: bool) -> None:
    """The shipped deployments whose name, target or draft contains `pattern`, or matches it with wildcards."""
    files = shipped_deployments()
    listed = {name: load_deployment(file) for name, file in files.items()}
    if pattern is not None:
        words = {name: f"{name} {file.target} {file.draft}".lower() for name, file in listed.items()}
        listed = {name: file for name, file in listed.items() if fnmatch(words[name], f"*{pattern.lower()}*")}
        if not listed:
            raise ConfigError(f"no deployment that comes with dflash-trt matches {pattern}", hint=f"{LIST} shows all")
    if as_json:
        entries = [
            {"name": name, "file": str(files[name]), **msgspec.to_builtins(file)} for name, file in listed.items()
        ]
        print_json("deployments", {"deployments": entries})
        return
    columns = ("name", "target", "GPUs", "purpose", "mode", "recipe")
    rows = [(name, f.target, f.gpus, f.purpose, f.mode, f.recipe) for name, f in listed.items()]
    print_table(f"{len(rows)} deployments", columns, rows)
    click.echo(f"to change one, copy its file from {next(iter(files.values())).parent}", err=True)
