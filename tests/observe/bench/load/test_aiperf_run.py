# SPDX-License-Identifier: Apache-2.0
"""AIPerf as a process: what it is asked, that it ends, how it fails, and the point that its exports become."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_trt.api.acceptance import Acceptance
from dflash_trt.errors import ConfigError, EndpointError, MissingDependencyError
from dflash_trt.observe.bench.load.aiperf_export import read_export
from dflash_trt.observe.bench.load.aiperf_run import VERSION, AiperfLoad, body_fields, command, find_aiperf, run_load
from dflash_trt.observe.bench.point_record import BenchPoint
from dflash_trt.observe.bench.prompts.conversation import Conversation, user_turns
from dflash_trt.observe.bench.run_record import Arrivals, RequestSettings
from dflash_trt.observe.endpoints.observed_acceptance import ObservedAcceptance, drafting
from tests.observe.bench.load.aiperf_samples import Json, record, write_export
from tests.observe.servers.processes import until_ended
from tests.paths import REPOSITORY

COUNTED = ObservedAcceptance(source="counters", how="x", counts=drafting(8, 30, 52, (8, 8, 8, 6)))


def point(folder: Path, observed: ObservedAcceptance = COUNTED) -> BenchPoint:
    return read_export(
        folder, observed, method="m", category=None, concurrency=2, seed=3, max_tokens=24,
        categories={"a": "coding", "b": None},
    )  # fmt: skip


def exported(folder: Path, *records: Json, **summary: object) -> Path:
    return write_export(folder, records, **summary)


def test_every_request_is_counted(tmp_path: Path) -> None:
    failed = [record("c", 2, error="TimeoutError"), *(record("de"[i], 3 + i, error="Bad Request") for i in range(2))]
    records = [record("a", 0), record("b", 1, tokens=24, seconds=0.51), *failed, record("f", 5, tokens=1)]
    found = point(exported(tmp_path, *records, good_request_count={"unit": "requests", "avg": 2.0}))
    assert (found.sent, len(found.rows), found.lost) == (6, 3, 3)
    assert found.errors == {"timed out": 1, "400: x": 2}
    assert found.output_tokens == 45
    assert [row.is_cut for row in found.rows] == [False, True, False]
    assert [row.category for row in found.rows] == ["coding", None, None]
    assert [row.seconds for row in found.rows] == pytest.approx([0.25, 0.51, 0.25])
    assert found.rows[0].acceptance == drafting(4, 15, 26)
    assert found.acceptance.tau_of_drafting_passes == (30 + 8) / 8


def test_figures_are_aiperfs(tmp_path: Path) -> None:
    found = point(exported(tmp_path, record("a", 0), good_request_count={"unit": "requests", "avg": 3.0}))
    assert (found.seconds, found.output_tokens_per_second, found.user_rate) == (0.75, 60, 75)
    assert list(found.latencies) == ["time_to_first_token", "inter_token_latency"]  # request_latency is not there
    first = found.latencies["time_to_first_token"]
    assert (first.avg, first.p50, first.p90, first.p99) == (50, 50, 100, 150)
    assert (found.good_requests, found.goodput) == (3, 4)
    assert point(exported(tmp_path, record("a", 0))).good_requests is None


def test_acceptance_of_the_answers_where_the_server_publishes_none(tmp_path: Path) -> None:
    hidden = ObservedAcceptance(source="not published", how="no /metrics")
    told = point(exported(tmp_path, record("a", 0), record("b", 1), record("c", 2, error="x")), hidden).acceptance
    assert (told.source, told.counts) == ("per request", drafting(8, 30, 52))
    silent = record("b", 1)
    del silent["spec_decode_acceptance"]
    assert point(exported(tmp_path, record("a", 0), silent), hidden).acceptance == hidden


@pytest.mark.parametrize(
    "counts",
    [drafting(10, 31, 30), *(drafting(10, 18, 30, positions) for positions in ((5, 8, 5), (11, 5, 2), (8,)))],
)  # fmt: skip
def test_counters_that_contradict_each_other_are_refused(tmp_path: Path, counts: Acceptance) -> None:
    with pytest.raises(ConfigError, match="the counts do not add up"):
        point(exported(tmp_path, record("a", 0)), ObservedAcceptance(source="counters", how="x", counts=counts))


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
        point(exported(tmp_path, record("a", 0), **change))


def test_other_units_and_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EndpointError, match=r"aiperf\.json: expected an export of AIPerf 0\.13, found.*unit"):
        point(exported(tmp_path, record("a", 0), request_latency={"unit": "s", "avg": 1, "p50": 1, "p90": 1, "p99": 1}))
    seconds = record("a", 0)
    seconds["metrics"]["request_latency"] = {"value": 0.1, "unit": "s"}
    with pytest.raises(
        EndpointError, match=r"jsonl:1: expected an export of AIPerf 0\.13, found.*request_latency\.unit"
    ):
        point(exported(tmp_path, seconds))
    uncounted = record("a", 0)
    del uncounted["metrics"]["usage_completion_tokens"]
    with pytest.raises(EndpointError, match="jsonl:1: the server did not count tokens") as error:
        point(exported(tmp_path, uncounted))
    assert "include_usage" in str(error.value.hint)
    with pytest.raises(EndpointError, match="no request was recorded"):
        point(exported(tmp_path))


SETTINGS = RequestSettings(template="chat", temperature=0.0, max_tokens=64)
LOAD = AiperfLoad(
    url="http://h:1", model="m",
    prompts=[Conversation(id="a", turns=user_turns("x", "y"))],
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
    assert not {"--request-rate", "--goodput"} & set(words)
    words = command(Path("aiperf"), replace(LOAD, goodput="request_latency:9"), Path("p"), Path("t"), Path("o"))
    assert words[words.index("--goodput") + 1] == "request_latency:9"
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
    assert not (tmp_path / "out" / "inputs").exists()  # the licence of the prompts may forbid copies


def test_its_last_words_are_ours(tmp_path: Path) -> None:
    says = program(tmp_path, "echo '04:44 ERROR    first'; echo '04:45 ERROR    no such host'; exit 1")
    with pytest.raises(EndpointError, match="AIPerf failed: no such host") as error:
        run_load(says, LOAD, tmp_path / "out", lambda _: None)
    assert str(error.value.hint) == f"{tmp_path / 'out' / 'aiperf.log'} says more"
    run_load(program(tmp_path, "exit 0"), LOAD, tmp_path / "out", lambda _: None)
    with pytest.raises(EndpointError, match=r"cannot read .*profile_export_aiperf.json"):
        point(tmp_path / "out")


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
    assert "pip install 'dflash-trt[aiperf]'" in str(error.value.hint)
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"aiperf=={VERSION}" in extras["aiperf"]
