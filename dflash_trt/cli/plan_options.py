# SPDX-License-Identifier: Apache-2.0
"""Command-line options for how TensorRT plans are built."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from dflash_trt.builder.tensorrt.timing_cache import TimingCache
from dflash_trt.engine.plan import PlanOptions

DEFAULTS = PlanOptions()
SIZE = click.IntRange(1, 2**31 - 1)  # slots, lengths and positions are INT32 in both graphs
_OPTIONS = (
    click.option(
        "--backend",
        type=click.Choice(["onnx", "tensorrt"]),
        default="onnx",
        show_default=True,
        help="tensorrt: plans for this machine's GPU as well.",
    ),
    click.option(
        "--max-batch-size",
        type=SIZE,
        help=f"Blocks of one pass and slots of the context cache; {DEFAULTS.max_batch_size} unless CONFIG.yaml says.",
    ),
    click.option(
        "--max-seq-len",
        type=SIZE,
        help=f"Context rows of a slot; {DEFAULTS.max_seq_len} unless CONFIG.yaml says.",
    ),
    click.option(
        "--max-num-tokens",
        type=SIZE,
        help=f"Context rows of one injection; {DEFAULTS.max_num_tokens} unless CONFIG.yaml says.",
    ),
    click.option(
        "--workspace-gib",
        type=click.FloatRange(min=0, min_open=True),
        help=f"Scratch that TensorRT may plan with; {DEFAULTS.workspace_bytes / 2**30:g}.",
    ),
    click.option(
        "--hardware-compatibility",
        type=click.Choice(["none", "same_compute_capability", "ampere_plus"]),
        help="none: plans for this GPU model alone, the fastest.",
    ),
    click.option(
        "--version-compatible/--no-version-compatible",
        default=None,
        help="Plans for later TensorRT versions of this major, too; the plugin is embedded.",
    ),
    click.option("--timing-cache", type=click.Path(path_type=Path), help="File that keeps what TensorRT measured."),
    click.option("--reproducible", is_flag=True, help="Measure nothing: every kernel comes from --timing-cache."),
)
Command = TypeVar("Command", bound=Callable[..., Any])


class PlanRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line says of plans."""

    is_wanted: bool
    changes: dict[str, Any]
    """Options that are given."""
    timing_cache: TimingCache | None

    def options(self, base: PlanOptions | None) -> PlanOptions:
        """`base`, the deployment's or an earlier build's, with what is given in its place."""
        return msgspec.structs.replace(base or DEFAULTS, **self.changes)


def plan_options(command: Command) -> Command:
    """Adds --backend and the options; the command takes them as keyword arguments for `plan_request`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def plan_request(settings: dict[str, Any]) -> PlanRequest:
    """Raises UsageError when an option is given for plans that nobody asks for."""
    is_wanted = settings.pop("backend") == "tensorrt"
    for name, value in settings.items():
        if not is_wanted and value not in (None, False):
            raise click.UsageError(f"--{name.replace('_', '-')} is for --backend tensorrt")
    cache = _timing_cache(settings.pop("timing_cache"), settings.pop("reproducible"))
    changes = {name: value for name, value in settings.items() if value is not None}
    if "workspace_gib" in changes:
        if not math.isfinite(changes["workspace_gib"]):
            raise click.UsageError(f"--workspace-gib: expected a finite number, found {changes['workspace_gib']}")
        changes["workspace_bytes"] = int(changes.pop("workspace_gib") * 2**30)
    return PlanRequest(is_wanted=is_wanted, changes=changes, timing_cache=cache)


def _timing_cache(file: Path | None, reproducible: bool) -> TimingCache | None:
    if file is not None:
        return TimingCache(file=file, reproducible=reproducible)
    if reproducible:
        raise click.UsageError("--reproducible needs --timing-cache")
    return None
