# SPDX-License-Identifier: Apache-2.0
"""The options of serve-config, the SOURCE argument that it shares with other commands, and the refusal of errors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import click
import msgspec

from dflash_trt.checkpoint.source import REPOSITORY_ID
from dflash_trt.deploy.catalog import known_deployments, known_pair
from dflash_trt.deploy.cluster.dynamo_graph import RUNTIMES as DYNAMO
from dflash_trt.deploy.deployment_file import Method, deployment_path, load_deployment
from dflash_trt.deploy.finding import ERROR, Finding
from dflash_trt.deploy.gpus import GpuFacts, parse_gpus
from dflash_trt.deploy.resolve import draft_deployment, resolve
from dflash_trt.deploy.resolved_deployment import ResolvedDeployment
from dflash_trt.deploy.schema import Runtime
from dflash_trt.errors import ConfigError, printable


class ServeConfigRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `serve-config`, which writes, checks, converts or lists; None where one was not given."""

    source: str | None
    target: str | None
    draft: str | None
    gpus: str | None
    gpu_facts: GpuFacts | None
    runtime_name: str | None
    """A runtime, or dynamo-RUNTIME."""
    version: str | None
    method: Method
    launcher: str | None
    image: str | None
    models: str | None
    replicas: int | None
    host: str
    port: int
    settings: tuple[str, ...]
    """KEY=VALUE arguments over those that are written."""
    output: Path | None
    file: Path | None
    """File to check."""
    command: Path | None
    """File of a launch command to convert."""
    is_list: bool
    is_strict: bool
    as_json: bool

    @property
    def cluster(self) -> str | None:
        """Launcher in a cluster: slurm, kubernetes or dynamo; None for a server started by hand."""
        return "dynamo" if self.runtime_name in DYNAMO else self.launcher

    @property
    def runtime(self) -> Runtime:
        """The runtime without Dynamo's prefix."""
        assert self.runtime_name is not None, "--list and --from alone go without"
        return DYNAMO.get(self.runtime_name) or cast("Runtime", self.runtime_name)


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
    counted = str(parse_gpus(gpus, "--gpus", gpu_facts))
    file = draft_deployment(named, target=target, gpus=counted, gpu_facts=gpu_facts)
    return resolve(file, Path(source).resolve().name if is_here else Path(named).name, target=asked)


def print_and_refuse(source: str, runtime: str, findings: Sequence[Finding]) -> None:
    """Print every finding to stderr; ConfigError if one is an error."""
    for finding in findings:
        click.echo(printable(str(finding)), err=True)
    refuse_errors(findings, f"{source} cannot run in {runtime}")


def refuse_errors(findings: Sequence[Finding], problem: str) -> None:
    """ConfigError, "PROBLEM: N errors", if there are any."""
    if errors := sum(finding.severity == ERROR for finding in findings):
        raise ConfigError(f"{problem}: {errors} error{'s' if errors != 1 else ''}")
