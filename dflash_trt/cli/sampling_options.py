# SPDX-License-Identifier: Apache-2.0
"""Command-line options for what a request may ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

_OPTIONS = (
    click.option(
        "--max-tokens", "--max-new-tokens", "max_tokens", type=click.IntRange(min=1), default=128, show_default=True
    ),
    click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy decoding."),
    click.option("--top-k", type=int, default=0, show_default=True, help="Only the k likeliest tokens; 0: all."),
    click.option(
        "--top-p", type=float, default=1.0, show_default=True, help="Only the likeliest tokens that reach this share."
    ),
    click.option(
        "--min-p", type=float, default=0.0, show_default=True, help="Only tokens this likely, next to the likeliest."
    ),
    click.option("--repetition-penalty", type=float, default=1.0, show_default=True),
    click.option("--presence-penalty", type=float, default=0.0, show_default=True),
    click.option("--frequency-penalty", type=float, default=0.0, show_default=True),
    click.option("--seed", type=int, help="The same seed draws the same tokens; drawn itself when left out."),
    click.option("--stop", multiple=True, metavar="TEXT", help="Text that ends the answer; may be repeated."),
    click.option("--ignore-eos", is_flag=True, help="Do not stop at the target's end-of-sequence tokens."),
    click.option("--logprobs", is_flag=True, help="Return the log probability of each token (with --json)."),
)
Command = TypeVar("Command", bound=Callable[..., Any])


def sampling_options(command: Command) -> Command:
    """Adds the options; the command takes them as keyword arguments for `SamplingParams`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
