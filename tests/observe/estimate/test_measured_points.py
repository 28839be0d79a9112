# SPDX-License-Identifier: Apache-2.0
"""A bench run in the place of the model."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from dflash_trt.errors import ConfigError
from dflash_trt.observe.bench.records import BenchPoint, RecordedAcceptance
from dflash_trt.observe.bench.run_directory import write_point, write_run
from dflash_trt.observe.estimate.measured_points import MeasuredPoint, measured_points
from tests.observe.bench import samples
from tests.observe.estimate.systems import MOE, system_of

HELD = samples.counters(10, (8, 5, 5))


def held(proposed: int) -> RecordedAcceptance:
    assert HELD.counts is not None
    return msgspec.structs.replace(HELD, counts=msgspec.structs.replace(HELD.counts, proposed=proposed))


def write(directory: Path, *points: BenchPoint, **changes: object) -> Path:
    names = list(dict.fromkeys(point.method for point in points))
    methods = tuple(samples.method(name, runtime="tensorrt-llm") for name in names)
    concurrencies = tuple(sorted({point.concurrency for point in points}))
    values: dict[str, object] = {"concurrencies": concurrencies, "methods": methods, "num_gpus": 8}
    write_run(directory, samples.run(**values | changes))
    for point in points:
        write_point(directory, point)
    return directory


def test_plain_and_dflash_are_taken_with_their_draft_lengths(tmp_path: Path) -> None:
    whole = write(
        tmp_path, samples.point("none", 4, 60, 200), samples.point("eagle3", 4, 90, 300, acceptance=HELD),
        samples.point("dflash", 4, 120, 400, acceptance=HELD), samples.point("dflash", 8, 1, 1, rows=(), failed=1),
    )  # fmt: skip
    assert measured_points(whole, system_of(MOE)).points == (MeasuredPoint(4, 0, 60.0), MeasuredPoint(4, 3, 120.0))


def test_passes_of_several_lengths_are_refused(tmp_path: Path) -> None:
    """25 drafts in 10 passes of up to 3; the last pass of an answer may be shorter."""
    varied = held(25)
    whole = write(tmp_path / "varied", samples.point("dflash", 4, 120, 400, acceptance=varied))
    with pytest.raises(ConfigError, match=r"expected passes of one draft length, found 2\.50 drafts a pass"):
        measured_points(whole, system_of(MOE))
    nearly = held(29)
    whole = write(tmp_path / "nearly", samples.point("dflash", 4, 120, 400, acceptance=nearly))
    assert measured_points(whole, system_of(MOE)).points[0].num_draft_tokens == 3


@pytest.mark.parametrize(
    "acceptance", [RecordedAcceptance(source="gauges", tau_of_drafting_passes=3.0), samples.UNPUBLISHED]
)
def test_drafts_that_nobody_counts_are_refused(tmp_path: Path, acceptance: RecordedAcceptance) -> None:
    whole = write(tmp_path, samples.point("dflash", 4, 120, 400, acceptance=acceptance))
    with pytest.raises(ConfigError, match="expected the server's counts of passes and drafts, found"):
        measured_points(whole, system_of(MOE))


def test_a_run_of_something_else_is_refused(tmp_path: Path) -> None:
    system = system_of(MOE)
    plain = samples.point("none", 4, 60, 200)
    other = samples.method("none", runtime="vllm")
    for changes, words in (
        ({"num_gpus": 4}, "expected a run on the deployment's 8 GPUs, found 4"),
        ({"methods": (other,)}, "none: expected a run of trtllm, found vllm"),
    ):
        with pytest.raises(ConfigError, match=words):
            measured_points(write(tmp_path, plain, **changes), system)
    with pytest.raises(ConfigError, match="has no point of the methods none or dflash on all prompts"):
        measured_points(write(tmp_path / "eagle", samples.point("eagle3", 4, 90, 300)), system)
