# SPDX-License-Identifier: Apache-2.0
"""Parts of a report that support a decision: verdict, another reference, latencies and goodput, also on a phone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dflash_trt.errors import ConfigError
from dflash_trt.observe.bench.report.bench_report import report
from dflash_trt.observe.bench.report.run_verdict import verdict
from dflash_trt.observe.bench.report.workloads import load_runs
from dflash_trt.observe.bench.report.write_report import render_report
from tests.cli.commands import run
from tests.observe.bench import samples
from tests.paths import FIXTURES

FIXTURE = FIXTURES / "bench-run"


def test_the_verdict_is_the_interval_s(tmp_path: Path) -> None:
    """Requests of one kind have no spread; those of two kinds leave 1.2x undecided."""
    kinds = (samples.point("x", 1, 10, 1).rows[0], samples.point("x", 1, 100, 1).rows[0])
    points = [samples.point("none", c, 100, 100) for c in (1, 2, 4, 8, 16)]
    points += [samples.point("dflash", c, 100, rate) for c, rate in ((1, 150), (2, 300), (4, 200), (16, 80))]
    points += [samples.point("dflash", 8, 100, 120, rows=kinds)]
    assert verdict(report(load_runs([samples.run_of(tmp_path, *points)]), seed=7)) == (
        "DFlash against plain decoding, ours: faster at concurrency 1 to 4 (1.50x to 3.00x); undecided at"
        " concurrency 8 (1.20x); slower at concurrency 16 (0.80x)",
    )
    assert verdict(report(load_runs([samples.run_of(tmp_path / "2", *points[:2], *points[5:7])]), seed=7)) == (
        "DFlash against plain decoding, ours: faster everywhere: at concurrency 1 to 2 (1.50x to 3.00x)",
    )
    assert verdict(report(load_runs([samples.run_of(tmp_path / "3", points[0], points[6])]), seed=7)) == (
        "DFlash against plain decoding, ours: not compared, because no concurrency was measured with both",
    )


def test_a_figure_above_the_acceptance_length_is_no_result(tmp_path: Path) -> None:
    held = samples.counters(10, (9, 6, 3))  # acceptance length 2.8
    points = [samples.point("none", c, 100, 100) for c in (1, 2, 4)]
    points += [
        samples.point("dflash", c, 100, rate, acceptance=held) for c, rate in ((1, 785), (2, 279), (4, 300))
    ]  # fmt: skip
    found = report(load_runs([samples.run_of(tmp_path, *points)]), seed=7)
    assert verdict(found) == (
        "DFlash against plain decoding, ours: the machine was too busy to tell at concurrency 1 (above the acceptance"
        " length of 2.80, which cannot be); faster at concurrency 2 (2.79x); the machine was too busy to tell at"
        " concurrency 4 (above the acceptance length of 2.80, which cannot be)",
    )
    text = render_report(found, "markdown")
    assert "7.85" not in text
    assert "| 1 | DFlash | 785 | 100 | too busy to tell | 2.80 |" in text


def test_no_headline_of_the_shipped_run_is_above_its_acceptance_length() -> None:
    found = report(load_runs([FIXTURE]), seed=0)
    rows = [*found.workloads[0].sweep, *(row for task in found.tasks for row in task.rows)]
    compared = [each for row in rows for each in row.by_method.values() if each.speedup is not None]
    taus = [each.tau_of_drafting_passes for each in compared if each.tau_of_drafting_passes is not None]
    assert len(taus) == len(compared) > 0
    for each, tau in zip(compared, taus, strict=True):
        assert each.speedup is not None
        assert each.speedup.interval is not None
        assert each.speedup.is_possible
        assert each.speedup.interval[1] <= tau
    headline = [float(match) for match in re.findall(r"(\d+\.\d+)x", " ".join(verdict(found)))]
    assert max(headline) <= max(taus)


def test_another_reference_without_plain_decoding(tmp_path: Path) -> None:
    points = [samples.point("eagle3", 1, 150, 150), samples.point("dflash", 1, 300, 240),
              samples.point("eagle3", 4, 100, 320), samples.point("dflash", 4, 80, 300)]  # fmt: skip
    runs = load_runs([samples.run_of(tmp_path, *points)])
    found = report(runs, seed=7, reference="eagle3", user_rates=(120,))
    assert found.notes == ()
    assert verdict(found) == (
        "DFlash against EAGLE-3, ours: faster at concurrency 1 (1.60x); slower at concurrency 4 (0.94x)",
    )
    text = render_report(found, "markdown")
    assert "| concurrency | method | tokens/s/server | tokens/s/user | x EAGLE-3 |" in text
    assert "| 4 | DFlash | 300 | 80.0 | 0.94x (0.94-0.94) |" in text
    assert "Speed-ups are over EAGLE-3;" in text
    assert "plain" not in text
    # EAGLE-3 between 150 and 100 tokens/s/user at 120: 320 - 0.4 * 170; DFlash between 300 and 80.
    factor = found.workloads[0].at_speeds[0].factors["dflash"].value
    assert factor == pytest.approx((300 - 40 / 220 * 60) / (320 - 20 / 50 * 170))
    assert found.tasks[0].rows[0].by_method["eagle3"].speedup is None
    with pytest.raises(ConfigError, match="--reference: expected one of eagle3, dflash, found 'mtp'"):
        report(runs, seed=7, reference="mtp")


def test_five_methods_on_one_curve(tmp_path: Path) -> None:
    rates = {"none": (100, 100), "eagle3": (150, 120), "mtp": (160, 130), "ngram": (120, 104), "dflash": (300, 90)}
    points = [
        samples.point(name, c, rate, rate) for name, pair in rates.items() for c, rate in zip((1, 4), pair, strict=True)
    ]
    runs = load_runs([samples.run_of(tmp_path, *points)])
    assert "DFlash against plain decoding, ours: faster at concurrency 1" in "".join(verdict(report(runs, seed=7)))
    assert verdict(report(runs, seed=7, reference="mtp")) == (
        "plain against MTP, ours: slower everywhere: at concurrency 1 to 4 (0.62x to 0.77x)",
        "EAGLE-3 against MTP, ours: slower everywhere: at concurrency 1 to 4 (0.92x to 0.94x)",
        "n-gram against MTP, ours: slower everywhere: at concurrency 1 to 4 (0.75x to 0.80x)",
        "DFlash against MTP, ours: faster at concurrency 1 (1.88x); slower at concurrency 4 (0.69x)",
    )
    text = render_report(report(runs, seed=7, reference="mtp"), "markdown")
    for title in ("plain", "EAGLE-3", "MTP", "n-gram", "DFlash"):
        assert f"| {title} |" in text


def test_goodput_is_aiperfs(tmp_path: Path) -> None:
    """The best of each method, and the share of the requests that were sent."""
    points = [
        samples.point("none", 1, 100, 88, good=1), samples.point("none", 4, 60, 176, good=1),
        samples.point("dflash", 1, 300, 264, good=1), samples.point("dflash", 4, 80, 352, good=3, failed=1),
    ]  # fmt: skip
    found = report(load_runs([samples.run_of(tmp_path, *points, goodput="request_latency:1200")]), seed=7)
    assert verdict(found)[0].endswith("Best goodput: 24.00 requests/s at 1, plain decoding 8.00 requests/s at 1")
    text = render_report(found, "markdown").replace("\\_", "_")
    assert "### Goodput, request_latency:1200: ours" in text
    assert "| 4 | DFlash | 24.00 | 60% |" in text
    silent = report(load_runs([samples.run_of(tmp_path / "2", samples.point("none", 1, 100, 88))]), seed=7)
    assert "Goodput" not in render_report(silent, "markdown")


@pytest.mark.full
def test_nothing_of_the_page_is_cut_at_960_and_390(tmp_path: Path) -> None:
    """In a real browser: no table is wider than the page."""
    from tests.runtime.server.test_page import WIDER, chromium, set_size

    run("bench", "report", FIXTURE, "-o", tmp_path / "report")
    cut = "return [...document.querySelectorAll('.wide')].filter(e => e.scrollWidth > e.clientWidth).length"
    with chromium() as window:
        for width in (960, 390):
            set_size(window, width, 1000)
            window.get((tmp_path / "report" / "report.html").as_uri())
            assert window.execute_script("return document.querySelectorAll('.wide').length") > 6
            assert (window.execute_script(WIDER), window.execute_script(cut)) == (False, 0), width
