# SPDX-License-Identifier: Apache-2.0
"""Files of a run: written, read back, refused where they do not add up, and continued with the same settings only."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dflash_trt.errors import BuildError, ConfigError
from dflash_trt.observe.bench import run_directory
from dflash_trt.observe.bench.point_record import RequestRow
from dflash_trt.observe.bench.run_directory import (
    begin_run,
    read_point,
    read_run,
    sole_measurer,
    write_point,
    write_run,
)
from dflash_trt.observe.bench.run_record import BenchRun, differences, request_of, settings_warnings
from tests.observe.bench import samples
from tests.observe.bench.samples import counters, point, run

ADDS_UP = "acceptance: the counts do not add up"
SAMPLE = point("dflash", 2, 50.0, 90.0, acceptance=counters(10, (8, 5, 5)), failed=1)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    whole = run("none", "dflash", concurrencies=(1, 2))
    write_run(tmp_path, whole)
    points = (point("none", 1, 20.0, 15.0), SAMPLE)
    for one in points:
        write_point(tmp_path, one)
    assert read_run(tmp_path) == whole
    assert run_directory.read_points(tmp_path, whole) == points
    assert read_point(tmp_path, "none", None, 2) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["points", "run.json"]
    one = point("dflash", 1, 50.0, 40.0, category="coding")
    assert write_point(tmp_path, one) == tmp_path / "points" / "dflash" / "coding" / "c1.json"
    assert read_point(tmp_path, "dflash", "coding", 1) == one


def test_a_point_is_replaced_by_one_that_is_measured_again_and_nothing_else_is(tmp_path: Path) -> None:
    write_point(tmp_path, SAMPLE)
    write_point(tmp_path, again := point("dflash", 2, 60.0, 99.0))
    assert read_point(tmp_path, "dflash", None, 2) == again
    run_directory.point_file(tmp_path, "dflash", None, 2).write_text("somebody's notes")
    with pytest.raises(BuildError, match="already exists and is not a record of a bench run"):
        write_point(tmp_path, SAMPLE)


def test_points_and_runs_that_are_not_there(tmp_path: Path) -> None:
    write_point(tmp_path, SAMPLE).rename(run_directory.point_file(tmp_path, "dflash", None, 4))
    with pytest.raises(ConfigError, match=r"expected the point \('dflash', None, 4\), found \('dflash', None, 2\)"):
        read_point(tmp_path, "dflash", None, 4)
    with pytest.raises(ConfigError, match="No such file") as raised:
        read_run(tmp_path)
    assert raised.value.hint == "`dflash-trt bench run -o RUN` writes it"


def set_to(*path: Any) -> Callable[[dict[str, Any]], None]:
    """A change of one value: its path, then the value."""
    *parents, key, value = path

    def change(document: dict[str, Any]) -> None:
        for parent in parents:
            document = document[parent]
        document[key] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_to("errors", {"x": 0}), "errors"),
        (set_to("latencies", {"time": 1}), "latencies"),
        (set_to("rows", 0, "acceptance", {"steps": 3}), "unknown field `steps`"),
        (set_to("rows", 0, "seconds", -1), "rows"),
        (set_to("acceptance", "counts", "accepted", 31), ADDS_UP),
        (set_to("acceptance", "counts", "accepted_by_position", [5, 8, 5]), ADDS_UP),
        (set_to("acceptance", "counts", "accepted_by_position", [11, 5, 2]), ADDS_UP),
        (set_to("acceptance", "counts", "accepted_by_position", [8, 5, 4]), ADDS_UP),
        (set_to("acceptance", {"source": "gauges"}), "how"),
        (set_to("acceptance", "sampled_tau", 0.5), "sampled_tau"),
        (set_to("schema", "dflash-trt/bench/1"), "expected dflash-trt/bench/3, found 'dflash-trt/bench/1'"),
        (set_to("method", "../x"), "expected a name that can be a folder's"),
        (set_to("speed", 3), "unknown field `speed`"),
        (set_to("seconds", float("nan")), "not finite"),
    ],
)  # fmt: skip
def test_what_does_not_add_up_fails(tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str) -> None:
    file = write_point(tmp_path, SAMPLE)
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=message) as raised:
        read_point(tmp_path, "dflash", None, 2)
    assert str(file) in raised.value.message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_to("methods", []), "expected methods, and concurrencies each once"),
        (set_to("methods", 0, "name", "a/b"), "methods: expected a name that can be a folder's, found 'a/b'"),
        (set_to("concurrencies", [1, 1]), "concurrencies each once"),
        (set_to("concurrencies", [0]), "concurrencies"),
        (set_to("prompt_set", "categories", ["aiperf"]), "expected a name"),
        (set_to("num_gpus", 0), "num_gpus"),
        (set_to("request", "template", "alpaca"), "template"),
    ],
)
def test_a_run_that_cannot_be_fails(tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str) -> None:
    write_run(tmp_path, run("none"))
    document = json.loads((tmp_path / "run.json").read_text())
    change(document)
    (tmp_path / "run.json").write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=message):
        read_run(tmp_path)


def changed(run: BenchRun, **fields: object) -> BenchRun:
    return msgspec.convert({**msgspec.to_builtins(run), **fields}, BenchRun)


RUN = samples.run("none", "dflash", concurrencies=(1, 2))


def test_a_run_is_begun_and_gone_on_with(tmp_path: Path) -> None:
    with sole_measurer(tmp_path / "run"):
        assert begin_run(tmp_path / "run", RUN) == RUN
    later = changed(RUN, created="2030-01-01T00:00:00+00:00", command=["other"], warnings=["w"])
    assert begin_run(tmp_path / "run", later) == RUN  # when it was begun, and with which words, stays
    assert read_run(tmp_path / "run") == RUN
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty and holds no bench run"):
        begin_run(tmp_path, RUN)
    assert not (tmp_path / run_directory.RUN_FILE).exists()


def test_a_run_without_a_point_is_begun_anew(tmp_path: Path) -> None:
    begin_run(tmp_path, RUN)
    other = changed(RUN, goodput="request_latency:9")
    assert begin_run(tmp_path, other) == read_run(tmp_path) == other


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    begin_run(tmp_path, RUN)
    write_point(tmp_path, point("none", 1, 20.0, 15.0))
    request = {**msgspec.to_builtins(RUN.request), "temperature": 0.7}
    methods = msgspec.to_builtins(RUN.methods)
    methods[1]["runtime_version"] = "9"
    other = changed(RUN, request=request, concurrencies=[1, 2, 4], methods=methods, versions={"aiperf": "1"})
    with pytest.raises(ConfigError) as error:
        begin_run(tmp_path, other)
    for said in ("request.temperature: 0.0 there, 0.7 asked for", "concurrencies: [1,2] there, [1,2,4] asked for",
                 'methods.dflash.runtime_version: ', '"9" asked for', "versions.aiperf: "):  # fmt: skip
        assert said in error.value.message
    assert "another -o" in str(error.value.hint)
    assert list(differences(RUN, RUN)) == []
    prompt_set = {**msgspec.to_builtins(RUN.prompt_set), "sha256": "1" * 64}
    assert [text.split(":")[0] for text in differences(RUN, changed(RUN, prompt_set=prompt_set))] == [
        "prompt_set.sha256"
    ]


def test_methods_that_differ_are_named() -> None:
    methods = msgspec.to_builtins(RUN.methods)
    methods[1]["overrides"] = {"temperature": 1.0, "thinking": "on"}
    methods[1]["model"] = "another"
    found = list(settings_warnings(changed(RUN, methods=methods, concurrencies=[1, 4096])))
    first = RUN.request.temperature
    assert f"the methods differ in temperature: {first} for none, 1.0 for dflash" in found
    assert "the methods differ in thinking: nothing for none, on for dflash" in [
        text.replace('"', "") for text in found
    ]
    assert any("models of different names: another" in text for text in found)
    assert any("never keep 4096 requests going" in text for text in found)
    assert request_of(RUN.request, changed(RUN, methods=methods).methods[1]).temperature == 1.0
    assert not any("differ" in text for text in settings_warnings(RUN))


def test_warnings_are_kept_once(tmp_path: Path) -> None:
    begin_run(tmp_path, RUN)
    for _ in range(2):
        run_directory.add_warnings(tmp_path, ["the server was busy"])
    assert read_run(tmp_path).warnings == (*RUN.warnings, "the server was busy")


def test_answers_in_one_piece() -> None:
    """Half of the answers or fewer may be: a short one, or one whose tokens a single step brought."""
    whole = RequestRow(input_tokens=5, output_tokens=64, ttft_seconds=2.0, seconds=2.001)
    streamed = RequestRow(input_tokens=5, output_tokens=64, ttft_seconds=0.1, seconds=2.0)
    short = RequestRow(input_tokens=5, output_tokens=8, ttft_seconds=0.1, seconds=0.1)
    for rows, expected in (((whole, whole, streamed), True), ((whole, streamed), False), ((short, short), False)):
        assert msgspec.structs.replace(SAMPLE, rows=rows).has_unstreamed_answers == expected
