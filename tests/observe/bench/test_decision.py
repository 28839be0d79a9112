# SPDX-License-Identifier: Apache-2.0
"""Parts of a report that support a decision: verdict, another reference, latencies and goodput, also on a phone."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_trt.errors import ConfigError
from dflash_trt.observe.bench.comparison_report import report
from dflash_trt.observe.bench.goodput import goodput, parse_objectives
from dflash_trt.observe.bench.records import RequestRow
from dflash_trt.observe.bench.report_tables import verdict
from dflash_trt.observe.bench.run_directory import load_runs
from dflash_trt.observe.bench.write_report import render_report
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
        "DFlash against plain decoding, ours: faster at concurrency 1 to 4 (1.50x to 3.00x); not decided at"
        " concurrency 8 (1.20x); slower at concurrency 16 (0.80x)",
    )
    assert verdict(report(load_runs([samples.run_of(tmp_path / "2", *points[:2], *points[5:7])]), seed=7)) == (
        "DFlash against plain decoding, ours: faster everywhere: at concurrency 1 to 2 (1.50x to 3.00x)",
    )
    assert verdict(report(load_runs([samples.run_of(tmp_path / "3", points[0], points[6])]), seed=7)) == (
        "DFlash against plain decoding, ours: not compared, because no concurrency was measured with both",
    )


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


def request(tokens: int, ttft: float | None, seconds: float) -> RequestRow:
    return RequestRow(input_tokens=1, output_tokens=tokens, ttft_seconds=ttft, seconds=seconds)


@pytest.mark.parametrize(
    ("objectives", "good"),
    [
        ("time_to_first_token:200", 3),  # the bound itself is met
        ("request_latency:1200", 3),
        ("inter_token_latency:100", 1),  # a single token has none, and meets none
        ("output_token_throughput_per_user:4", 2),
        ("time_to_first_token:200 inter_token_latency:250", 2),
        ("time_to_first_token:100 inter_token_latency:50", 0),
    ],
)
def test_goodput_by_hand(objectives: str, good: int) -> None:
    """Ten tokens in 1 s after 0.2 s; five in 1 s after 0.1 s; one; one that the server did not stream; one lost."""
    rows = (request(11, 0.2, 1.2), request(5, 0.1, 1.1), request(1, 0.1, 0.1), request(11, None, 9.0))
    found = goodput(samples.point("dflash", 4, 1, 14, rows=rows, failed=1), parse_objectives(objectives))
    assert (found.good, found.sent) == (good, 5)
    assert found.per_second == pytest.approx(good / 2)  # 28 tokens at 14 a second


@pytest.mark.parametrize(
    "text", ["", "ttft:200", "time_to_first_token", "time_to_first_token:x", "request_latency:0", "request_latency:nan",
             "request_latency:1 request_latency:2"],
)  # fmt: skip
def test_objectives_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--goodput: "):
        parse_objectives(text)


@pytest.mark.full
def test_nothing_of_the_page_is_cut_at_960_and_390(tmp_path: Path) -> None:
    """In a real browser: no table is wider than the page."""
    from tests.runtime.server.test_page import WIDER, chromium, set_size

    run("bench", "report", FIXTURE, "-o", tmp_path / "report", "--goodput", "request_latency:1000")
    cut = "return [...document.querySelectorAll('.wide')].filter(e => e.scrollWidth > e.clientWidth).length"
    with chromium() as window:
        for width in (960, 390):
            set_size(window, width, 1000)
            window.get((tmp_path / "report" / "report.html").as_uri())
            assert window.execute_script("return document.querySelectorAll('.wide').length") > 6
            assert (window.execute_script(WIDER), window.execute_script(cut)) == (False, 0), width
