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
    task, has_left = asyncio.current_task(), False
    assert task is not None

    async def cancel() -> None:
        nonlocal has_left
        while (await receive())["type"] != "http.disconnect":
            pass
        has_left = True
        task.cancel()

    watcher = asyncio.ensure_future(cancel())
    try:
        return await work
    except asyncio.CancelledError:
        if not has_left or task.uncancel():  # cancelled by another, too
            raise
        raise ClientDisconnected from None
    finally:
        watcher.cancel()
