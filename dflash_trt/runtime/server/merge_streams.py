# SPDX-License-Identifier: Apache-2.0
"""The chunks of several sequences as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from dflash_trt.api.backend import Chunk


async def merge_streams(streams: Sequence[AsyncGenerator[Chunk, None]]) -> AsyncGenerator[tuple[int, Chunk], None]:
    """Yields the chunks of all streams as they come, each with the index of its stream; closing it closes all."""
    queue: asyncio.Queue[tuple[int, Chunk] | Exception] = asyncio.Queue()

    async def pump(index: int, stream: AsyncGenerator[Chunk, None]) -> None:
        try:
            async with aclosing(stream) as chunks:
                async for chunk in chunks:
                    queue.put_nowait((index, chunk))
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    num_open = len(streams)
    try:
        while num_open:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            num_open -= item[1].completion is not None
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
