# SPDX-License-Identifier: Apache-2.0
"""What others published for a target: listed in a report, with the deployment that each figure is of."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from dflash_trt.errors import ConfigError
from dflash_trt.files.json_file import read_json

DATA = Path(__file__).parent / "data" / "published_figures.json"


class PublishedFigure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One figure; None where its source does not state it."""

    table: Literal["categories", "data sets", "tasks"]
    source: str
    target: str
    gpu: str | None
    num_gpus: int | None
    runtime: str
    data_set: str
    category: str | None
    concurrency: int | None
    method: str
    speedup: float | None
    tau: float | None

    @property
    def deployment(self) -> str:
        """GPUs, runtime and load, as far as they are stated."""
        gpus = f"{self.num_gpus or '?'}x {self.gpu.upper()}" if self.gpu else "GPU not stated"
        load = f", concurrency {self.concurrency}" if self.concurrency else ""
        return f"{gpus}, {self.runtime}{load}"


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    figures: tuple[PublishedFigure, ...]


@cache
def published_figures() -> tuple[PublishedFigure, ...]:
    """The data file, read once."""
    return read_json(DATA, _Document, ConfigError, what="the package's data").figures


def figures_of(model: str) -> tuple[PublishedFigure, ...]:
    """Those of a model, by the last part of its name: a/Math_500 and math500 are one."""
    return tuple(figure for figure in published_figures() if _letters(figure.target) == _letters(model))


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.rpartition("/")[2].lower())
