# SPDX-License-Identifier: Apache-2.0
"""What others published, and whether a run is of the same deployment: only then does it stand beside a figure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from dflash_trt.errors import ConfigError
from dflash_trt.files.json_file import read_json
from dflash_trt.observe.bench.workloads import Series

DATA = Path(__file__).parent / "data" / "announced.json"
AVERAGE = "average"


class Figure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One published figure; None where its source does not state it."""

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


class Figures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The data file."""

    figures: tuple[Figure, ...]


@cache
def figures() -> tuple[Figure, ...]:
    """The data file, read once."""
    return read_json(DATA, Figures, ConfigError, what="the package's data").figures


def of_target(model: str) -> tuple[Figure, ...]:
    """Those of a model, by the last part of its name."""
    return tuple(figure for figure in figures() if _word(figure.target) == _word(model))


def beside(
    series: Series, data_set: str, category: str | None, concurrency: int, figure: Figure
) -> tuple[bool, tuple[str, ...]]:
    """Whether `figure` is of the same row (data set, category, method), and in what its deployment differs."""
    same_row = (_word(figure.data_set), figure.category) == (_word(data_set), category)
    return same_row and figure.method == series.method.name, tuple(_differences(series, concurrency, figure))


def _differences(series: Series, concurrency: int, figure: Figure) -> Iterator[str]:
    run = series.run
    server = re.sub(r"[^a-z0-9]", " ", (run.server or "").lower()).split()
    if figure.gpu is None or figure.gpu not in " ".join(server).replace("x", " ").split():
        yield f"GPU {figure.gpu or 'not stated'}, here {run.server or 'not told'}"
    if figure.num_gpus is None or figure.num_gpus != run.num_gpus:
        yield f"{figure.num_gpus or 'unstated number of'} GPUs, here {run.num_gpus or 'not told'}"
    if figure.runtime != series.method.runtime:
        yield f"runtime {figure.runtime}, here {series.method.runtime}"
    if figure.concurrency is not None and figure.concurrency != concurrency:
        yield f"concurrency {figure.concurrency}, here {concurrency}"


def _word(name: str) -> str:
    """MATH-500, math500 and a/Math_500 are one."""
    return re.sub(r"[^a-z0-9]", "", name.rpartition("/")[2].lower())
