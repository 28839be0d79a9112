# SPDX-License-Identifier: Apache-2.0
"""Command-line options for what a runtime is made with; defaults are those of `RuntimeOptions`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from dflash_trt.runtime.options import DEFAULTS, DEVICES
from dflash_trt.targets.dtype import DTYPES

_SETTINGS: dict[str, dict[str, Any]] = {
    "max_batch_size": {"type": click.IntRange(min=1), "help": "Requests at once. Default: the engine's, or 16."},
    "draft_length": {
        "metavar": "LENGTH",
        "help": "Drafted tokens that a step verifies: auto (the fastest), a number or 1:7,8:3 (by batch size).",
    },
    "cache_gib": {"type": float, "help": "Room for the caches, in GiB."},
    "enable_prefix_caching": {"help": "Begin a prompt with what earlier requests left in the caches."},
    "device": {"type": click.Choice(DEVICES)},
    "dtype": {"type": click.Choice(DTYPES), "help": "Type that the target is computed in; auto: float32."},
    "tp": {"type": click.IntRange(min=1), "help": "Ranks that share the target (torchrun, mpiexec)."},
}
Command = TypeVar("Command", bound=Callable[..., Any])


def runtime_options(*names: str) -> Callable[[Command], Command]:
    """Adds the options of these fields; the command takes them as keyword arguments for `RuntimeOptions`."""

    def decorate(command: Command) -> Command:
        for name in reversed(names):
            flag, default = f"--{name.replace('_', '-')}", getattr(DEFAULTS, name)
            flag = f"{flag}/--no-{flag[2:]}" if default is True else flag
            command = click.option(flag, default=default, show_default=default is not None, **_SETTINGS[name])(command)
        return command

    return decorate


drain_option = click.option(
    "--drain-seconds",
    type=click.IntRange(min=0),
    default=60,
    show_default=True,
    help="Time for running requests at SIGTERM.",
)
