# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's files, against figures worked out by hand as its code does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_trt.observe.bench.records import RequestRow
from dflash_trt.observe.bench.specdec_files import acceptance_rate, compute_statistics, timing, write_specdec_files
from dflash_trt.observe.bench.workloads import LoadedRun
from dflash_trt.observe.endpoints.observed_acceptance import drafting
from tests.observe.bench import samples


def row(tokens: int, ttft: float, seconds: float, category: str | None = None, *counts: int) -> RequestRow:
    acceptance = drafting(counts[1], counts[0], None) if counts else None
    return RequestRow(
        input_tokens=1, output_tokens=tokens, ttft_seconds=ttft, seconds=seconds, category=category,
        acceptance=acceptance,
    )  # fmt: skip


ROWS = (row(11, 0.5, 2.5, "math", 6, 4), row(21, 0.5, 4.5, "coding", 15, 5), row(1, 1.0, 1.0, "math", 0, 0))


def test_statistics_are_texts_of_four_decimals() -> None:
    assert compute_statistics([1, 2, 3, 6]) == {
        "min": "1.0000", "max": "6.0000", "mean": "3.0000", "std": "1.8708",
        "quantiles": {"0.25": "1.7500", "0.5": "2.5000", "0.75": "3.7500"},
    }  # fmt: skip


def test_timing() -> None:
    """33 tokens at 8.25 a second; speeds of users are 10 / 2 and 20 / 4, and one token has none."""
    found = timing(samples.point("dflash", 2, 5, 8.25, rows=ROWS), num_gpus=2)
    assert found["Output TPS"] == 8.25
    assert found["Output TPS/gpu"] == 4.125
    speeds = found["Request Generation Tokens Per Second"]
    assert isinstance(speeds, dict)
    assert (speeds["mean"], speeds["std"]) == ("5.0000", "0.0000")
    assert found["TTFT Time"] == compute_statistics([0.5, 0.5, 1.0])
    assert found["Number of Output Tokens"] == compute_statistics([11, 21, 1])
    assert "Output TPS/gpu" not in timing(samples.point("dflash", 2, 5, 8.25, rows=ROWS), num_gpus=None)


def test_lengths_and_rates_follow_from_counts_by_position() -> None:
    """10 passes; 8, 5 and 5 drafts held at positions 1 to 3: lengths 1 (2), 2 (3), 4 (5); none ended at 3."""
    point = samples.point("dflash", 1, 5, 8, acceptance=samples.counters(10, (8, 5, 5)))
    found = acceptance_rate(point)
    assert found is not None
    assert found["Average_AL"] == 2.8
    assert found["Average_AL_is"] == "tau of drafting passes of the whole point, from counters"
    assert found["Acceptance_Length_Histogram"] == {"1": 2, "2": 3, "4": 5}
    assert found["Joint_Acceptance_Rate"] == {"1": 1, "2": 0.8, "4": 0.5}
    assert found["Conditional_Acceptance_Rate"] == {"1": 1, "2": 0.8, "4": 0.625}


def test_where_requests_are_counted_lengths_are_means_over_requests() -> None:
    found = acceptance_rate(samples.point("dflash", 2, 5, 8.25, rows=ROWS))
    assert found == {
        "Request_AL": {"0": {"0": 2.5}, "1": {"0": 4.0}}, "Average_AL": 3.25, "Average_AL_is": "mean over requests",
    }  # fmt: skip


def test_nothing_published_is_no_file() -> None:
    assert acceptance_rate(samples.point("none", 1, 5, 8)) is None


def test_a_folder_for_each_point_as_its_sweeps_have(tmp_path: Path) -> None:
    points = (
        samples.point("none", 1, 5, 8), samples.point("dflash", 2, 5, 8.25, rows=ROWS),
        samples.point("dflash", 4, 5, 8, rows=(), failed=1), samples.point("dflash", 1, 5, 8, category="qa"),
    )  # fmt: skip
    run = LoadedRun(tmp_path / "run", samples.run("none", "dflash", num_gpus=8, server="8x B300"), points)
    write_specdec_files(tmp_path / "out", [run])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["dflash-c2", "dflash-qa-c1", "none-c1"]
    assert sorted(path.name for path in (tmp_path / "out" / "none-c1").iterdir()) == [
        "configuration.json",
        "timing.json",
    ]
    folder = tmp_path / "out" / "dflash-c2"
    specbench = json.loads((folder / "specbench_results.json").read_text())
    assert specbench["Category_AL"] == {"coding": 4.0, "math": 2.5}
    assert len(json.loads((folder / "timing.json").read_text())) == 1
    configuration = json.loads((folder / "configuration.json").read_text())
    expected = {"concurrency": 2, "speculative_algorithm": "DFLASH", "gpu": "8x B300", "seed": 7, "tp_size": 8}
    assert configuration.items() >= expected.items()
    assert json.loads((folder / "acceptance_rate.json").read_text())[0]["Average_AL"] == pytest.approx(3.25)
