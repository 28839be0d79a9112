# SPDX-License-Identifier: Apache-2.0
"""`quantize --search` and `quantize --recover` as they were typed before 0.2: for one release they still work."""

from __future__ import annotations

from typing import Any

import click

from dflash_trt.cli.recover import recover
from dflash_trt.cli.search import search

RENAMED = {"--search": search, "--recover": recover}


class Quantize(click.Command):
    """`quantize`, which runs the command that an option of before names, and says its new name on stderr."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        for index, argument in enumerate(args):
            option, equals, file = argument.partition("=")
            if (command := RENAMED.get(option)) is not None:
                click.echo(f"quantize {option} FILE is now: dflash-trt {command.name} --features FILE", err=True)
                args = [*args[:index], f"--features{equals}{file}", *args[index + 1 :]]
                return command.make_context(command.name, args, parent, **extra)
        return super().make_context(info_name, args, parent, **extra)
