# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt bench report`: what is written, and what it says where something is missing."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from dflash_trt.errors import BuildError, ConfigError
from dflash_trt.observe.bench.comparison_report import report
from dflash_trt.observe.bench.report_tables import workload_plot
from dflash_trt.observe.bench.run_directory import load_runs, write_point, write_run
from dflash_trt.observe.bench.write_report import render_report
from tests.cli.commands import run, run_here
from tests.observe.bench import samples
from tests.paths import FIXTURES, REPOSITORY


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plain from 100 to 60 tokens/s/user, DFlash from 300 to 80, EAGLE-3 at one point; one request failed."""
    directory = tmp_path_factory.mktemp("runs") / "monday"
    write_run(directory, samples.run("none", "eagle3", "dflash", concurrencies=(1, 4)))
    held = samples.counters(10, (8, 5, 5))
    for point in (
        samples.point("none", 1, 100, 80), samples.point("none", 4, 60, 200), samples.point("eagle3", 1, 150, 120),
        samples.point("dflash", 1, 300, 240, acceptance=held), samples.point("dflash", 4, 80, 400, failed=1),
    ):  # fmt: skip
        write_point(directory, point)
    return directory


@pytest.fixture(scope="module")
def written(measured: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report on it, by a command of its own."""
    output = tmp_path_factory.mktemp("reports") / "out"
    result = run("bench", "report", measured, "-o", output, "--at", "80", "--at", "200")
    assert result.returncode == 0, result.stderr
    assert "1 of 5 requests failed" in result.stderr
    assert "report.html written" in result.stdout
    return output


def test_everything_is_written_and_stands_alone(written: Path) -> None:
    names = sorted(path.name for path in written.iterdir())
    assert names == ["pareto.png", "pareto.svg", "report.html", "report.md"]
    html = (written / "report.html").read_text()
    assert not re.search(r"<script|<link|url\(|(src|srcset|href)=\"(?!data:)|https?://(?!localhost)", html)
    ElementTree.parse(written / "pareto.svg")
    text = (written / "report.md").read_text()
    assert "| 80 | 140 | not measured | 400 | - | 2.86x (2.86-2.86) |" in text
    assert "| 200 | not reached | not reached | 313 | - | - |" in text
    assert "* 200: EAGLE-3 does not reach it: its fastest point is 150 tokens/s/user at concurrency 1; plain" in text
    assert "* DFlash: from 300 tokens/s/user, 240.0 tokens/s/server (concurrency 1) to 80 tokens/s/user, 400.0" in text
    assert "| 4 | DFlash | 400 | 80.0 | 2.00x (2.00-2.00) | - | 1 |" in text
    assert "| DFlash | counters | 1 | 10 | 30 | 18 | 2.80 | 80% | 50% | 50% |" in text
    assert "monday: dflash, concurrency 4: 1 of 5 requests failed or timed out and are in no rate: HTTP 500 (1)" in text


def test_hardware_versions_command_and_seed_are_on_every_page(written: Path) -> None:
    facts = ("a CPU, 2 cores, 8 GiB", "dflash_trt 0.1.0", "dflash-trt bench run", "seed: 7", "server: not stated")
    for name in ("report.md", "report.html"):
        text = (written / name).read_text().replace("\\_", "_")
        assert [fact for fact in facts if fact not in text] == []
        assert text.count("Tau of drafting passes = (accepted drafts") == 1


def test_the_same_run_gives_the_same_report(measured: Path, written: Path) -> None:
    loaded = load_runs([measured])
    assert render_report(report(loaded, 7, (80, 200)), "markdown") == (written / "report.md").read_text()


def test_one_json_document(measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_here("bench", "report", measured, "-o", tmp_path / "out", "--json", "--at", "80")
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "dflash-trt/bench-report/1"
    assert document["workloads"][0]["at_speeds"][0]["factors"]["dflash"]["value"] == pytest.approx(400 / 140)


def test_an_older_report_is_replaced_only_when_asked_and_nothing_else_ever(measured: Path, written: Path) -> None:
    before = (written / "report.html").stat().st_ino
    with pytest.raises(BuildError, match="found one") as raised:
        run_here("bench", "report", measured, "-o", written)
    assert "--force" in str(raised.value.hint)
    assert (written / "report.html").stat().st_ino == before
    run_here("bench", "report", measured, "-o", written, "--force")
    assert (written / "report.html").stat().st_ino != before
    with pytest.raises(BuildError, match="expected a report of a bench run or none, found another directory"):
        run_here("bench", "report", measured, "-o", measured, "--force")


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        run_here("bench", "report", tmp_path, "-o", tmp_path / "out")
    assert "bench run -o RUN" in str(raised.value.hint)


def test_names_from_outside_are_no_markup(tmp_path: Path) -> None:
    nasty = samples.method("none", model="<script>alert(1)</script>|`x`\x1b[2J")
    write_run(tmp_path, samples.run(methods=(nasty,)))
    write_point(tmp_path, samples.point("none", 1, 100, 80))
    found = report(load_runs([tmp_path]), seed=7)
    markdown, html = render_report(found, "markdown"), render_report(found, "html")
    for text in (markdown, html):
        assert "<script" not in text
        assert "\x1b" not in text
    assert "\\|\\`x\\`" in markdown


def test_without_plain_decoding_the_report_says_so(tmp_path: Path) -> None:
    write_run(tmp_path, samples.run("dflash"))
    write_point(tmp_path, samples.point("dflash", 1, 100, 80))
    found = report(load_runs([tmp_path]), seed=7)
    assert found.notes == ("ours: no method named 'none', so there are no speed-ups",)
    assert "| 1 | DFlash | 80.0 | 100 | - | - | 0 |" in render_report(found, "markdown")


def test_categories_measured_one_by_one_are_table_1_with_its_average_and_no_data_set(tmp_path: Path) -> None:
    prompts = type(samples.run("none").prompt_set)(
        name="SPEED-Bench", source="x", sha256="0", num_prompts=2, categories=("coding", "math")
    )
    methods = tuple(samples.method(n, model="gpt-oss-120b", runtime="tensorrt-llm") for n in ("none", "dflash"))
    write_run(tmp_path, samples.run(methods=methods, prompt_set=prompts, server="8x B300", num_gpus=8))
    for name, rates in (("none", (10, 10)), ("dflash", (10, 20))):
        for category, rate in zip(("coding", "math"), rates, strict=True):
            write_point(tmp_path, samples.point(name, 1, rate, rate, category=category))
    text = render_report(report(load_runs([tmp_path]), seed=7), "markdown")
    assert "| coding | 1 | 5.5 | 5.5 | 1.00x (1.00-1.00) | - |" in text
    assert "| math | 1 | 5.5 | 7.3 | 1.33x (1.33-1.33) | - |\n| average |  |  |  | 1.17x | - |" in text
    assert "Data sets" not in text


def test_the_picture_in_the_docs_is_of_the_run_that_is_here() -> None:
    """After a wanted change: make bench-report"""
    found = report(load_runs([FIXTURES / "bench-run"]), seed=0)
    plot = workload_plot(found, found.workloads[0])
    root = ElementTree.parse(REPOSITORY / "docs" / "bench-pareto.svg").getroot()
    assert plot.description in [element.text for element in root.iter("{http://purl.org/dc/elements/1.1/}description")]
    cause = "users were slower than at a higher one; the machine had other work, or the run is too short"
    assert found.notes == (
        f"prompts: plain at concurrency 1, 2, 4: {cause}", f"prompts: DFlash at concurrency 2: {cause}",
    )  # fmt: skip
