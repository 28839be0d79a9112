# SPDX-License-Identifier: Apache-2.0
"""AIPerf's exports and the server's counts become a point; what is not there is an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_trt.errors import EndpointError
from dflash_trt.observe.bench.aiperf_export import measured_point, read_export, recorded
from dflash_trt.observe.bench.records import BenchPoint
from dflash_trt.observe.endpoints.observed_acceptance import ObservedAcceptance, drafting
from tests.observe.bench.aiperf_samples import Json, record, write_export

COUNTED = ObservedAcceptance(source="counters", how="x", counts=drafting(8, 30, 52, (8, 8, 8, 6)))


def point(folder: Path, *records: Json, max_tokens: int = 24, observed: ObservedAcceptance = COUNTED) -> BenchPoint:
    export = read_export(write_export(folder, records), {"a": "coding", "b": None}, max_tokens)
    return measured_point(export, observed, method="m", category=None, concurrency=2, seed=3)


def test_every_request_is_counted(tmp_path: Path) -> None:
    failed = [record("c", 2, error="TimeoutError"), *(record("de"[i], 3 + i, error="Bad Request") for i in range(2))]
    found = point(tmp_path, record("a", 0), record("b", 1, tokens=24, seconds=0.51), *failed, record("f", 5, tokens=1))
    requests = found.requests
    assert (requests.sent, requests.completed, requests.failed, requests.timed_out, requests.cut) == (6, 3, 2, 1, 1)
    assert requests.errors == {"timed out": 1, "400: x": 2}
    assert found.seconds == pytest.approx(0.75)  # the last began at 0.5 and took 0.25
    assert (found.input_tokens, found.output_tokens) == (42, 45)
    assert found.output_tokens_per_second == pytest.approx(60)
    assert found.ttft_seconds is not None
    assert (found.ttft_seconds.mean, found.ttft_seconds.p99) == pytest.approx((0.05, 0.05))
    assert found.itl_seconds is not None
    assert found.itl_seconds.mean == pytest.approx((0.2 / 19 + 0.46 / 23) / 2)  # one token has no time between two
    assert found.user_tokens_per_second is not None
    assert found.user_tokens_per_second.p50 == pytest.approx((19 / 0.2 + 23 / 0.46) / 2)
    assert [row.finish for row in found.rows] == [None, "length", None]
    assert [row.category for row in found.rows] == ["coding", None, None]
    assert found.rows[0].acceptance == drafting(4, 15, 26)
    assert found.acceptance.tau_of_drafting_passes == (30 + 8) / 8


def test_nothing_came(tmp_path: Path) -> None:
    found = point(tmp_path, record("a", 0, error="TimeoutError"))
    assert (found.requests.completed, found.output_tokens, found.ttft_seconds) == (0, 0, None)


def test_answers_tell_what_the_server_does_not(tmp_path: Path) -> None:
    hidden = ObservedAcceptance(source="not published", how="no /metrics")
    told = point(tmp_path, record("a", 0), record("b", 1), record("c", 2, error="x"), observed=hidden).acceptance
    assert (told.source, told.counts) == ("per request", drafting(8, 30, 52))
    silent = record("b", 1)
    del silent["spec_decode_acceptance"]
    assert point(tmp_path, record("a", 0), silent, observed=hidden).acceptance.why == "no /metrics"


def test_what_is_kept_of_acceptance() -> None:
    hidden = recorded(ObservedAcceptance(source="not published", how="because"))
    assert (hidden.source, hidden.why) == ("not published", "because")
    kept = recorded(ObservedAcceptance(source="counters", how="kept", counts=drafting(20, 50, None)))
    assert (kept.source, kept.tau_of_drafting_passes, kept.how, kept.counts) == ("gauges", 3.5, "kept", None)
    sampled = recorded(ObservedAcceptance(source="gauges", how="sampled", sampled_tau=2.5))
    assert (sampled.source, sampled.tau_of_drafting_passes) == ("gauges", 2.5)
    plain = recorded(ObservedAcceptance(source="counters", how="x", counts=drafting(0, 0, 0, (0, 0))))
    assert (plain.source, plain.tau_of_drafting_passes, plain.counts) == ("counters", None, drafting(0, 0, 0, (0, 0)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"was_cancelled": True}, "the run was cut short"),
        ({"is_complete": False}, "the run was cut short"),
        ({"aiperf_version": None}, "expected an export of AIPerf 0.13"),
    ],
)
def test_runs_that_are_not_whole(change: Json, message: str, tmp_path: Path) -> None:
    with pytest.raises(EndpointError, match=message):
        read_export(write_export(tmp_path, [record("a", 0)], **change), {}, 24)


def test_other_units_and_names_are_refused(tmp_path: Path) -> None:
    seconds = record("a", 0)
    seconds["metrics"]["request_latency"] = {"value": 0.1, "unit": "s"}
    with pytest.raises(
        EndpointError, match=r"jsonl:1: expected an export of AIPerf 0\.13, found.*request_latency\.unit"
    ):
        read_export(write_export(tmp_path, [seconds]), {}, 24)
    uncounted = record("a", 0)
    del uncounted["metrics"]["usage_completion_tokens"]
    with pytest.raises(EndpointError, match="jsonl:1: the server did not count tokens") as error:
        read_export(write_export(tmp_path, [uncounted]), {}, 24)
    assert "include_usage" in str(error.value.hint)
    with pytest.raises(EndpointError, match="no request was recorded"):
        read_export(write_export(tmp_path, []), {}, 24)
