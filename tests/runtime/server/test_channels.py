# SPDX-License-Identifier: Apache-2.0
"""gpt-oss's channels: what is thought, and what is said."""

from __future__ import annotations

import random

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dflash_trt.runtime.server.channels import Channels, ChannelTokens
from dflash_trt.runtime.server.hermes import CallDelta
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


def split(tokenizer: PreTrainedTokenizerBase, text: str, size: int, stop: tuple[str, ...] = ()) -> tuple[str, str]:
    tokens = ChannelTokens.read(tokenizer)
    assert tokens is not None
    channels = Channels(tokens, tokenizer, stop)
    ids = tokenizer(text)["input_ids"]
    thought = said = ""
    for begin in range(0, len(ids), size):
        part = channels.push(ids[begin : begin + size], is_last=begin + size >= len(ids))
        thought, said = thought + part[0], said + part[1]
        assert part[2] == []
    return thought, said


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_channels_are_told_apart(tokenizer: PreTrainedTokenizerBase, size: int) -> None:
    assert split(tokenizer, ANSWER, size) == (REASONING, SAID)


@pytest.mark.parametrize("size", [1, 3, 100])
def test_an_answer_that_was_cut(tokenizer: PreTrainedTokenizerBase, size: int) -> None:
    for end in ("They want", "<|end|>", "<|start|>", "assistant", "final", "def"):
        cut = ANSWER[: ANSWER.index(end) + len(end)]
        thought, said = split(tokenizer, cut, size)
        assert REASONING.startswith(thought)
        assert SAID.startswith(said)
        assert "assistant" not in thought + said


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_stop_text_ends_the_channel_it_is_in(tokenizer: PreTrainedTokenizerBase, size: int) -> None:
    assert split(tokenizer, ANSWER[: ANSWER.index(" pass")], size, ("():",)) == (REASONING, "I look.def f")


def test_without_channels_all_is_said(tokenizer: PreTrainedTokenizerBase) -> None:
    assert split(tokenizer, "def f(): pass", 2) == ("", "def f(): pass")


def test_other_tokenizers_have_none() -> None:
    assert ChannelTokens.read(AutoTokenizer.from_pretrained(FIXTURES / "tiny-qwen3")) is None


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(
    "header",
    ["<|start|>assistant<|channel|>commentary to=functions.get_time <|constrain|>json",
     "<|start|>assistant to=functions.get_time<|channel|>commentary json"],
)  # fmt: skip
def test_a_message_to_a_function_is_a_call(tokenizer: PreTrainedTokenizerBase, header: str, size: int) -> None:
    text = f"<|channel|>analysis<|message|>Hm.<|end|>{header}<|message|>{{"
    text += '"zone": "é"}<|call|>'
    tokens = ChannelTokens.read(tokenizer)
    assert tokens is not None
    channels = Channels(tokens, tokenizer, has_tools=True)
    ids = tokenizer(text)["input_ids"]
    parts = [channels.push(ids[i : i + size], is_last=i + size >= len(ids)) for i in range(0, len(ids), size)]
    assert ["".join(part[i] for part in parts) for i in (0, 1)] == ["Hm.", ""]  # type: ignore[misc]
    begin, *deltas = [call for part in parts for call in part[2]]
    assert begin == CallDelta("get_time", "")
    assert "".join(delta.arguments for delta in deltas) == '{"zone": "é"}'
    assert len(deltas) > 3 or size > 3
    assert not channels.has_open_call


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_call_that_was_cut_is_open(tokenizer: PreTrainedTokenizerBase, size: int) -> None:
    tokens = ChannelTokens.read(tokenizer)
    assert tokens is not None
    ids = tokenizer('<|channel|>commentary to=functions.get_time json<|message|>{"zone": "utc')["input_ids"]
    channels = Channels(tokens, tokenizer, ("utc",), has_tools=True)
    parts = [channels.push(ids[i : i + size], is_last=i + size >= len(ids)) for i in range(0, len(ids), size)]
    assert "".join(call.arguments for part in parts for call in part[2]) == '{"zone": "'
    assert channels.has_open_call


def test_pieces_change_nothing(tokenizer: PreTrainedTokenizerBase) -> None:
    """Of 300 answers of control tokens, headers and random tokens in any order."""
    tokens = ChannelTokens.read(tokenizer)
    assert tokens is not None
    control: list[int] = tokenizer.convert_tokens_to_ids(HARMONY)
    texts = ["<|channel|>commentary to=functions.f json<|message|>", "<|channel|>analysis<|message|>", *HARMONY]
    parts: list[list[int]] = [tokenizer(text)["input_ids"] for text in texts]
    picked = random.Random(1)
    for _ in range(300):
        noise = [[picked.randrange(min(control)) for _ in range(picked.randint(1, 12))] for _ in range(8)]
        ids = [token for part in picked.choices(parts + noise, k=picked.randint(1, 6)) for token in part]
        assert len({str(_parse(tokens, tokenizer, ids, size)) for size in (1, 2, 5, 1000)}) == 1, ids


def _parse(tokens: ChannelTokens, tokenizer: PreTrainedTokenizerBase, ids: list[int], size: int) -> list[object]:
    channels, texts, calls = Channels(tokens, tokenizer, has_tools=True), ["", ""], [""]
    for i in range(0, len(ids), size):
        *added, deltas = channels.push(ids[i : i + size], is_last=i + size >= len(ids))
        texts = [text + more for text, more in zip(texts, added, strict=True)]  # type: ignore[operator]
        for delta in deltas:
            calls += [delta.name] if delta.name is not None else []
            calls[-1] += delta.arguments
    return [texts, calls, channels.has_open_call, channels.num_reasoning_tokens]
