# SPDX-License-Identifier: Apache-2.0
"""Calls in Hermes's format, however an answer is cut into pieces."""

from __future__ import annotations

import random

import pytest

from dflash_trt.runtime.server.channels import HermesParser

Calls = list[tuple[str, str]]
CALL = '{"name": "f", "arguments": {"a": 1}}'
NESTED = '{"a": {"b": ["}", "\\\\\\"}{"]}, "c": "</tool_call>"}'


def parse(pieces: list[str]) -> tuple[str, Calls, bool]:
    """Content, (name, arguments) of each call, and whether the last is open."""
    parser, content, calls = HermesParser(), "", []
    for i, piece in enumerate(pieces):
        added, deltas = parser.push(piece, is_last=i == len(pieces) - 1)
        content += added
        for delta in deltas:
            if delta.name is not None:
                calls.append((delta.name, ""))
            assert delta.name is not None or delta.arguments
            calls[-1] = (calls[-1][0], calls[-1][1] + delta.arguments)
    return content, calls, parser.has_open_call


def cut(text: str, size: int) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [("Hi <b> there", "Hi <b> there", []), (f"<tool_call>\n{CALL}\n</tool_call>", "", [("f", '{"a": 1}')]),
     (f"Let me see.\n<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>\n", "Let me see.",
      [("f", '{"a": 1}')] * 2),
     (f"<tool_call>{CALL}", "", [("f", '{"a": 1}')]), (f"<tool_call>{CALL} x ", "x", [("f", '{"a": 1}')]),
     (f"<tool_call>{CALL}\n</tool", "", [("f", '{"a": 1}')]),
     ("<tool_call>{x}</tool_call> x", "<tool_call>{x}</tool_call> x", []),
     ("a <tool_call>{", "a <tool_call>{", []), ("a <tool_ca", "a <tool_ca", []), (" \n", " \n", []),
     ('<tool_call>["f"]</tool_call>', '<tool_call>["f"]</tool_call>', []),
     ('<tool_call>{"name": "f", "arguments": 5}', '<tool_call>{"name": "f", "arguments": 5}', []),
     ('<tool_call>{"arguments": {"a" :1}, "name": "é"}</tool_call>', "", [("é", '{"a" :1}')]),
     ('<tool_call>{"name": "f"}</tool_call>x', "x", [("f", "{}")]),
     (f'<tool_call>{{"name": "f", "arguments": {NESTED}, "id": 5}}</tool_call>', "", [("f", NESTED)]),
     ('<tool_call>{"name": "f", "arguments": {"a": </tool_call> x', "x", [("f", '{"a": ')]),
     ('<tool_call>{"name": "f", "arguments": {"a": "b\n</tool_call> x', "x", [("f", '{"a": "b\n')]),
     ("<tool_call>" + "[" * 5000 + "</tool_call>", "<tool_call>" + "[" * 5000 + "</tool_call>", [])],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
@pytest.mark.parametrize("size", [1, 3, 5, 10_000])
def test_calls_and_content(text: str, content: str, calls: Calls, size: int) -> None:
    assert parse(cut(text, size)) == (content, calls, False)


def test_arguments_come_as_they_are_written() -> None:
    text = f'<tool_call>\n{{"name": "f", "arguments": {NESTED}}}\n</tool_call>'
    parser = HermesParser()
    deltas = [delta for character in text for delta in parser.push(character, is_last=False)[1]]
    assert deltas[0].name == "f"
    assert len(deltas) > len(NESTED) - 20  # held back: what may be the call's end, or half of an escape
    for end in range(text.index(NESTED) + 1, text.index(NESTED) + len(NESTED)):
        assert parse(cut(text[:end], 1)) == parse([text[:end]]) == ("", [("f", text[text.index(NESTED) : end])], True)


def test_pieces_change_nothing() -> None:
    """Of 2,000 texts made of what matters in them."""
    words = [
        "<tool_call>",
        "</tool_call>",
        '{"name": "f", "arguments": {',
        CALL,
        '"a": ',
        '"',
        "\\",
        "}",
        "]",
        "[",
        "\n",
    ]
    words += [" ", "x", "<", '{"name": ', '{"arguments": {}, "name": "g"}', "</tool", "é"]
    picked = random.Random(0)
    for _ in range(2000):
        text = "".join(picked.choices(words, k=picked.randint(1, 16)))
        assert parse(cut(text, 1)) == parse(cut(text, picked.randint(2, 9))) == parse([text]), text
