# SPDX-License-Identifier: Apache-2.0
"""Shares and sizes as options take them."""

from __future__ import annotations

import re

import click

UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def share(context: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
    """`3%` and `0.03` as 0.03; usage error for anything that is no share from 0 up to, but without, 1."""
    if text is None:
        return None
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1
    if not 0 <= value < 1:
        raise click.BadParameter(f"expected a share such as 3% or 0.03, found {text!r}", context, parameter)
    return value


def num_bytes(context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    """`400MiB`, `0.5 GB` and `4096` as bytes; usage error for anything else."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]i?B|B|)", text, flags=re.ASCII)
    if match is None:
        raise click.BadParameter(f"expected bytes such as 400MiB or 4096, found {text!r}", context, parameter)
    return int(float(match[1]) * UNITS[match[2]])
