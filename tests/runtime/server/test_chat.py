# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt chat`: in a pipe one message, on a terminal a conversation."""

from __future__ import annotations

import os
import pty
import re
import subprocess
from pathlib import Path
from typing import TextIO

import pytest
from transformers import AutoTokenizer

from dflash_trt.api.completion import Completion
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.cli.chat import shown
from dflash_trt.llm import LLM
from tests.cli.commands import run
from tests.engines import trained_engine
from tests.fixtures_data import without_template
from tests.paths import FIXTURES

PARAMS = SamplingParams(max_tokens=12)


def chat(engine: Path, target: Path, message: bytes | TextIO, *options: str) -> subprocess.CompletedProcess[str]:
    return run("chat", engine, "--target", target, "--max-tokens", 12, *options, stdin=message)


def test_a_pipe_is_one_message(engine: Path, chat_target: Path, llm: LLM) -> None:
    result = chat(engine, chat_target, b"def f(\n")
    answer = llm.chat([{"role": "user", "content": "def f("}], PARAMS)[0]
    assert (result.returncode, result.stdout) == (0, f"{answer.text}\n")
    # the length of a draft follows measured times
    assert re.search(r"12 tokens, tau \d\.\d\d, \S+ tokens/s; cut at --max-tokens 12\n", result.stderr)


@pytest.mark.parametrize("name", ["tiny-qwen3", pytest.param("tiny-gpt-oss", marks=pytest.mark.full)])
def test_answers_end_by_themselves(name: str) -> None:
    """In the fixtures' own template; they were trained to (tools/train_fixtures/turns.py)."""
    messages = ["Sort a list in Python.", "def a(", "What is 2 + 2?", "import os", "Who wrote Python?"]
    with LLM(trained_engine(name), FIXTURES / name) as llm:
        chats = [[{"role": "user", "content": text}] for text in messages]
        chats.append([*chats[0], {"role": "assistant", "content": "# no"}, *chats[1]])
        answers = llm.chat(chats, SamplingParams(max_tokens=200))
        assert [answer.finish_reason for answer in answers] == ["stop"] * len(chats)
        assert all(answer.text.strip() for answer in answers)
        assert not any("<|" in answer.text for answer in answers)


def test_nothing_to_say(engine: Path, chat_target: Path) -> None:
    result = chat(engine, chat_target, b" \n")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("error: stdin: expected a message, found nothing\n\nhint: dflash-trt chat --help")


def test_a_target_without_a_template(engine: Path, tmp_path: Path) -> None:
    result = chat(engine, without_template("tiny-gpt-oss", tmp_path), b"x")
    assert result.returncode == 1
    assert result.stderr.startswith("error: chat: expected a tokenizer with a chat template, found none\n")


def test_a_terminal_is_a_conversation(engine: Path, llm: LLM) -> None:
    target = FIXTURES / "tiny-gpt-oss"
    tokenizer = AutoTokenizer.from_pretrained(target)
    first, second = {"role": "user", "content": "1+1"}, {"role": "user", "content": "hi"}

    def answer(*messages: dict[str, str]) -> Completion:
        prompt = tokenizer.apply_chat_template([*messages], add_generation_prompt=True, return_dict=False)
        return llm.generate([prompt], PARAMS)[0]

    one = answer(first)
    two = answer(first, {"role": "assistant", "content": one.text}, second)
    answers = [one, two, one, answer({"role": "system", "content": "Be terse."}, first)]
    assert len({each.text for each in answers}) == 3
    parent, child = pty.openpty()
    os.write(parent, b"1+1\n/nothing\nhi\n/stats\n/help\n/reset\n1+1\n/system Be terse.\n/system\n1+1\n/quit\n")
    with os.fdopen(child) as terminal:
        result = chat(engine, target, terminal)
    os.close(parent)
    assert result.returncode == 0, result.stderr
    assert result.stdout.replace("> ", "") == "".join(f"{each.text}\n" for each in answers)
    cost = r"{} tokens, tau \d\.\d\d, \S+ tokens/s.*\n"
    costs = [cost.format(len(each.token_ids)) for each in answers]
    assert re.search(
        rf"{costs[0]}/nothing: expected one of /help, /system, /reset, /stats, /quit\n{costs[1]}"
        rf"2 answers, {cost.format(len(one.token_ids) + len(two.token_ids))}/help +show these commands\n(/.*\n)*"
        rf"a new conversation\n{costs[2]}a new conversation\nBe terse\.\n{costs[3]}",
        result.stderr,
    )


@pytest.mark.parametrize(
    ("options", "message", "problem"),
    [
        ([], b"\xff", "stdin: expected UTF-8, found invalid start byte at byte 0"),
        (["--system", os.fsdecode(b"\xff")], b"x", "messages[0]: expected what the chat template"),
    ],
)
def test_a_message_that_is_not_utf8(
    engine: Path, chat_target: Path, options: list[str], message: bytes, problem: str
) -> None:
    result = chat(engine, chat_target, message, *options)
    assert result.returncode == 1, result.stderr
    assert f"\nerror: {problem}" in f"\n{result.stderr}"


def test_a_terminal_does_not_obey_the_model() -> None:
    parent, child = pty.openpty()
    hostile = "a\x1b]0;title\x07\tb\r\nc\x9b2J"
    with os.fdopen(child, "w") as terminal:
        assert shown(hostile, terminal) == "a\\x1b]0;title\\x07\tb\\r\nc\\x9b2J"
    with Path(os.devnull).open("w") as pipe:
        assert shown(hostile, pipe) == hostile
    os.close(parent)
