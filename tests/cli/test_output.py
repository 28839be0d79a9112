# SPDX-License-Identifier: Apache-2.0
"""Tables and numbers on stdout."""

import json
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dflash_trt.cli.output import print_json, print_table, resumable
from dflash_trt.runtime.progress_display import progress_bar, progress_line
from tests.paths import REPOSITORY


def test_cells_are_text_and_not_markup(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("a [bold] title", ("what", "to fix it"), [("[/x]", "pip install 'dflash-trt[run]'")])
    output = capsys.readouterr().out
    for text in ("a [bold] title", "[/x]", "pip install 'dflash-trt[run]'"):
        assert text in output


def test_control_characters_are_shown_and_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("\x1b]0;title\x07", ("what",), [("\x1b[2J\rgone",), ("kept\nlines",)])
    output = capsys.readouterr().out
    assert "\\x1b[2J\\rgone" in output
    assert not set("\x1b\r\x07") & set(output)


def test_json_is_printable_and_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["\x1b[2J", "\x9b31m", "\u202egnp", "\x7f", "ü\u2028", "\U000e0001", "模型"]
    print_json("x", {"texts": texts})
    output = capsys.readouterr().out
    assert output.replace("\n", "").isprintable()
    assert json.loads(output)["texts"] == texts


def test_nothing_is_folded_in_a_pipe(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    print_table("t", ("name",), [("x " * 300,)])
    assert "x " * 300 in capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "80")
    print_table("t", ("name",), [("x " * 300,)])
    assert "x " * 300 not in capsys.readouterr().out


@pytest.mark.parametrize(("width", "found"), [("44", 44), ("200", 48)])
def test_words_and_numbers_are_whole_at_any_width(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: str, found: int
) -> None:
    """Text and headers are folded at their spaces."""
    monkeypatch.setenv("COLUMNS", width)
    print_table("t", ("what", "tokens/s per user", "size"), [("a long-identifier of it", "12345.6", "1.5 GiB")])
    lines = capsys.readouterr().out.splitlines()
    assert {len(line) for line in lines} == {found}
    assert any("│  12345.6 │ 1.5 GiB │" in line for line in lines)
    assert any("long-identifier" in line for line in lines)


def test_rows_without_room_have_names_of_their_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    print_table("t", ("c", "method", "tokens/s"), [("1", "plain", "a-name-of-20-letters"), ("1", "DFlash", "5")])
    assert capsys.readouterr().out == (
        "t\nc 1, method plain\n  tokens/s\n  a-name-of-20-letters\nc 1, method DFlash\n  tokens/s 5\n"
    )
    print_table("t", ("field", "value"), [("a", "5"), ("a-name-of-20-letters", "5"), ("none", "")])
    assert capsys.readouterr().out == "t\na  5\na-name-of-20-letters\n  5\nnone\n"


def test_progress_in_a_log(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 10.0, 31.0, 40.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with progress_bar(3, "answers") as advance:
        for _ in range(3):
            advance()
    assert capsys.readouterr().err == "answers: 2 of 3\n"


def test_loading_is_said_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress_line("loading the target"):
        pass
    assert "loading the target" in capsys.readouterr().err


@pytest.mark.parametrize("is_begun", [True, False])
def test_an_interruption_says_where_the_command_continues(
    is_begun: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "state"
    if is_begun:
        state.touch()
    with pytest.raises(KeyboardInterrupt), resumable(state):
        raise KeyboardInterrupt
    assert (f"the same command continues from {state}\n" in capsys.readouterr().err) == is_begun


GOLDEN = REPOSITORY / "tests" / "golden" / "terminal.txt"
COMMANDS = [
    ["inspect", "tests/fixtures/tiny-qwen3-dflash", "--target", "tests/fixtures/tiny-qwen3"],
    ["inspect", "tests/fixtures/tiny-qwen3", "--target", "tests/fixtures/tiny-qwen3-dflash"],
    ["drafts"],
    ["drafts", "Qwen/Qwen3-8B"],
    ["serve-config", "--list"],
    ["serve-config", "gpt-oss-120b.b300x8.latency", "--runtime", "trtllm"],
    ["tune", "gpt-oss-120b.b300x8.latency", "--slo", "500", "--tau", "4.7"],
    ["estimate", "gemma-4-31b.h200x1.latency"],
    ["serve-config", "no-such-deployment", "--runtime", "trtllm"],
    ["bench", "report", "no-such-run", "-o", "report"],
]
SCRIPT = f"""
import fcntl, struct, sys, termios
from dflash_trt.cli import main
for width in (80, 120):
    fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    for command in {COMMANDS!r}:
        print(f"{{width}}$ dflash-trt", *command, flush=True)
        sys.argv[1:] = command
        try:
            main()
        except SystemExit as end:
            print(f"[{{end.code or 0}}]", flush=True)
"""
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def test_terminals() -> None:
    assert on_a_terminal() == GOLDEN.read_text()


def on_a_terminal() -> str:
    """Output of the commands on a pseudo terminal, without colours."""
    ours, theirs = pty.openpty()
    settings = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    # the output depends on the contents of the cache
    settings |= {"TERM": "xterm", "PYTHONUTF8": "1", "HF_HOME": os.devnull}
    command = [sys.executable, "-c", SCRIPT]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=REPOSITORY, env=settings) as process:
        os.close(theirs)
        printed = bytearray()
        while True:
            try:
                printed += os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
        process.wait(60)
    os.close(ours)
    text = ESCAPE.sub("", printed.decode()).replace("\r\n", "\n")
    return text.replace(str(REPOSITORY), "REPOSITORY")
