# SPDX-License-Identifier: Apache-2.0
"""Work for a client ends with its connection."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dflash_trt.runtime.server.disconnect import ClientDisconnected, cancel_on_disconnect
from tests.runtime.server.live import bounded


class Work:
    """Waits for ever, and notes that it was cancelled."""

    def __init__(self) -> None:
        self.has_begun = asyncio.Event()
        self.is_cancelled = False

    async def run(self) -> None:
        self.has_begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.is_cancelled = True
            raise


async def never() -> Any:
    await asyncio.Event().wait()


async def answer() -> int:
    await asyncio.sleep(0)
    return 3


@bounded
async def test_result_and_error_are_those_of_the_work() -> None:
    async def fail() -> None:
        raise KeyError("x")

    before = asyncio.all_tasks()
    assert await cancel_on_disconnect(never, answer()) == 3
    with pytest.raises(KeyError):
        await cancel_on_disconnect(never, fail())
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before, "nobody waits for a disconnect any more"


@bounded
async def test_a_disconnect_cancels_the_work_alone() -> None:
    """The handler goes on, and what it does next is not cancelled."""
    work = Work()
    messages: list[Any] = [{"type": "http.request"}, {"type": "http.disconnect"}]

    async def receive() -> Any:
        await work.has_begun.wait()
        return messages.pop(0)

    with pytest.raises(ClientDisconnected):
        await cancel_on_disconnect(receive, work.run())
    task = asyncio.current_task()
    assert task is not None
    assert (work.is_cancelled, task.cancelling()) == (True, 0)
    await asyncio.sleep(0)


@bounded
async def test_a_shutdown_cancels_work_and_handler() -> None:
    work = Work()
    handler = asyncio.create_task(cancel_on_disconnect(never, work.run()))
    await work.has_begun.wait()
    handler.cancel()
    await asyncio.gather(handler, return_exceptions=True)
    assert handler.cancelled()
    assert work.is_cancelled


@bounded
async def test_a_shutdown_is_none_the_less_one_when_the_client_leaves_too() -> None:
    work, left = Work(), asyncio.Event()

    async def receive() -> Any:
        await left.wait()
        return {"type": "http.disconnect"}

    handler = asyncio.create_task(cancel_on_disconnect(receive, work.run()))
    await work.has_begun.wait()
    left.set()
    handler.cancel()
    await asyncio.gather(handler, return_exceptions=True)
    assert handler.cancelled()
