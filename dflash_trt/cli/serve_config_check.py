# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt serve-config --check`: reports every problem of an existing configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click

from dflash_trt.cli.deployment_source import ServeConfigRequest, read_deployment, refuse_errors
from dflash_trt.cli.output import print_json
from dflash_trt.deploy.checker import check
from dflash_trt.deploy.file_configs import file_configs
from dflash_trt.deploy.finding import ACCEPTED, ERROR, UNCHECKED, WARNING, Finding, judged, numbered
from dflash_trt.deploy.gpus import parse_gpus
from dflash_trt.deploy.real_classes import check_with_package
from dflash_trt.deploy.schema import Schema
from dflash_trt.errors import printable


def check_file(file: Path, request: ServeConfigRequest, schema: Schema) -> None:
    """Print the findings of all servers in the file; ConfigError if one is an error."""
    target, draft, gpus = request.target, request.draft, request.gpus
    if request.source is None:
        known = None if gpus is None else parse_gpus(gpus, "--gpus", request.gpu_facts)
        configs, accepted = file_configs(file, schema, gpus=known, target=target, draft=draft), {}
    else:
        deployment = read_deployment(request.source, target, draft, gpus, request.gpu_facts)
        configs, accepted = file_configs(file, schema, deployment=deployment), deployment.accepted_warnings
    findings: list[Finding] = []
    for number, config in enumerate(configs, 1):
        found = [*check(config), *check_with_package(schema, config.document)]
        findings += found if len(configs) == 1 else numbered(found, number)
    _report(file, schema, judged(findings, accepted, is_strict=request.is_strict), request.as_json)


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
    refuse_errors(findings, f"{file} cannot run in {schema}")
