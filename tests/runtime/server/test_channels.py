# SPDX-License-Identifier: Apache-2.0
"""gpt-oss's channels: what is thought, and what is said."""

from __future__ import annotations

import random

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dflash_trt.runtime.server.channels import Channels, ChannelTokens
from tests.paths import FIXTURES

HARMONY = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"]
ANSWER = (
    "<|channel|>analysis<|message|>They want é code.<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
    "<|end|><|start|>assistant<|channel|>final<|message|>def f(): pass<|return|>"
)
REASONING, SAID = "They want é code.", "I look.def f(): pass"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(FIXTURES / "tiny-gpt-oss")
    loaded.add_special_tokens({"additional_special_tokens": HARMONY})
    return loaded


Parsed = tuple[str, str, list[str], bool, int]


def parse(
    tokenizer: PreTrainedTokenizerBase, answer: str | list[int], size: int, stop: tuple[str, ...] = (), *,
    has_tools: bool = False,
) -> Parsed:  # fmt: skip
    """Reasoning, content, names and arguments of calls, whether the last is open, and the reasoning tokens."""
    tokens = ChannelTokens.read(tokenizer)
    assert tokens is not None
    channels = Channels(tokens, tokenizer, stop, has_tools=has_tools)
    ids = tokenizer(answer)["input_ids"] if isinstance(answer, str) else answer
    thought, said, calls = "", "", []
    for begin in range(0, len(ids), size):
        reasoning, content, deltas = channels.push(ids[begin : begin + size], is_last=begin + size >= len(ids))
        thought, said = thought + reasoning, said + content
        for delta in deltas:
            calls += [delta.name, ""] if delta.name is not None else []
            calls[-1] += delta.arguments
    return thought, said, calls, channels.has_open_call, channels.num_reasoning_tokens


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_channels_are_told_apart(tokenizer: PreTrainedTokenizerBase, size: int) -> None:
    assert parse(tokenizer, ANSWER, size)[:4] == (REASONING, SAID, [], False)
    stopped = ANSWER[: ANSWER.index(" pass")]  # a stop text ends the channel it is in
    assert parse(tokenizer, stopped, size, ("():",))[:2] == (REASONING, "I look.def f")
    for end in ("They want", "<|end|>", "<|start|>", "assistant", "final", "def"):
        thought, said, *_ = parse(tokenizer, ANSWER[: ANSWER.index(end) + len(end)], size)
        assert REASONING.startswith(thought)
        assert SAID.startswith(said)
        assert "assistant" not in thought + said


def test_without_channels_all_is_said(tokenizer: PreTrainedTokenizerBase) -> None:
    assert parse(tokenizer, "def f(): pass", 2)[:3] == ("", "def f(): pass", [])


def test_other_tokenizers_have_none() -> None:
    assert ChannelTokens.read(AutoTokenizer.from_pretrained(FIXTURES / "tiny-qwen3")) is None


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(
    "header",
    ["<|start|>assistant<|channel|>commentary to=functions.get_time <|constrain|>json",
     "<|start|>assistant to=functions.get_time<|channel|>commentary json"],
)  # fmt: skip
def test_a_message_to_a_function_is_a_call(tokenizer: PreTrainedTokenizerBase, header: str, size: int) -> None:
    text = f'<|channel|>analysis<|message|>Hm.<|end|>{header}<|message|>{{"zone": "é"}}'
    calls = ["get_time", '{"zone": "é"}']
    assert parse(tokenizer, f"{text}<|call|>", size, has_tools=True)[:4] == ("Hm.", "", calls, False)
    cut = ["get_time", '{"zone": "']  # by a stop text, inside arguments
    assert parse(tokenizer, text[:-2], size, ("é",), has_tools=True)[2:4] == (cut, True)


def test_arguments_come_as_they_are_written(tokenizer: PreTrainedTokenizerBase) -> None:
    tokens = ChannelTokens.read(tokenizer)
    assert tokens is not None
    channels = Channels(tokens, tokenizer, has_tools=True)
    ids = tokenizer('<|channel|>commentary to=functions.get_time json<|message|>{"zone": "utc"}')["input_ids"]
    assert sum(len(channels.push([token], is_last=False)[2]) for token in ids) > 4


def test_pieces_change_nothing(tokenizer: PreTrainedTokenizerBase) -> None:
    """300 answers of control tokens, headers and random tokens in any order."""
    control: list[int] = tokenizer.convert_tokens_to_ids(HARMONY)
    texts = ["<|channel|>commentary to=functions.f json<|message|>", "<|channel|>analysis<|message|>", *HARMONY]
    parts: list[list[int]] = [tokenizer(text)["input_ids"] for text in texts]
    picked = random.Random(1)
    for _ in range(300):
        noise = [[picked.randrange(min(control)) for _ in range(picked.randint(1, 12))] for _ in range(8)]
        ids = [token for part in picked.choices(parts + noise, k=picked.randint(1, 6)) for token in part]
        assert len({str(parse(tokenizer, ids, size, has_tools=True)) for size in (1, 2, 5, 1000)}) == 1, ids
