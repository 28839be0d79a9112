# SPDX-License-Identifier: Apache-2.0
"""An answer takes accepted tokens up to the first that ends it."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from dflash_trt.api.acceptance import Step
from dflash_trt.api.backend import Chunk
from dflash_trt.api.completion import FinishReason
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.engine.proposals import Proposals
from dflash_trt.runtime.answer import chunk_reporter
from dflash_trt.runtime.request import Request, append_all
from dflash_trt.runtime.text import TextStream
from tests.paths import FIXTURES

STOP = 9


def append(request: Request, token_ids: list[int], drafts: list[int], now: float) -> None:
    append_all([request], [Proposals(drafts)], [token_ids], now)


def request(max_tokens: int) -> Request:
    """One token of the answer is there."""
    params = SamplingParams(max_tokens=max_tokens, logprobs=True, top_logprobs=1)
    found = Request(prompt_ids=[1, 2], params=params, sampler=params.sampler(), stop_ids=frozenset({STOP}))
    found.logprobs, found.top_logprobs = [-1.0], [{4: -1.0}]
    append(found, [4], [], 1.0)
    return found


@pytest.mark.parametrize(
    ("max_tokens", "taken", "accepted", "ending"),
    [
        (9, [5, 6, STOP], 3, FinishReason.STOP),
        (4, [5, 6, STOP], 3, FinishReason.STOP),
        (3, [5, 6], 2, FinishReason.LENGTH),
        (2, [5], 1, FinishReason.LENGTH),
    ],
)
def test_what_follows_the_end_is_left_out(
    max_tokens: int, taken: list[int], accepted: int, ending: FinishReason
) -> None:
    """Tokens, log probabilities and the step end there; a draft and the bonus token follow the stop token."""
    found, drafts = request(max_tokens), (5, 6, STOP, 7)
    assert found.ending is None
    found.logprobs += [-2.0] * 5
    found.top_logprobs += [{5: -2.0}] * 5
    append(found, [*drafts, 8], [*drafts], 2.0)
    assert (found.token_ids, found.ending, found.finished) == ([4, *taken], ending, None)
    found.finish(ending)
    assert [len(found.logprobs), len(found.top_logprobs)] == [1 + len(taken)] * 2
    assert found.steps == [Step(token_ids=tuple(taken), proposals=drafts, accepted=accepted)]
    assert [time for time, *_ in found.answer.passes()] == [1.0, 2.0]


def test_the_token_that_completes_a_stop_text_is_the_last() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FIXTURES / "tiny-qwen3")
    digits = tokenizer.convert_tokens_to_ids(list("0123"))
    params = SamplingParams(max_tokens=9, stop="12")
    text = TextStream(tokenizer, params.stop_texts)
    found = Request(prompt_ids=[1], params=params, sampler=params.sampler(), stop_ids=frozenset(), text=text)
    append(found, digits[:1], [], 1.0)
    append(found, digits[1:], digits[1:3], 2.0)
    assert (found.token_ids, found.ending, text.text, text.stopped_by) == (digits[:3], FinishReason.STOP, "0", "12")
    assert found.steps == [Step(token_ids=tuple(digits[1:3]), proposals=tuple(digits[1:3]), accepted=2)]


def test_a_whole_block_is_taken_with_the_token_after_it() -> None:
    found = request(9)
    append(found, [5, 6], [5, 7], 2.0)
    assert (found.token_ids, found.ending) == ([4, 5, 6], None)
    assert found.steps == [Step(token_ids=(5, 6), proposals=(5, 7), accepted=1)]


def test_without_a_token_it_ends_with_an_error() -> None:
    found = request(9)
    append(found, [], [5], 2.0)
    assert (found.token_ids, found.ending, found.steps) == ([4], FinishReason.ERROR, [])


def test_a_stream_has_each_token_and_step_once() -> None:
    chunks = list[Chunk | Exception]()
    report, found = chunk_reporter(chunks.append, True), request(9)
    report(found)
    for time, token_ids in ((2.0, [5, 6]), (3.0, [7])):
        append(found, token_ids, [5], time)
        report(found)
    streamed = [chunk for chunk in chunks if isinstance(chunk, Chunk)]
    assert [chunk.token_ids for chunk in streamed] == [[4], [5, 6], [7]]
    assert [[step.token_ids for step in chunk.steps] for chunk in streamed] == [[], [(5, 6)], [(7,)]]
    assert [chunk.emitted for chunk in streamed] == [[1.0], [2.0], [3.0]]
