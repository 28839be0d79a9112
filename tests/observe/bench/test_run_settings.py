# SPDX-License-Identifier: Apache-2.0
"""A run goes on with its own settings only, and says where methods differ."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from dflash_trt.errors import ConfigError
from dflash_trt.observe.bench.records import BenchRun, request_of
from dflash_trt.observe.bench.run_directory import (
    RUN_FILE,
    add_warnings,
    begin_run,
    differences,
    read_run,
    settings_warnings,
)
from tests.observe.bench import samples


def changed(run: BenchRun, **fields: object) -> BenchRun:
    return msgspec.convert({**msgspec.to_builtins(run), **fields}, BenchRun)


RUN = samples.run("none", "dflash", concurrencies=(1, 2))


def test_a_run_is_begun_and_gone_on_with(tmp_path: Path) -> None:
    assert begin_run(tmp_path / "run", RUN) == RUN
    later = changed(RUN, created="2030-01-01T00:00:00+00:00", command=["other"], warnings=["w"])
    assert begin_run(tmp_path / "run", later) == RUN  # when it was begun, and with which words, stays
    assert read_run(tmp_path / "run") == RUN


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    begin_run(tmp_path, RUN)
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


def test_other_prompts_are_another_run() -> None:
    prompt_set = {**msgspec.to_builtins(RUN.prompt_set), "sha256": "1" * 64}
    assert [text.split(":")[0] for text in differences(RUN, changed(RUN, prompt_set=prompt_set))] == [
        "prompt_set.sha256"
    ]


def test_something_else_is_not_written_into(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty, and no run of this command"):
        begin_run(tmp_path, RUN)
    assert not (tmp_path / RUN_FILE).exists()


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
        add_warnings(tmp_path, ["the server was busy"])
    assert read_run(tmp_path).warnings == (*RUN.warnings, "the server was busy")
