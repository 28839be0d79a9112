# SPDX-License-Identifier: Apache-2.0
"""The points that `bench run` prints, in a terminal of 80 columns, letter for letter: tests/golden/bench_run.txt."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from dflash_trt.cli.bench import print_points
from dflash_trt.observe.bench.records import BenchPoint, RequestRow
from dflash_trt.observe.bench.run_directory import write_point, write_run
from tests.observe.bench.samples import UNPUBLISHED, counters, flat, point, run
from tests.paths import REPOSITORY

GOLDEN = REPOSITORY / "tests" / "golden" / "bench_run.txt"
DRAFTED = counters(1000, (900, 800, 700))


def sample(
    method: str, concurrency: int, rate: float, ttft_seconds: float, *, cut: int = 0, failed: int = 0
) -> BenchPoint:
    finishes = ["length"] * cut + ["stop"] * (100 - cut - failed)
    rows = tuple(
        RequestRow(input_tokens=5, output_tokens=11, ttft_seconds=1.0, seconds=2.0, finish=finish)
        for finish in finishes
    )
    acceptance = UNPUBLISHED if method == "none" else DRAFTED
    made = point(method, concurrency, rate / concurrency, rate, rows=rows, failed=failed, acceptance=acceptance)
    return msgspec.structs.replace(made, ttft_seconds=flat(ttft_seconds))


def table(directory: Path, *points: BenchPoint) -> None:
    directory.mkdir()
    write_run(directory, run("none", "dflash-nvfp4", concurrencies=(1, 256)))
    for each in points:
        write_point(directory, each)
    print_points(directory, as_json=False)


def test_it_fits_eighty_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers are whole; what no request was is no column."""
    monkeypatch.setenv("COLUMNS", "80")
    table(tmp_path / "a", sample("none", 1, 88.2, 0.0312), sample("dflash-nvfp4", 1, 190.34, 0.0008))
    slow = sample("none", 256, 4278.04, 7.9872, cut=3), sample("dflash-nvfp4", 256, 20306.2, 17.2192, cut=2, failed=5)
    table(tmp_path / "b", *slow)
    assert capsys.readouterr().out == GOLDEN.read_text()
