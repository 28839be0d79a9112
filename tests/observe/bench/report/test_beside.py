# SPDX-License-Identifier: Apache-2.0
"""`bench report --beside`: figures beside published rows where they can be compared, and else the reason."""

from pathlib import Path

import click
import msgspec
import pytest

from dflash_trt.observe.bench.report.bench_report import report
from dflash_trt.observe.bench.report.beside import beside_table
from dflash_trt.observe.bench.report.published_rows import published_sets
from dflash_trt.observe.bench.report.workloads import LoadedRun, load_runs
from tests.cli.commands import run_here
from tests.paths import FIXTURES

RUN = FIXTURES / "bench-run"


def renamed(model: str, prompt_set: str, **request: object) -> LoadedRun:
    """The recorded run as one of another target and prompt set."""
    (loaded,) = load_runs([RUN])
    methods = tuple(msgspec.structs.replace(method, model=model) for method in loaded.run.methods)
    run = msgspec.structs.replace(
        loaded.run, methods=methods, prompt_set=msgspec.structs.replace(loaded.run.prompt_set, name=prompt_set),
        request=msgspec.structs.replace(loaded.run.request, **request), server="1 x B200",
    )  # fmt: skip
    return LoadedRun(loaded.directory, run, loaded.points)


def test_rows_of_the_same_target_prompts_and_concurrency() -> None:
    loaded = renamed("Qwen/Qwen3-8B-FP8", "math500", template="chat", thinking="off")
    found = report([loaded], 0, published=published_sets()["paper"])
    measured = [each for each in found.beside if each.measured is not None]
    tables = [f"Table {table}, T {temperature}" for table in (1, 2) for temperature in (0, 1)]
    at = [(each.row.table, each.row.concurrency) for each in measured]
    assert at == [*((table, 1) for table in tables), ("Table 3", 1), ("Table 3", 4), ("Table 3", 8)]
    sweep = {row.concurrency: row.by_method["dflash"] for row in found.workloads[0].sweep}
    assert all(each.measured == sweep[each.row.concurrency] for each in measured)
    where = "where: 1 x B200, dflash-trt"
    differs = ["", "; temperature 0", "; thinking off", "; temperature 0; thinking off", "", "", ""]
    assert [each.remark for each in measured] == [where + each for each in differs]
    reasons = {each.remark for each in found.beside if each.measured is None}
    assert reasons == {
        "prompts that bench has not, or an average of several sets", "other prompts", "no DFlash on this target",
        "no EAGLE-3 on this target", "no MTP on this target",
        *(f"not measured at {n} requests without speculation and with it" for n in (16, 32)),
    }  # fmt: skip
    table = beside_table(found.beside, published_sets()["paper"])
    assert len(table.rows) == len(found.beside)
    assert all(len(cells) == len(table.columns) for cells in table.rows)


def test_every_row_and_method_is_put_beside() -> None:
    loaded = renamed("Qwen/Qwen3-8B", "math500")
    for name, published in published_sets().items():
        found = report([loaded], 0, published=published).beside
        assert len(found) == sum(len(row.figures()) for row in published.rows)
        assert {each.method for each in found} == {"dflash", "eagle3", *(["mtp"] if name == "paper" else [])}


def test_a_category_is_compared_with_that_category() -> None:
    loaded = renamed("gpt-oss-120b", "speed-bench-qualitative")
    points = tuple(msgspec.structs.replace(each, category="coding") for each in loaded.points)
    prompts = msgspec.structs.replace(loaded.run.prompt_set, categories=("coding",))
    run = msgspec.structs.replace(loaded.run, prompt_set=prompts)
    found = report([LoadedRun(loaded.directory, run, points)], 0, published=published_sets()["nvidia"]).beside
    assert [each.row.category for each in found if each.measured is not None] == ["coding"]


def test_a_row_whose_concurrency_is_not_stated() -> None:
    loaded = renamed("gpt-oss-120b", "speed-bench-qualitative", temperature=0.6)
    found = report([loaded], 0, published=published_sets()["nvidia"]).beside
    (dflash,) = [each for each in found if each.measured is not None]
    assert (dflash.row.table, dflash.published.speedup) == ("Table 1", 2.3)
    assert "concurrency 1; the row's is not stated; temperature 0.6; no chat template" in dflash.remark
    eagle3 = next(each for each in found if each.method == "eagle3")
    assert eagle3.remark == "no EAGLE-3 on this target"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_here("bench", "report", RUN, "-o", tmp_path / "report", "--beside", "nvidia")
    output = capsys.readouterr()
    assert "Published: NVIDIA developer blog, 2026-06-23" in output.out
    assert "Not read: Table 1's other categories" in " ".join(output.err.split())
    for name in ("report.md", "report.html"):
        assert "google/gemma-4-31B-it" in (tmp_path / "report" / name).read_text()
    with pytest.raises(click.UsageError, match="relative to decoding without speculation"):
        run_here("bench", "report", RUN, "-o", tmp_path / "other", "--beside", "paper", "--reference", "dflash")
