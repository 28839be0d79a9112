# SPDX-License-Identifier: Apache-2.0
"""Findings of `dflash-trt doctor`, the gravest last."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from dflash_trt.observe.diagnosis.checks import EndpointFinding


def print_findings(
    notes: list[EndpointFinding], unmeasured: list[EndpointFinding], findings: list[EndpointFinding]
) -> None:
    """Prints each with its figure and likely causes."""
    from dflash_trt.observe.diagnosis.diagnosis_tables import finding_lines

    for word, listed in (("worth knowing", notes), ("NOT MEASURED", unmeasured), ("WRONG", findings)):
        for finding in listed:
            click.echo("\n".join(finding_lines(word, finding)))
