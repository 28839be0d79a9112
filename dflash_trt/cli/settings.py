# SPDX-License-Identifier: Apache-2.0
"""Options made from the settings in `api/`: those of the runtime, and those of a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from dflash_trt.api.runtime_options import DEFAULTS, DEVICES, DTYPES, EXECUTORS
from dflash_trt.api.sampling_params import SAMPLER_FIELDS, SamplingParams
from dflash_trt.cli.options import Command, options


def max_tokens_option(default: int, least: int) -> Callable[[Command], Command]:
    return click.option(
        "--max-tokens", "--max-new-tokens", "max_tokens", type=click.IntRange(min=least), default=default,
        show_default=True,
    )  # fmt: skip


sampling_options = options(
    max_tokens_option(SamplingParams().max_tokens, 1),
    *(
        click.option(f"--{name.replace('_', '-')}", type=field.type, default=field.default,
                     show_default=field.default is not None, help=field.bounds.help)
        for name, field in SAMPLER_FIELDS.items()
    ),
    click.option("--stop", multiple=True, metavar="TEXT", help="Text that ends the answer; may be repeated."),
    click.option("--ignore-eos", is_flag=True, help="Do not stop at the target's end-of-sequence tokens."),
    click.option("--logprobs", is_flag=True, help="Return the log probability of each token (with --json)."),
)  # fmt: skip
"""Options of a request: keyword arguments of `SamplingParams`."""

_RUNTIME_SETTINGS: dict[str, dict[str, Any]] = {
    "max_batch_size": {"type": click.IntRange(min=1), "help": "Requests at once. Default: the engine's, or 16."},
    "draft_length": {
        "metavar": "LENGTH",
        "help": "Drafted tokens that a step verifies: auto (the fastest), a number or 1:7,8:3 (by batch size).",
    },
    "cache_gib": {"type": float, "help": "Room for the caches, in GiB."},
    "enable_prefix_caching": {"help": "Begin a prompt with what earlier requests left in the caches."},
    "device": {"type": click.Choice(DEVICES)},
    "executor": {
        "type": click.Choice(EXECUTORS),
        "help": "Runs the drafter; auto: TensorRT plans or torch on a GPU, ONNX Runtime on a CPU.",
    },
    "dtype": {"type": click.Choice(DTYPES), "help": "Type that the target is computed in; auto: float32."},
    "num_ranks": {"type": click.IntRange(min=1), "help": "Ranks that share the target (torchrun, mpiexec)."},
}


def runtime_options(*names: str) -> Callable[[Command], Command]:
    """Options for these fields of `RuntimeOptions`, with its defaults."""

    def option(name: str) -> Callable[[Command], Command]:
        flag, default = "--tp" if name == "num_ranks" else f"--{name.replace('_', '-')}", getattr(DEFAULTS, name)
        flag = f"{flag}/--no-{flag[2:]}" if default is True else flag
        return click.option(flag, name, default=default, show_default=default is not None, **_RUNTIME_SETTINGS[name])

    return options(*map(option, names))
