# SPDX-License-Identifier: Apache-2.0
"""Cancels work when its client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientDisconnected(Exception):  # noqa: N818  # an event
    """The client closed its connection."""


async def cancel_on_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """Returns the result of `work`; a disconnect before that cancels it and raises ClientDisconnected.

    The body must have been read.
    """
    task, disconnect = asyncio.ensure_future(work), asyncio.ensure_future(_await_disconnect(receive))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        for each in (task, disconnect):
            each.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


async def _await_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
