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
    assert [(each.row.table, each.row.concurrency) for each in measured] == [("thinking", 1), ("serving", 1)]
    (row,) = [row for row in found.workloads[0].sweep if row.concurrency == 1]
    assert all(each.measured == row.by_method["dflash"] for each in measured)
    thinking, serving = (each.remark for each in measured)
    assert thinking == "where: 1 x B200, dflash-trt; thinking off"
    assert serving == "where: 1 x B200, dflash-trt"
    reasons = {each.remark for each in found.beside if each.measured is None}
    assert reasons == {
        "prompts that bench has not, or an average of several sets", "other prompts", "no DFlash on this target",
        "not measured at 32 requests without speculation and with it",
    }  # fmt: skip
    table = beside_table(found.beside, published_sets()["paper"])
    assert len(table.rows) == len(found.beside)
    assert all(len(cells) == len(table.columns) for cells in table.rows)


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
    assert "Table 1's rows by category" in output.err
    for name in ("report.md", "report.html"):
        assert "google/gemma-4-31B-it" in (tmp_path / "report" / name).read_text()
    with pytest.raises(click.UsageError, match="relative to decoding without speculation"):
        run_here("bench", "report", RUN, "-o", tmp_path / "other", "--beside", "paper", "--reference", "dflash")
