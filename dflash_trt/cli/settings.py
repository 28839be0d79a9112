# SPDX-License-Identifier: Apache-2.0
"""Options made from the settings in `api/`: those of the runtime, and those of a request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from dflash_trt.api.fields import descriptions
from dflash_trt.api.runtime_options import CHOICES, DEFAULTS, DESCRIPTIONS, METAVARS, NUMBERS, RuntimeOptions
from dflash_trt.api.sampling_params import SAMPLER_FIELDS, SamplerSettings, SamplingParams
from dflash_trt.cli.options import FINITE, Command, options, refuse_given


def max_tokens_option(default: int, least: int) -> Callable[[Command], Command]:
    return click.option(
        "--max-tokens", "--max-new-tokens", "max_tokens", type=click.IntRange(min=least), default=default,
        show_default=True, help="Longest answer, in tokens.",
    )  # fmt: skip


sampling_options = options(
    max_tokens_option(SamplingParams().max_tokens, 1),
    *(
        click.option(f"--{name.replace('_', '-')}", type=FINITE if field.type is float else int,
                     default=field.default, show_default=field.default is not None,
                     help=descriptions(SamplerSettings).get(name))
        for name, field in SAMPLER_FIELDS.items()
    ),
    click.option("--stop", multiple=True, metavar="TEXT", help="Text that ends the answer; may be repeated."),
    click.option("--ignore-eos", is_flag=True, help="Do not stop at the target's end-of-sequence tokens."),
    click.option("--logprobs", is_flag=True, help="Return the log probability of each token (with --json)."),
)  # fmt: skip
"""Options of a request: keyword arguments of `SamplingParams`."""


def runtime_options(*names: str, note: str = "") -> Callable[[Command], Command]:
    """Options for these fields of `RuntimeOptions`, or for all, with its types, defaults and descriptions."""
    return options(*(_runtime_option(name, note) for name in names or RuntimeOptions.__struct_fields__))


def _runtime_option(name: str, note: str) -> Callable[[Command], Command]:
    flag, default = f"--{name.replace('_', '-')}", getattr(DEFAULTS, name)
    kind: click.ParamType[Any] | None = None
    if default is True:
        flag = f"{flag}/--no-{flag[2:]}"
    elif name in CHOICES:
        kind = click.Choice(CHOICES[name])
    elif name in NUMBERS:
        number = NUMBERS[name]
        kind = click.IntRange(min=int(number.bounds.low)) if number.type is int else FINITE
    shown = default is not None
    return click.option(
        flag, name, type=kind, metavar=METAVARS.get(name), default=default, show_default=shown,
        help=DESCRIPTIONS[name] + note,
    )  # fmt: skip


def take_runtime_options(parameters: dict[str, Any], **fixed: Any) -> RuntimeOptions:
    """Takes the settings of the runtime out of a command's parameters; `fixed` are those without an option."""
    given = {name: parameters.pop(name) for name in RuntimeOptions.__struct_fields__ if name in parameters}
    return RuntimeOptions(**given, **fixed)


def refuse_runtime_options(config: Path) -> None:
    """Raises UsageError where the running command has settings of the embedded runtime, which a deployment sets."""
    names = (*RuntimeOptions.__struct_fields__, "num_ranks")
    refuse_given(names, f"is for an engine directory: the deployment file {config} sets it")
