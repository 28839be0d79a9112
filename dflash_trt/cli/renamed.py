# SPDX-License-Identifier: Apache-2.0
"""What was typed before 0.2 and is called otherwise now: for one release it still works."""

from __future__ import annotations

import os
from pathlib import Path

import click

from dflash_trt.engine.manifest import MANIFEST
from dflash_trt.files.command import quoted

NEW_BUILD = {"--target", "-o", "--output", "--plans-for"}
"""Options of `build` that its old form for an engine directory never had."""


class RenamingGroup(click.Group):
    """Commands, which old spellings find, too; the new one is said on stderr."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        return super().resolve_command(ctx, present_spelling(args))


def present_spelling(arguments: list[str]) -> list[str]:
    name, *options = arguments
    for index, option in enumerate(options):
        flag, equals, file = option.partition("=")
        if name == "quantize" and flag in ("--search", "--recover"):
            click.echo(f"quantize {flag} FILE is now: dflash-trt {flag[2:]} --features FILE", err=True)
            return [flag[2:], *options[:index], f"--features{equals}{file}", *options[index + 1 :]]
    words = " ".join(options).replace("=", " ")
    if name == "build" and "--backend tensorrt" in words and not NEW_BUILD & {*words.split()}:
        for index, option in enumerate(options):
            if os.path.isfile(os.path.join(option, MANIFEST)):  # noqa: PTH113, PTH118 - any text, however long
                click.echo(f"build ENGINE is now: dflash-trt build --plans-for {quoted(Path(option))}", err=True)
                return [name, *options[:index], "--plans-for", *options[index:]]
    return arguments
