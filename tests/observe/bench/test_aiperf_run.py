# SPDX-License-Identifier: Apache-2.0
"""AIPerf as a process: what it is asked, that it ends, how it fails, and the point that its exports become."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_trt.errors import EndpointError, MissingDependencyError
from dflash_trt.observe.bench.aiperf_export import measured_point, read_export, recorded
from dflash_trt.observe.bench.aiperf_run import VERSION, AiperfLoad, body_fields, command, find_aiperf, run_load
from dflash_trt.observe.bench.conversation import Conversation, PromptTurn
from dflash_trt.observe.bench.records import Arrivals, BenchPoint, RequestSettings
from dflash_trt.observe.endpoints.observed_acceptance import ObservedAcceptance, drafting
from tests.observe.bench.aiperf_samples import Json, record, write_export
from tests.observe.servers.processes import until_ended

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
    assert (found.ttft_seconds.mean, found.ttft_seconds.p99) == pytest.approx((0.05, 0.05))
    assert found.itl_seconds.mean == pytest.approx((0.2 / 19 + 0.46 / 23) / 2)  # one token has no time between two
    assert found.user_tokens_per_second.p50 == pytest.approx((19 / 0.2 + 23 / 0.46) / 2)
    assert [row.finish for row in found.rows] == [None, "length", None]
    assert [row.category for row in found.rows] == ["coding", None, None]
    assert found.rows[0].acceptance == drafting(4, 15, 26)
    assert found.acceptance.tau_of_drafting_passes == (30 + 8) / 8
    found = point(tmp_path, record("a", 0, error="TimeoutError"))
    assert (found.requests.completed, found.output_tokens, found.ttft_seconds) == (0, 0, None)


def test_what_is_known_of_acceptance(tmp_path: Path) -> None:
    hidden = ObservedAcceptance(source="not published", how="no /metrics")
    told = point(tmp_path, record("a", 0), record("b", 1), record("c", 2, error="x"), observed=hidden).acceptance
    assert (told.source, told.counts) == ("per request", drafting(8, 30, 52))
    silent = record("b", 1)
    del silent["spec_decode_acceptance"]
    assert point(tmp_path, record("a", 0), silent, observed=hidden).acceptance.why == "no /metrics"
    unknown = recorded(hidden)
    assert (unknown.source, unknown.why) == ("not published", "no /metrics")
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


SETTINGS = RequestSettings(template="chat", temperature=0.0, max_tokens=64)
LOAD = AiperfLoad(
    url="http://h:1", model="m",
    prompts=[Conversation(id="a", turns=(PromptTurn("user", "x"), PromptTurn("user", "y")))],
    request=SETTINGS, concurrency=4, seed=7, timeout_seconds=30.0, api_key="secret",
)  # fmt: skip


def program(folder: Path, script: str) -> Path:
    file = folder / "aiperf"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return file


def test_what_it_is_asked() -> None:
    assert body_fields(SETTINGS, 7) == {"max_tokens": 64, "temperature": 0.0}
    thinking = RequestSettings(
        template="chat", temperature=0.6, max_tokens=9, thinking="off", ignore_eos=True, extra={"top_p": 0.9}
    )
    assert body_fields(thinking, 7) == {
        "max_tokens": 9, "temperature": 0.6, "seed": 7, "ignore_eos": True,
        "chat_template_kwargs": {"enable_thinking": False}, "top_p": 0.9,
    }  # fmt: skip
    words = command(Path("aiperf"), LOAD, Path("p"), Path("t"), Path("o"))
    assert "secret" not in " ".join(words)
    assert words[words.index("--conversation-num") + 1] == "1"
    assert json.loads(words[words.index("--extra-inputs") + 1]) == {"max_tokens": 64, "temperature": 0.0}
    assert LOAD.num_requests == 2
    assert "--request-rate" not in words
    arrivals = Arrivals(request_rate=2.5, arrival_pattern="constant")
    words = command(Path("aiperf"), replace(LOAD, arrivals=arrivals), Path("p"), Path("t"), Path("o"))
    start = words.index("--concurrency")
    assert words[start + 2 : start + 6] == ["--request-rate", "2.5", "--arrival-pattern", "constant"]
    replayed = replace(LOAD, arrivals=Arrivals(arrival_pattern="fixed-schedule"))
    words = command(Path("aiperf"), replayed, Path("p"), Path("t"), Path("o"))
    assert "--fixed-schedule" in words
    assert words[words.index("--custom-dataset-type") + 1] == "mooncake-trace"


def test_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    writes = 'cp -r "$(dirname "$0")/out/inputs" seen; env | grep -E "AIPERF_INJECTED|HF_HUB" > environment; exit 3'
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EndpointError, match="AIPerf failed: exit code 3"):
        run_load(program(tmp_path, writes), LOAD, tmp_path / "out", lambda _: None)
    assert (tmp_path / "environment").read_text() == "AIPERF_INJECTED_API_KEY=secret\n"
    turns = [{"role": "user", "text": "x"}, {"role": "user", "text": "y"}]
    assert json.loads((tmp_path / "seen" / "prompts.jsonl").read_text()) == {"session_id": "a", "turns": turns}
    assert not (tmp_path / "out" / "inputs").exists()  # whose prompts they are may forbid copies


def test_its_last_words_are_ours(tmp_path: Path) -> None:
    says = program(tmp_path, "echo '04:44 ERROR    first'; echo '04:45 ERROR    no such host'; exit 1")
    with pytest.raises(EndpointError, match="AIPerf failed: no such host") as error:
        run_load(says, LOAD, tmp_path / "out", lambda _: None)
    assert str(error.value.hint) == f"{tmp_path / 'out' / 'aiperf.log'} says more"
    with pytest.raises(EndpointError, match=r"profile_export_aiperf.json: expected a readable file"):
        run_load(program(tmp_path, "exit 0"), LOAD, tmp_path / "out", lambda _: None)


def test_it_ends_with_us(tmp_path: Path) -> None:
    """An error in our own code, or Ctrl-C: neither it nor its children go on."""
    starts = program(tmp_path, f"sleep 3600 & echo $! > {tmp_path}/child; wait")

    def interrupted(_: int) -> None:
        if (tmp_path / "child").exists() and (tmp_path / "child").read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_load(starts, LOAD, tmp_path / "out", interrupted)
    until_ended(int((tmp_path / "child").read_text()))


@pytest.mark.parametrize("on_path", [True, False])
def test_another_release_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_path: bool) -> None:
    def find(script: str) -> Path:
        file = program(tmp_path, script)
        return find_aiperf(None if on_path else file)

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for script, version in (("echo 9.9", "9.9"), ("exit 1", "no version"), (f"echo {VERSION}; exit 1", "no version")):
        with pytest.raises(MissingDependencyError, match=f"expected aiperf {VERSION}, found {version}"):
            find(script)
    assert find(f"echo {VERSION}") == tmp_path / "aiperf"


def test_without_aiperf_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MissingDependencyError, match="no aiperf is on PATH") as error:
        find_aiperf(None)
    assert f"pip install aiperf=={VERSION}" in str(error.value.hint)
