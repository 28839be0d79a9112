# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt drafts`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from dflash_trt.cli.completion import TARGET
from dflash_trt.cli.options import json_option
from dflash_trt.cli.output import print_json, print_table
from dflash_trt.deploy.catalog import CHOICE, COLUMNS, KnownDraft, catalog, choice, drafts_for, entry, legend, row
from dflash_trt.deploy.deployment_file import load_deployment, shipped_deployments
from dflash_trt.errors import ConfigError
from dflash_trt.files.command import quoted


@click.command(short_help="List known drafts: all, or those of a target.")
@click.argument("target", type=TARGET, required=False)
@json_option
def drafts(target: str | None, as_json: bool) -> None:
    """List the known drafts of TARGET, a repository id, or of all targets: what each is, needs and was measured at.

    Nothing is fetched: each row says when its facts were read, and what is not known.

    \b
    Example:
      dflash-trt drafts Qwen/Qwen3-8B
    """
    known = catalog()
    found = known.drafts if target is None else drafts_for(target)
    if not found:
        raise ConfigError(
            f"no draft is known for {target}",
            hint="all of them: dflash-trt drafts; a draft that is not listed is read all the same: dflash-trt inspect",
        )
    if as_json:
        catalogue = {"source": known.source, "kinds": known.kinds, "drafts": [entry(draft) for draft in found]}
        print_json("drafts", {"target": target, **catalogue})
        return
    if target is None:
        print_table("Known drafts", COLUMNS, [row(draft) for draft in found])
    else:
        print_table(f"Drafts of {target}", CHOICE, [choice(draft) for draft in found])
        click.echo(legend(), err=True)
        if heads := _eagle3_heads(found):
            click.echo(f"to compare with, at eagle3 in deployment files: {', '.join(heads)}", err=True)
        readable = next((draft for draft in found if known.families[draft.family].dialect is not None), None)
        if readable is not None:
            known_as = target if "/" in target else readable.target
            click.echo(
                f"next: dflash-trt inspect {quoted(Path(readable.draft))} --target {quoted(Path(known_as))}", err=True
            )
    click.echo(f"Facts: {known.source}. Runtimes and speed-ups: docs/checkpoints.md, or --json.", err=True)


def _eagle3_heads(found: Sequence[KnownDraft]) -> list[str]:
    """The EAGLE-3 heads of the drafts' shipped deployments."""
    files = [shipped_deployments()[name.removesuffix(".yaml")] for draft in found for name in draft.deployments]
    return sorted({head.model for file in files if (head := load_deployment(file).eagle3) is not None})
