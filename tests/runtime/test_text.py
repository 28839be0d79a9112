# SPDX-License-Identifier: Apache-2.0
"""Text that grows token by token: in the end the tokenizer's own, cut at stop texts, and nothing ever taken back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordPiece
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from dflash_trt.api.completion import FinishReason
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.runtime import text as text_module
from dflash_trt.runtime.request import Request, append_all
from dflash_trt.runtime.step_input import NO_PROPOSALS
from dflash_trt.runtime.text import TextStream
from tests.paths import FIXTURES

TOKENIZER: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(FIXTURES / "tiny-qwen3")
"""Both fixtures have the same: byte-level BPE."""
END_OF_TEXT = 0
PROSE = "naïve café — 日本語 🙂 def f(x):\n    return x ** 2  # ok\n\n"
IDS = st.one_of(
    st.integers(0, len(TOKENIZER) - 1),
    st.integers(2, 257),  # the bytes: mostly broken UTF-8
)
TEXTS = st.text("ab \n#é日🙂\u0301\u200d\x00\xa0", max_size=12).map(lambda text: TOKENIZER(text)["input_ids"])
ID_LISTS = st.one_of(
    st.lists(IDS, max_size=40),
    TEXTS,
    st.tuples(TEXTS, st.lists(IDS, max_size=6), TEXTS).map(lambda parts: [*parts[0], *parts[1], *parts[2]]),
)


def sentencepiece_tokenizer() -> PreTrainedTokenizerBase:
    """Tokenizer like Llama 2's: spaces are ▁, the first is stripped, unknown characters fall back to bytes."""
    words = ["▁", "a", "b", "▁a", "▁ab", "ba", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(BPE({"<unk>": 0} | {w: i for i, w in enumerate(words, 1)}, [], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def word_tokenizer() -> PreTrainedTokenizerBase:
    """Joins pieces with spaces, but for those that continue a word."""
    words = ["[UNK]", "one", "two", "##s", "##ly", ".", ",", "n", "'", "do", "not"]
    tokenizer = Tokenizer(WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


OTHER_TOKENIZERS = {"sentencepiece": sentencepiece_tokenizer(), "word": word_tokenizer()}


def decode(token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase = TOKENIZER) -> str:
    return str(tokenizer.decode(token_ids, skip_special_tokens=True))


def stream(
    token_ids: Sequence[int],
    stop: Sequence[str] = (),
    tokenizer: PreTrainedTokenizerBase = TOKENIZER,
    *,
    take_every: int = 1,
) -> tuple[TextStream, list[str], int]:
    """Pushes until a stop text or the end; the stream, what was taken on the way, and the tokens it took."""
    text, pieces = TextStream(tokenizer, stop), list[str]()
    used = 0
    for used, token in enumerate(token_ids, start=1):
        is_stopped = text.push(token)
        if used % take_every == 0 and not is_stopped:
            pieces.append(text.next_text())
        if is_stopped:
            break
    text.close()
    pieces.append(text.next_text())
    return text, pieces, used


@given(ID_LISTS, st.integers(1, 4))
@settings(max_examples=60)
@example(TOKENIZER(PROSE)["input_ids"], 1)
@example([160, 161, 162], 1)
def test_the_whole_text_is_the_tokenizers(token_ids: list[int], take_every: int) -> None:
    text, pieces, used = stream(token_ids, take_every=take_every)
    assert text.text == "".join(pieces) == decode(token_ids)
    assert used == len(token_ids)
    assert text.next_text() == ""


@pytest.mark.parametrize("name", OTHER_TOKENIZERS)
@given(data=st.data())
@settings(max_examples=40)
def test_the_whole_text_is_that_of_other_tokenizers_too(name: str, data: st.DataObject) -> None:
    tokenizer = OTHER_TOKENIZERS[name]
    token_ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=20))
    text, pieces, _ = stream(token_ids, tokenizer=tokenizer)
    assert text.text == "".join(pieces)
    whole = decode(token_ids, tokenizer)
    if "\ufffd" not in whole:  # else a broken byte unmakes characters that were already out
        assert text.text == whole


def test_text_goes_on_after_bytes_that_are_none() -> None:
    """A byte that breaks a character breaks the whole run of bytes before it, which has been taken."""
    tokenizer = OTHER_TOKENIZERS["sentencepiece"]
    ids = [tokenizer.convert_tokens_to_ids(token) for token in ("a", "<0x41>", "<0xFF>", "b", "▁ab", "ba")]
    assert decode(ids, tokenizer) == "a\ufffd\ufffdb abba"
    text, pieces, _ = stream(ids, tokenizer=tokenizer)
    assert text.text == "".join(pieces)
    assert text.text.startswith("aA")
    assert text.text.endswith("abba")


def test_a_character_waits_for_its_last_byte() -> None:
    """Bytes of one that is incomplete come at the end."""
    token_ids = TOKENIZER("a🙂b")["input_ids"]
    assert len(token_ids) == 6, "one token a byte"
    _, pieces, _ = stream(token_ids)
    assert pieces == ["a", "", "", "", "🙂", "b", ""]
    _, pieces, _ = stream(TOKENIZER("a🙂")["input_ids"][:-1])
    assert pieces == ["a", "", "", "", decode(TOKENIZER("a🙂")["input_ids"][:-1])[1:]]
    assert "\ufffd" in pieces[-1]


def test_special_tokens_and_ids_beyond_the_tokenizer_have_no_text() -> None:
    """Vocabularies are padded: the target can emit ids that the tokenizer does not know."""
    before, after = TOKENIZER("x =")["input_ids"], TOKENIZER(" 1")["input_ids"]
    text, _, _ = stream([END_OF_TEXT, *before, END_OF_TEXT, *after, END_OF_TEXT])
    assert text.text == "x = 1"
    text, _, _ = stream([*before, len(TOKENIZER) + 5, *after])
    assert text.text == decode([*before, len(TOKENIZER) + 5, *after]) == "x = 1"


def first_stop(text: str, stop: Sequence[str]) -> int | None:
    return min((at for s in stop if (at := text.find(s)) >= 0), default=None)


@st.composite
def texts_with_stops(draw: st.DrawFn) -> tuple[list[int], list[str]]:
    """Tokens, and stop texts of which many occur in their text."""
    token_ids = draw(st.one_of(st.text("ab \né🙂", max_size=25).map(lambda t: TOKENIZER(t)["input_ids"]), ID_LISTS))
    whole = decode(token_ids)
    pieces = st.builds(lambda i, n: whole[i : i + n], st.integers(0, max(0, len(whole) - 1)), st.integers(1, 6))
    stop = draw(st.lists(st.one_of(pieces, st.text("ab \n", min_size=1, max_size=4)), min_size=1, max_size=3))
    return token_ids, [s for s in stop if s] or ["b"]


@given(texts_with_stops(), st.integers(1, 4))
@settings(max_examples=80)
def test_stop_texts_cut_exactly(case: tuple[list[int], list[str]], take_every: int) -> None:
    token_ids, stop = case
    text, pieces, used = stream(token_ids, stop, take_every=take_every)
    whole = decode(token_ids[:used])
    at = first_stop(whole, stop)
    assert "".join(pieces) == text.text == whole[:at]
    before = decode(token_ids[: used - 1]).rstrip("\ufffd") if used else ""
    assert first_stop(before, stop) is None, "an earlier token had completed a stop text"


@given(texts_with_stops())
@settings(max_examples=40)
def test_nothing_taken_begins_a_stop_text(case: tuple[list[int], list[str]]) -> None:
    """At no time before the end has anybody seen the beginning of what may become a stop text."""
    token_ids, stop = case
    text, taken = TextStream(TOKENIZER, stop), ""
    for token in token_ids:
        if text.push(token):
            break
        taken += text.next_text()
        assert text.text.startswith(taken)
        held = text.text[len(taken) :]
        assert any(s.startswith(held) for s in stop) or not held
        longer = [text.text[i:] for i in range(len(taken))]
        assert not any(s.startswith(end) for end in longer for s in stop), "a longer end should have been held"


@pytest.mark.parametrize(("stop", "expected"), [("\ufffd", "a"), ("a\ufffd", "")])
def test_a_stop_text_in_an_incomplete_character_ends_the_answer(stop: str, expected: str) -> None:
    token_ids = TOKENIZER("a🙂")["input_ids"][:-1]
    params = SamplingParams(max_tokens=len(token_ids), stop=stop)
    text = TextStream(TOKENIZER, params.stop_texts)
    request = Request(prompt_ids=[2], params=params, sampler=params.sampler(), stop_ids=frozenset(), text=text)
    append_all([request], [NO_PROPOSALS], [token_ids], 0.0)
    assert request.ending is FinishReason.LENGTH
    request.finish(request.ending)
    assert (request.finished, text.text, text.stopped_by) == (FinishReason.STOP, expected, stop)


def test_long_stop_texts_are_not_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 of 1,024 characters took 7 ms a token."""
    num_searched = 0
    overlap = text_module.overlap

    def counted(text: str, stop: str) -> int:
        nonlocal num_searched
        num_searched += len(text)
        return overlap(text, stop)

    monkeypatch.setattr(text_module, "overlap", counted)
    answer = PROSE * 20
    _, pieces, _ = stream(TOKENIZER(answer)["input_ids"], [" " * 1023 + "!", PROSE[:9] + "!" * 1000])
    assert "".join(pieces) == answer
    assert num_searched < 4 * 2 * len(answer)
