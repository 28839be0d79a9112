# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt serve-config --from`: changes the speculation of an existing launch command."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from dflash_trt.cli.deployment_source import ServeConfigRequest, print_and_refuse
from dflash_trt.deploy.conversion import convert
from dflash_trt.deploy.finding import judged
from dflash_trt.deploy.gpus import parse_gpus
from dflash_trt.deploy.schema import PACKAGES
from dflash_trt.errors import ConfigError, printable
from dflash_trt.files.read import decode, read_text
from dflash_trt.files.strict_yaml import MAX_BYTES


def convert_command(file: Path, request: ServeConfigRequest) -> None:
    """Print the command in `file`, - for stdin, converted, and to stderr each change with its reason."""
    runtime = request.runtime_name
    if runtime not in (None, *PACKAGES):
        raise click.UsageError(f"--runtime {runtime}: expected {', '.join(PACKAGES)} or none, which FILE itself says")
    if request.draft is None:
        raise click.MissingParameter(param_hint="'--draft'", param_type="option")
    if str(file) == "-":
        content = sys.stdin.buffer.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(f"standard input has more than {MAX_BYTES} bytes, the most that a command may have")
        text = decode(content, "standard input", ConfigError)
    else:
        text = read_text(file, ConfigError, limit=MAX_BYTES)
    gpus = None if request.gpus is None else parse_gpus(request.gpus, "--gpus", request.gpu_facts)
    done = convert(
        text, file, draft=request.draft, runtime=runtime, version=request.version, target=request.target, gpus=gpus
    )
    for change in done.changes:
        click.echo(printable(f"changed: {change}"), err=True)
    print_and_refuse(str(file), PACKAGES[done.schema.runtime], judged(done.findings, {}, is_strict=request.is_strict))
    if not done.changes:
        left = "; the findings above are left: to mend them changes more than the drafts" if done.findings else ""
        click.echo(f"nothing to change{left}", err=True)
    click.echo(done.text, nl=False)
