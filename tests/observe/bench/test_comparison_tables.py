# SPDX-License-Identifier: Apache-2.0
"""Tables at equal concurrency, against tables worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_trt.errors import ConfigError
from dflash_trt.observe.bench.comparison_report import (
    Average,
    average,
    category_rows,
    data_set_row,
    matched_concurrencies,
    sweep,
)
from dflash_trt.observe.bench.records import BenchPoint, RequestRow
from dflash_trt.observe.bench.run_directory import BASELINE, load_runs, workloads, write_point, write_run
from dflash_trt.observe.endpoints.observed_acceptance import drafting
from tests.observe.bench import samples


def row(
    tokens: int, seconds: float, category: str | None = None, accepted: int | None = None, passes: int = 0
) -> RequestRow:
    acceptance = None if accepted is None else drafting(passes, accepted, None)
    return RequestRow(input_tokens=1, output_tokens=tokens, seconds=seconds, category=category, acceptance=acceptance)


def write(directory: Path, *points: BenchPoint, categories: tuple[str, ...] = (), name: str = "ours") -> Path:
    prompts = samples.run("none").prompt_set
    methods = list(dict.fromkeys(point.method for point in points))
    concurrencies = tuple(sorted({point.concurrency for point in points}))
    changed = type(prompts)(name=name, source="x", sha256=name, num_prompts=2, categories=categories)
    write_run(directory, samples.run(*methods, concurrencies=concurrencies, prompt_set=changed))
    for point in points:
        write_point(directory, point)
    return directory


def test_the_sweep_has_every_concurrency_and_compares_where_both_were_measured(tmp_path: Path) -> None:
    points = [samples.point("none", 1, 100, 80), samples.point("none", 4, 60, 200),
              samples.point("dflash", 1, 300, 240), samples.point("dflash", 8, 50, 500, failed=2)]  # fmt: skip
    (whole,) = workloads(load_runs([write(tmp_path, *points)]))
    lines = sweep(whole, seed=7)
    assert [line.concurrency for line in lines] == [1, 4, 8]
    assert [list(line.by_method) for line in lines] == [["none", "dflash"], ["none"], ["dflash"]]
    first = lines[0].by_method["dflash"]
    assert first.rate == 240
    assert first.user_rate == 300
    assert first.speedup is not None
    assert first.speedup.value == 3
    assert first.speedup.interval == pytest.approx((3, 3))
    last = lines[2].by_method["dflash"]
    assert last.lost == 2
    assert last.speedup is not None
    assert last.speedup.why == "plain decoding was not measured at concurrency 8"
    assert matched_concurrencies(whole) == (1,)


def test_a_point_where_nothing_completed_is_compared_with_nothing(tmp_path: Path) -> None:
    points = [samples.point("none", 1, 1, 1, rows=(), failed=4), samples.point("dflash", 1, 300, 240)]
    (whole,) = workloads(load_runs([write(tmp_path, *points)]))
    (line,) = sweep(whole, seed=7)
    assert list(line.by_method) == ["dflash"]
    assert matched_concurrencies(whole) == ()
    assert data_set_row(whole, seed=7) is None


def test_categories_from_points_of_their_own(tmp_path: Path) -> None:
    """Coding: 10 tokens/s to 40 and 20; math: 20 to 50, and EAGLE-3 was not measured on it."""
    points = [
        samples.point("none", 2, 1, 1, category="coding", rows=(row(10, 1), row(20, 2))),
        samples.point("eagle3", 2, 1, 1, category="coding", rows=(row(20, 1), row(20, 1))),
        samples.point("dflash", 2, 1, 1, category="coding", rows=(row(20, 1), row(60, 1))),
        samples.point("none", 2, 1, 1, category="math", rows=(row(20, 1),)),
        samples.point("dflash", 2, 1, 1, category="math", rows=(row(50, 1),)),
    ]  # fmt: skip
    found = workloads(load_runs([write(tmp_path, *points, categories=("coding", "math", "qa"))]))
    assert [one.category for one in found] == ["coding", "math"]
    coding, math = category_rows(None, found, 2, seed=7)
    assert {name: one.rate for name, one in coding.by_method.items()} == {"none": 10, "eagle3": 20, "dflash": 40}
    assert [coding.by_method[name].speedup.value for name in ("eagle3", "dflash")] == [2, 4]  # type: ignore[union-attr]
    assert coding.by_method[BASELINE].speedup is None
    assert math.by_method["dflash"].speedup.value == 2.5  # type: ignore[union-attr]
    assert average((coding, math), ["none", "dflash"]) == Average(2, {"dflash": 3.25}, {})
    assert average((coding, math), ["none", "eagle3", "dflash"]) is None, "only coding has all three"


def test_categories_from_the_requests_of_points_on_all_prompts(tmp_path: Path) -> None:
    """Tau of a category is over its requests."""
    plain = (row(10, 1, "coding", 0, 10), row(20, 1, "math", 0, 20), row(20, 1, "math", 0, 20))
    ours = (row(40, 1, "coding", 30, 10), row(30, 1, "math", 10, 10), row(30, 1, "math", 30, 10))
    points = [samples.point("none", 1, 1, 1, rows=plain), samples.point("dflash", 1, 1, 1, rows=ours)]
    (whole,) = workloads(load_runs([write(tmp_path, *points)]))
    coding, math = category_rows(whole, (), 1, seed=7)
    assert (coding.name, math.name) == ("coding", "math")
    assert [line.by_method["dflash"].tau_of_drafting_passes for line in (coding, math)] == [4, 3]
    found = average((coding, math), ["none", "dflash"])
    assert found == Average(2, {"dflash": (4 + 1.5) / 2}, {"none": 1, "dflash": 3.5})


def test_requests_without_a_category_make_no_row(tmp_path: Path) -> None:
    points = [samples.point("none", 1, 1, 1), samples.point("dflash", 1, 1, 1)]
    (whole,) = workloads(load_runs([write(tmp_path, *points)]))
    assert category_rows(whole, (), 1, seed=7) == ()


def test_data_sets_of_several_runs_are_rows(tmp_path: Path) -> None:
    gsm = [samples.point("none", 1, 1, 1, rows=(row(30, 1),)),
           samples.point("dflash", 1, 1, 1, rows=(row(90, 1),), acceptance=samples.counters(10, (9, 6)))]  # fmt: skip
    code = [samples.point("none", 2, 1, 1, rows=(row(20, 1),)), samples.point("dflash", 2, 1, 1, rows=(row(50, 1),))]
    runs = load_runs([write(tmp_path / "a", *gsm, name="gsm8k"), write(tmp_path / "b", *code, name="humaneval")])
    lines = [data_set_row(one, seed=7) for one in workloads(runs)]
    assert [(line.name, line.concurrency) for line in lines if line] == [("gsm8k", 1), ("humaneval", 2)]
    assert lines[0] is not None
    assert lines[0].by_method["dflash"].tau_of_drafting_passes == 2.5
    assert lines[0].by_method["dflash"].speedup.value == 3  # type: ignore[union-attr]


def test_runs_on_the_same_prompts_are_merged_and_told_apart_by_their_directories(tmp_path: Path) -> None:
    first = write(tmp_path / "monday", samples.point("none", 1, 100, 80), samples.point("dflash", 1, 300, 240))
    second = write(tmp_path / "tuesday", samples.point("dflash", 1, 310, 250))
    (whole,) = workloads(load_runs([first, second]))
    assert [one.name for one in whole.series] == ["none", "DFlash (monday)", "DFlash (tuesday)"]
    (line,) = sweep(whole, seed=7)
    assert line.by_method["DFlash (tuesday)"].speedup.value == 250 / 80  # type: ignore[union-attr]


def test_a_run_without_a_completed_request_is_refused(tmp_path: Path) -> None:
    directory = write(tmp_path, samples.point("none", 1, 1, 1, rows=(), failed=4))
    with pytest.raises(ConfigError, match="expected a point with a completed request, found 1 points without"):
        load_runs([directory])
