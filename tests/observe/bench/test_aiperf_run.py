# SPDX-License-Identifier: Apache-2.0
"""AIPerf as a process: what it is asked, that it ends, and how its failures are told. Its answers: the full tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_trt.errors import EndpointError, MissingDependencyError
from dflash_trt.observe.bench.aiperf_run import VERSION, AiperfLoad, body_fields, command, find_aiperf, run_load
from dflash_trt.observe.bench.data_sets import Conversation, PromptTurn
from dflash_trt.observe.bench.records import RequestSettings
from tests.observe.bench.test_child_process import await_end

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


def test_bodies() -> None:
    assert body_fields(SETTINGS, 7) == {"max_tokens": 64, "temperature": 0.0}
    thinking = RequestSettings(
        template="chat", temperature=0.6, max_tokens=9, thinking="off", ignore_eos=True, extra={"top_p": 0.9}
    )
    assert body_fields(thinking, 7) == {
        "max_tokens": 9, "temperature": 0.6, "seed": 7, "ignore_eos": True,
        "chat_template_kwargs": {"enable_thinking": False}, "top_p": 0.9,
    }  # fmt: skip


def test_the_command_tells_no_key() -> None:
    words = command(Path("aiperf"), LOAD, Path("p"), Path("t"), Path("o"))
    assert "secret" not in " ".join(words)
    assert words[words.index("--conversation-num") + 1] == "1"
    assert json.loads(words[words.index("--extra-inputs") + 1]) == {"max_tokens": 64, "temperature": 0.0}
    assert LOAD.num_requests == 2


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


def test_exports_that_are_missing(tmp_path: Path) -> None:
    with pytest.raises(EndpointError, match=r"profile_export_aiperf.json: expected a readable file"):
        run_load(program(tmp_path, "exit 0"), LOAD, tmp_path / "out", lambda _: None)


def test_it_ends_with_us(tmp_path: Path) -> None:
    """An error in our own code, or Ctrl-C: neither it nor its children go on."""
    starts = program(tmp_path, f"sleep 600 & echo $! > {tmp_path}/child; wait")

    def interrupted(_: int) -> None:
        if (tmp_path / "child").exists() and (tmp_path / "child").read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_load(starts, LOAD, tmp_path / "out", interrupted)
    await_end(int((tmp_path / "child").read_text()))


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
