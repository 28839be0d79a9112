# SPDX-License-Identifier: Apache-2.0
"""The option that says in which type a target is computed."""

from __future__ import annotations

import click

from dflash_trt.targets.dtype import DTYPES

DTYPE_HELP = "Type that the target is computed in; auto: float32."

dtype_option = click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default="auto",
    show_default=True,
    help=DTYPE_HELP,
)
"""What `target_dtype` reads; bfloat16 is for checkpoints in it."""
