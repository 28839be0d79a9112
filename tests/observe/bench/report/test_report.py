# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt bench report`: what is written, and what it says where something is missing.

Factors at equal speed and tables at equal concurrency are held against figures worked out by hand.
"""

from __future__ import annotations

import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dflash_trt.errors import BuildError, ConfigError
from dflash_trt.observe.bench.point_record import BenchPoint, Distribution, RequestRow
from dflash_trt.observe.bench.report.bench_report import report
from dflash_trt.observe.bench.report.equal_concurrency import (
    Average,
    average,
    category_rows,
    data_set_row,
    matched_concurrencies,
    sweep,
)
from dflash_trt.observe.bench.report.report_tables import workload_plot
from dflash_trt.observe.bench.report.speed_curve import SpeedCurve, at_speeds, curve, ends, speeds
from dflash_trt.observe.bench.report.workloads import BASELINE, MethodSeries, Workload, load_runs, workloads
from dflash_trt.observe.bench.report.write_report import render_report
from dflash_trt.observe.endpoints.observed_acceptance import drafting
from tests.cli.commands import run, run_here
from tests.observe.bench import samples
from tests.paths import FIXTURES, REPOSITORY

GOLDEN = REPOSITORY / "tests" / "golden" / "bench_report.md"


def row(
    tokens: int, seconds: float, category: str | None = None, accepted: int | None = None, passes: int = 0
) -> RequestRow:
    acceptance = None if accepted is None else drafting(passes, accepted, None)
    return RequestRow(input_tokens=1, output_tokens=tokens, seconds=seconds, category=category, acceptance=acceptance)


def loaded(directory: Path, *points: BenchPoint, **changes: object) -> tuple[Workload, ...]:
    return workloads(load_runs([samples.run_of(directory, *points, **changes)]))


def test_the_sweep_has_every_concurrency_and_compares_where_both_were_measured(tmp_path: Path) -> None:
    points = [samples.point("none", 1, 100, 80), samples.point("none", 4, 60, 200),
              samples.point("dflash", 1, 300, 240), samples.point("dflash", 8, 50, 500, failed=2)]  # fmt: skip
    (whole,) = loaded(tmp_path, *points)
    lines = sweep(whole, seed=7)
    assert [line.concurrency for line in lines] == [1, 4, 8]
    assert [list(line.by_method) for line in lines] == [["none", "dflash"], ["none"], ["dflash"]]
    first = lines[0].by_method["dflash"]
    assert first.rate == 240
    assert first.user_rate == 300
    assert first.speedup.value == 3
    assert first.speedup.interval == pytest.approx((3, 3))
    last = lines[2].by_method["dflash"]
    assert last.lost == 2
    assert last.speedup is None, "plain decoding was not measured there"
    assert matched_concurrencies(whole) == (1,)
    assert category_rows(whole, (), 1, seed=7) == (), "no request has one"


def test_a_point_where_nothing_completed_is_compared_with_nothing(tmp_path: Path) -> None:
    points = [samples.point("none", 1, 1, 1, rows=(), failed=4), samples.point("dflash", 1, 300, 240)]
    (whole,) = loaded(tmp_path, *points)
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
    found = loaded(tmp_path, *points, prompt_set=samples.prompt_set(categories=("coding", "math", "qa")))
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
    (whole,) = loaded(tmp_path, *points)
    coding, math = category_rows(whole, (), 1, seed=7)
    assert (coding.name, math.name) == ("coding", "math")
    assert [line.by_method["dflash"].tau_of_drafting_passes for line in (coding, math)] == [4, 3]
    found = average((coding, math), ["none", "dflash"])
    assert found == Average(2, {"dflash": (4 + 1.5) / 2}, {"none": 1, "dflash": 3.5})


def test_data_sets_of_several_runs_are_rows(tmp_path: Path) -> None:
    gsm = [samples.point("none", 1, 1, 1, rows=(row(30, 1),)),
           samples.point("dflash", 1, 1, 1, rows=(row(90, 1),), acceptance=samples.counters(10, (9, 6)))]  # fmt: skip
    code = [samples.point("none", 2, 1, 1, rows=(row(20, 1),)), samples.point("dflash", 2, 1, 1, rows=(row(50, 1),))]
    found = [
        *loaded(tmp_path / "a", *gsm, prompt_set=samples.prompt_set(name="gsm8k")),
        *loaded(tmp_path / "b", *code, prompt_set=samples.prompt_set(name="humaneval", sha256="1")),
    ]
    lines = [data_set_row(one, seed=7) for one in found]
    assert [(line.name, line.concurrency) for line in lines if line] == [("gsm8k", 1), ("humaneval", 2)]
    assert lines[0].by_method["dflash"].tau_of_drafting_passes == 2.5
    assert lines[0].by_method["dflash"].speedup.value == 3  # type: ignore[union-attr]


def test_runs_on_the_same_prompts_are_merged_and_told_apart_by_their_directories(tmp_path: Path) -> None:
    first = samples.run_of(tmp_path / "monday", samples.point("none", 1, 100, 80), samples.point("dflash", 1, 300, 240))
    second = samples.run_of(tmp_path / "tuesday", samples.point("dflash", 1, 310, 250))
    (whole,) = workloads(load_runs([first, second]))
    assert [one.name for one in whole.series] == ["none", "DFlash (monday)", "DFlash (tuesday)"]
    (line,) = sweep(whole, seed=7)
    assert line.by_method["DFlash (tuesday)"].speedup.value == 250 / 80  # type: ignore[union-attr]


def series(name: str, points: Sequence[BenchPoint], num_gpus: int | None = None) -> MethodSeries:
    return MethodSeries(name, samples.run(name, num_gpus=num_gpus), samples.method(name), tuple(points))


def workload(*series: MethodSeries) -> Workload:
    return Workload("ours", None, series)


def alone(method: MethodSeries) -> SpeedCurve:
    return curve(workload(method), method)


PLAIN = series("none", [samples.point("none", 1, 100, 80), samples.point("none", 4, 60, 200)])
DFLASH = series("dflash", [samples.point("dflash", 1, 300, 240), samples.point("dflash", 4, 80, 400)])


def test_the_factor_is_read_between_the_points_of_both_curves() -> None:
    """At 80: plain is halfway from 80 to 200, DFlash at its slowest point."""
    (found,) = at_speeds(workload(PLAIN, DFLASH), [80], seed=7)
    assert found.gpu_rates == pytest.approx({"none": 140, "dflash": 400})
    assert found.factors["dflash"].value == pytest.approx(400 / 140)
    (found,) = at_speeds(workload(DFLASH), [80], seed=7)
    assert found.gpu_rates == {"dflash": pytest.approx(400)}
    assert found.factors == {}


def test_a_curve_that_does_not_reach_a_speed_has_no_factor() -> None:
    fast, slow = at_speeds(workload(PLAIN, DFLASH), [150, 70], seed=7)
    assert fast.gpu_rates == {"none": None, "dflash": pytest.approx(240 + 160 * (150 / 220))}
    assert slow.gpu_rates == {"none": pytest.approx(170), "dflash": None}
    assert (fast.factors, slow.factors) == ({}, {})


def test_single_points_and_gpus() -> None:
    one, two = (
        series("none", [samples.point("none", 1, 100, 80)]),
        series("dflash", [samples.point("dflash", 2, 100, 160)]),
    )
    at, beside = at_speeds(workload(one, two), [100, 90], seed=7)
    assert at.factors["dflash"].value == pytest.approx(2)
    assert beside.factors == {}
    assert ends(alone(one), "GPU") == "plain: one point, 100 tokens/s/user, 80.0 tokens/s/GPU (concurrency 1)"
    both = workload(series("none", PLAIN.points, 8), series("dflash", DFLASH.points, 4))
    assert at_speeds(both, [80], seed=7)[0].gpu_rates == pytest.approx({"none": 140 / 8, "dflash": 400 / 4})
    one = workload(series("none", PLAIN.points), series("dflash", DFLASH.points, 4))
    assert at_speeds(one, [80], seed=7)[0].gpu_rates == pytest.approx({"none": 140, "dflash": 400})


def test_points_that_a_curve_leaves_out() -> None:
    """Concurrency 8 is slower for users and in all than 4; ties count once."""
    points = [*PLAIN.points, samples.point("none", 8, 50, 150), samples.point("none", 16, 60, 200)]
    found = alone(series("none", points))
    assert [p.concurrency for p in found.front] == [1, 4]
    assert [p.concurrency for p in found.points] == [1, 4, 8, 16]
    broken = samples.point("none", 8, 30, 300, rows=(), failed=3)
    assert alone(series("none", [*PLAIN.points, broken])) == alone(PLAIN)
    # A mean would say 1090 tokens/s/user
    rates = Distribution(avg=1090, p50=100, p90=9000, p99=10000)
    odd = msgspec.structs.replace(PLAIN.points[0], user_tokens_per_second=rates)
    assert alone(series("none", [odd])).points[0].user_rate == 100


def test_speeds_are_round_and_hold_the_announcements_where_it_is_reached() -> None:
    """60 to 300 in parts of 60, and 80 to 100, where both are, in parts of 10."""
    assert speeds([alone(PLAIN), alone(DFLASH)]) == (60, 80, 90, 100, 120, 180, 240, 300)
    fast = series("dflash", [samples.point("dflash", 1, 600, 240), samples.point("dflash", 4, 100, 400)])
    assert speeds([alone(fast)]) == (150, 250, 300, 450, 500, 550, 600)
    assert speeds([alone(series("none", []))]) == ()


def spread(name: str, *rates: float, most: int) -> MethodSeries:
    """Points at concurrency 1 and `most`, whose requests of 11 tokens see those speeds, and that share of them."""
    points = []
    for c in (1, most):
        rows = tuple(RequestRow(input_tokens=1, output_tokens=11, ttft_seconds=0.0, seconds=10 * c / r) for r in rates)
        mean = sum(rates) / len(rates)
        points.append(samples.point(name, c, mean / c, 0.8 * mean * (1 + c), rows=rows))
    return series(name, points)


def test_intervals_hold_the_factor_and_are_the_same_for_a_seed() -> None:
    both = workload(spread("none", 80, 95, 105, 120, most=4), spread("dflash", 200, 280, 320, 400, most=8))
    (found,) = at_speeds(both, [50], seed=7)
    factor = found.factors["dflash"]
    low, high = factor.interval
    assert low < factor.value < high
    assert at_speeds(both, [50], seed=7) == (found,)
    assert at_speeds(both, [50], seed=8)[0].factors["dflash"].interval != factor.interval
    (found,) = at_speeds(workload(PLAIN, DFLASH), [90], seed=7)
    assert found.factors["dflash"].interval == pytest.approx((found.factors["dflash"].value,) * 2)
    # In some draws the curve ends before
    (found,) = at_speeds(workload(spread("none", 80, 120, most=4), DFLASH), [100], seed=7)
    assert found.factors["dflash"].value is not None
    assert found.factors["dflash"].interval is None


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plain from 100 to 60 tokens/s/user, DFlash from 300 to 80, EAGLE-3 at one point; one request failed."""
    held = samples.counters(10, (9, 7, 5))
    points = [
        samples.point("none", 1, 100, 80), samples.point("eagle3", 1, 150, 120), samples.point("none", 4, 60, 200),
        samples.point("dflash", 1, 300, 240, acceptance=held), samples.point("dflash", 4, 80, 400, failed=1),
    ]  # fmt: skip
    return samples.run_of(tmp_path_factory.mktemp("runs") / "monday", *points)


@pytest.fixture(scope="module")
def written(measured: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report on it, by a command of its own, which says the verdict first."""
    output = tmp_path_factory.mktemp("reports") / "out"
    result = run("bench", "report", measured, "-o", output, "--at", "80", "--at", "200")
    assert result.returncode == 0, result.stderr
    assert "1 of 5 requests failed" in result.stderr
    verdict = "DFlash against plain decoding, ours: faster everywhere: at concurrency 1 to 4 (2.00x to 3.00x)"
    assert result.stdout.splitlines()[1] == verdict
    assert "report.html written" in result.stdout
    return output


def test_everything_is_written_and_stands_alone(written: Path) -> None:
    names = sorted(path.name for path in written.iterdir())
    assert names == ["pareto.png", "pareto.svg", "report.html", "report.md"]
    html = (written / "report.html").read_text()
    assert not re.search(r"<script|<link|url\(|(src|srcset|href)=\"(?!data:)|https?://(?!localhost)", html)
    ElementTree.parse(written / "pareto.svg")
    assert (written / "report.md").read_text() == GOLDEN.read_text(), "after a wanted change, make it the new file"
    facts = ("a CPU, 2 cores, 8 GiB", "dflash_trt 0.1.0", "dflash-trt bench run", "seed: 7", "server: not stated")
    assert [fact for fact in facts if fact not in html] == []
    assert html.count("Tau of drafting passes = (accepted drafts") == 1


def test_an_older_report_is_replaced_only_when_asked_and_nothing_else_ever(
    measured: Path, written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The new one is also printed as a JSON document, and its percentiles are those of the requests."""
    output = Path(shutil.copytree(written, tmp_path / "out"))
    with pytest.raises(BuildError, match="already exists") as raised:
        run_here("bench", "report", measured, "-o", output)
    assert "--force" in str(raised.value.hint)
    assert (output / "report.md").read_bytes() == (written / "report.md").read_bytes()
    with pytest.raises(BuildError, match="already exists and is not a report of a bench run"):
        run_here("bench", "report", measured, "-o", measured, "--force")
    run = FIXTURES / "bench-run"
    run_here("bench", "report", run, "-o", output, "--force", "--json")
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "dflash-trt/bench-report/1"
    assert [len(point["rows"]) for point in document["workloads"][0]["points"]] == [0] * 8
    text = (output / "report.md").read_text()
    point = json.loads((run / "points" / "dflash" / "c8.json").read_text())
    p50, p90, p99 = np.percentile([1e3 * row["ttft_seconds"] for row in point["rows"]], (50, 90, 99))
    expected = " | ".join(f"{value:,.0f}" if value >= 100 else f"{value:.1f}" for value in (p50, p90, p99))
    section = text.partition("### Time to first token, ms: prompts")[2].partition("###")[0]
    assert f"| 8 | DFlash | {expected} |" in section


def test_what_is_no_run_or_completed_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        run_here("bench", "report", tmp_path, "-o", tmp_path / "out")
    assert "bench run -o RUN" in str(raised.value.hint)
    directory = samples.run_of(tmp_path, samples.point("none", 1, 1, 1, rows=(), failed=4))
    with pytest.raises(ConfigError, match="expected a point with a completed request, found 1 points without"):
        load_runs([directory])


def test_names_from_outside_are_no_markup(tmp_path: Path) -> None:
    nasty = samples.method("none", model="<script>alert(1)</script>|`x`\x1b[2J")
    found = report(load_runs([samples.run_of(tmp_path, samples.point("none", 1, 100, 80), methods=(nasty,))]), seed=7)
    markdown, html = render_report(found, "markdown"), render_report(found, "html")
    for text in (markdown, html):
        assert "<script" not in text
        assert "\x1b" not in text
    assert "\\|\\`x\\`" in markdown


def test_without_plain_decoding_the_report_says_so(tmp_path: Path) -> None:
    found = report(load_runs([samples.run_of(tmp_path, samples.point("dflash", 1, 100, 80))]), seed=7)
    assert found.notes == ("ours: no method named 'none', so there are no speed-ups; --reference names another",)
    assert "| 1 | DFlash | 80.0 | 100 | - | - |" in render_report(found, "markdown")


def test_categories_measured_one_by_one_are_table_1_with_its_average_and_no_data_set(tmp_path: Path) -> None:
    points = [
        samples.point(name, 1, rate, rate, category=category)
        for name, category, rate in (
            ("none", "coding", 10), ("none", "math", 10), ("dflash", "coding", 10), ("dflash", "math", 20),
        )
    ]  # fmt: skip
    samples.run_of(tmp_path, *points, prompt_set=samples.prompt_set(categories=("coding", "math")))
    text = render_report(report(load_runs([tmp_path]), seed=7), "markdown")
    assert "| coding | 1 | 5.5 | 5.5 | 1.00x (1.00-1.00) | - |" in text
    assert "| math | 1 | 5.5 | 7.3 | 1.33x (1.33-1.33) | - |\n| average |  |  |  | 1.17x | - |" in text
    assert "Data sets" not in text


def test_a_lower_concurrency_that_is_slower_is_noted(tmp_path: Path) -> None:
    points = [samples.point("none", c, rate, 80) for c, rate in ((1, 50), (2, 100), (4, 60))]
    found = report(load_runs([samples.run_of(tmp_path, *points)]), seed=7)
    assert found.notes == (
        "ours: plain at concurrency 1: users were slower than at a higher one; the machine had other work, or the run"
        " is too short",
    )


def test_the_picture_in_the_docs_is_of_the_run_that_is_here() -> None:
    """After a wanted change: make bench-report"""
    found = report(load_runs([FIXTURES / "bench-run"]), seed=0)
    plot = workload_plot(found, found.workloads[0])
    root = ElementTree.parse(REPOSITORY / "docs" / "bench-pareto.svg").getroot()
    assert plot.description in [element.text for element in root.iter("{http://purl.org/dc/elements/1.1/}description")]
