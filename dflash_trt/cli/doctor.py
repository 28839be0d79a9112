# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt doctor`."""

from __future__ import annotations

import click

from dflash_trt.cli.output import print_json, print_table


@click.command(short_help="Show what this machine has and what is missing for which command.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def doctor(as_json: bool) -> None:
    """Show what this machine has, what is missing for which command, and the command that mends it.

    \b
    Example:
      dflash-trt doctor
    """
    from dflash_trt.doctor import examine

    findings = examine()
    if as_json:
        print_json("doctor", {"findings": findings})
        return
    rows = [
        (
            finding.name,
            finding.found or "missing",
            ", ".join(finding.needed_for),
            _mend(finding.found, finding.mend),
        )
        for finding in findings
    ]
    print_table("this machine", ("what", "found", "needed for", "to mend it"), rows)


def _mend(found: str | None, mend: str | None) -> str:
    return "" if found or mend is None else mend
