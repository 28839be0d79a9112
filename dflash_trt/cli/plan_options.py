# SPDX-License-Identifier: Apache-2.0
"""Command-line options for how TensorRT plans are built."""

from __future__ import annotations

import math
from typing import Any

import click
import msgspec

from dflash_trt.cli.options import PATH, options, refuse_given
from dflash_trt.engine.plans.plan import PlanOptions
from dflash_trt.engine.plans.timing_cache import TimingCache

DEFAULTS = PlanOptions()
SIZE = click.IntRange(1, 2**31 - 1)  # slots, lengths and positions are INT32 in both graphs
plan_options = options(
    click.option("--backend", type=click.Choice(["onnx", "tensorrt"]), default="onnx", show_default=True,
                 help="tensorrt: plans for this machine's GPU as well."),
    click.option("--max-batch-size", type=SIZE,
                 help="Blocks of one pass and slots of the context cache;"
                 f" {DEFAULTS.max_batch_size} unless CONFIG.yaml says otherwise."),
    click.option("--max-seq-len", type=SIZE,
                 help=f"Context rows per slot; {DEFAULTS.max_seq_len} unless CONFIG.yaml says otherwise."),
    click.option("--max-num-tokens", type=SIZE,
                 help=f"Context rows per injection; {DEFAULTS.max_num_tokens} unless CONFIG.yaml says otherwise."),
    click.option("--workspace-gib", type=click.FloatRange(min=0, min_open=True),
                 help=f"Scratch memory of TensorRT's builder; {DEFAULTS.workspace_bytes / 2**30:g} unless given."),
    click.option("--hardware-compatibility", type=click.Choice(["none", "same_compute_capability", "ampere_plus"]),
                 help="none: plans for this GPU model alone, the fastest."),
    click.option("--version-compatible/--no-version-compatible", default=None,
                 help="Plans for later TensorRT versions of this major, too; the plugin is embedded."),
    click.option("--timing-cache", type=PATH, help="File that keeps what TensorRT measured."),
    click.option("--reproducible", is_flag=True, help="Measure nothing: every kernel comes from --timing-cache."),
)  # fmt: skip
"""--backend and how plans are built: keyword arguments for `plan_request`."""


class PlanRequest(msgspec.Struct, frozen=True, kw_only=True):
    is_wanted: bool
    changes: dict[str, Any]
    """Options that are given."""
    timing_cache: TimingCache | None

    def options(self, base: PlanOptions | None) -> PlanOptions:
        """`base`, the deployment's or an earlier build's, with what is given in its place."""
        return msgspec.structs.replace(base or DEFAULTS, **self.changes)


def plan_request(settings: dict[str, Any]) -> PlanRequest:
    """Raises UsageError when an option is given for plans that nobody asks for."""
    is_wanted = settings.pop("backend") == "tensorrt"
    if not is_wanted:
        refuse_given(settings, "is for --backend tensorrt")
    file, reproducible = settings.pop("timing_cache"), settings.pop("reproducible")
    if reproducible and file is None:
        raise click.UsageError("--reproducible needs --timing-cache")
    cache = None if file is None else TimingCache(file=file, reproducible=reproducible)
    changes = {name: value for name, value in settings.items() if value is not None}
    if "workspace_gib" in changes:
        if not math.isfinite(changes["workspace_gib"]):
            raise click.UsageError(f"--workspace-gib: expected a finite number, found {changes['workspace_gib']}")
        changes["workspace_bytes"] = int(changes.pop("workspace_gib") * 2**30)
    return PlanRequest(is_wanted=is_wanted, changes=changes, timing_cache=cache)
