# SPDX-License-Identifier: Apache-2.0
"""Values of options: callbacks that read them, and texts for shares and sizes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

import click

UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
T = TypeVar("T")


def parsed(parse: Callable[[str], T]) -> Callable[[click.Context, click.Parameter, str | None], T | None]:
    """Callback of an option whose text `parse` reads; its ValueError is a usage error."""

    def read(context: click.Context, parameter: click.Parameter, text: str | None) -> T | None:
        try:
            return None if text is None else parse(text)
        except ValueError as problem:
            raise click.BadParameter(str(problem), context, parameter) from None

    return read


def share(text: str) -> float:
    """`3%` and `0.03` as 0.03; ValueError for anything that is no share from 0 up to, but without, 1."""
    match = re.fullmatch(r"(\d*\.?\d+(?:e-\d+)?|\d+\.)(%?)", text, flags=re.ASCII)
    if match is None or (value := float(match[1]) / (100 if match[2] else 1)) >= 1:
        raise ValueError(f"expected a share such as 3% or 0.03, found {text!r}")
    return value


def num_bytes(text: str) -> int:
    """`400MiB`, `0.5 GB` and `4096` as bytes; ValueError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]i?B|B|)", text, flags=re.ASCII)
    if match is None:
        raise ValueError(f"expected bytes such as 400MiB or 4096, found {text!r}")
    return int(float(match[1]) * UNITS[match[2]])
