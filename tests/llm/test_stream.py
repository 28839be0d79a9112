# SPDX-License-Identifier: Apache-2.0
"""Answers step by step, on threads and on an event loop; closing a stream cancels."""

from __future__ import annotations

import asyncio

import pytest

from dflash_trt.api.completion import Completion, FinishReason
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.errors import RequestError
from dflash_trt.llm import LLM, Chunk
from tests.llm.serving import LONG, PATIENCE, PROMPTS, await_idle, greedy, within


def check_stream(chunks: list[Chunk], whole: Completion) -> None:
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
    assert all(chunk.completion is None for chunk in chunks[:-1])
    last = chunks[-1].completion
    assert last is not None
    assert (last.token_ids, last.text, last.finish_reason) == (whole.token_ids, whole.text, whole.finish_reason)
    assert len(chunks) == 1 + last.steps


@pytest.mark.parametrize(
    "params", [greedy(40), greedy(40, stop=("\n",)), greedy(1), greedy(20, temperature=1.0, seed=5)]
)
def test_a_stream_adds_up_to_the_answer(llm: LLM, params: SamplingParams) -> None:
    whole = within(lambda: llm.generate(PROMPTS[2], params)[0])
    chunks = within(lambda: list(llm.stream(PROMPTS[2], params)))
    check_stream(chunks, whole)


def test_a_stream_comes_while_it_is_made(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], LONG)
    first = within(lambda: next(stream))
    assert first.completion is None
    assert llm.metrics().running == 1
    within(stream.close)  # type: ignore[attr-defined]
    await_idle(llm)


def test_closing_a_stream_cancels_its_request(llm: LLM) -> None:
    before = llm.metrics().finished.get(FinishReason.CANCELLED, 0)
    stream = llm.stream(PROMPTS[0], LONG)
    within(lambda: [next(stream) for _ in range(3)])
    stream.close()  # type: ignore[attr-defined]
    await_idle(llm)
    assert llm.metrics().finished[FinishReason.CANCELLED] == before + 1
    unread = llm.stream(PROMPTS[0], LONG)
    unread.close()  # type: ignore[attr-defined]
    await_idle(llm)


def test_async_streams_run_together(llm: LLM) -> None:
    async def read(prompt: str, params: SamplingParams) -> list[Chunk]:
        return [chunk async for chunk in llm.stream_async(prompt, params)]

    async def read_all() -> list[list[Chunk]]:
        tasks = [read(PROMPTS[i % 4], greedy(10 + i)) for i in range(8)]
        return await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE)

    for i, chunks in enumerate(within(lambda: asyncio.run(read_all()))):
        check_stream(chunks, within(lambda i=i: llm.generate(PROMPTS[i % 4], greedy(10 + i))[0]))


def test_cancelling_an_async_task_frees_its_slot(llm: LLM) -> None:
    async def cancel_one() -> tuple[list[Chunk], bool]:
        started = asyncio.Event()

        async def read(params: SamplingParams) -> list[Chunk]:
            chunks = []
            async for chunk in llm.stream_async(PROMPTS[0], params):
                chunks.append(chunk)
                started.set()
            return chunks

        doomed = asyncio.create_task(read(LONG))
        other = asyncio.create_task(read(greedy(25)))
        await asyncio.wait_for(started.wait(), PATIENCE)
        doomed.cancel()
        chunks = await asyncio.wait_for(other, PATIENCE)
        await asyncio.wait([doomed], timeout=PATIENCE)
        return chunks, doomed.cancelled()

    chunks, was_cancelled = within(lambda: asyncio.run(cancel_one()))
    assert was_cancelled
    await_idle(llm)
    check_stream(chunks, within(lambda: llm.generate(PROMPTS[0], greedy(25))[0]))


def test_an_async_refusal_is_raised_where_it_is_awaited(llm: LLM) -> None:
    async def ask() -> None:
        async for _ in llm.stream_async([]):
            pass

    with pytest.raises(RequestError, match="empty prompt"):
        within(lambda: asyncio.run(ask()))


def test_an_event_loop_that_ends_with_a_stream_open_harms_nobody_else(llm: LLM) -> None:
    loop = asyncio.new_event_loop()
    stream = llm.stream_async(PROMPTS[0], greedy(300))

    async def read_one() -> Chunk:
        return await anext(stream)

    within(lambda: loop.run_until_complete(read_one()))
    loop.close()
    assert len(within(lambda: llm.generate(PROMPTS[1], greedy(9))[0]).token_ids) == 9
    await_idle(llm)
