# SPDX-License-Identifier: Apache-2.0
"""Many streamed answers at once through a frontend, and the texts of single runs that they must equal."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.llm import LLM
from tests.runtime.dynamo.cluster import PATIENCE, Cluster
from tests.runtime.dynamo.conftest import TARGET

MAX_TOKENS = 150


class Stream:
    """One streamed answer, as far as it has come."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.text = ""
        self.num_chunks = 0
        self.finish_reason: str | None = None
        self.problems: list[str] = []
        """Lines that are neither text nor its end, and a connection that broke."""
        self._body = body | {"stream": True}

    async def read(self, client: httpx.AsyncClient, url: str) -> None:
        try:
            await self._read(client, url)
        except httpx.TransportError as error:
            self.problems.append(repr(error))

    async def _read(self, client: httpx.AsyncClient, url: str) -> None:
        async with client.stream("POST", f"{url}/v1/completions", json=self._body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        self.text += choice["text"]
                        self.num_chunks += 1
                        self.finish_reason = choice.get("finish_reason") or self.finish_reason
                elif line and line != "data: [DONE]":
                    self.problems.append(line)


def streamed(
    running: Cluster,
    prompts: Sequence[str],
    meanwhile: Callable[[Sequence[Stream]], Awaitable[None]] | None = None,
    max_tokens: int = MAX_TOKENS,
) -> list[Stream]:
    """All answers at once; `meanwhile` runs beside them."""

    async def main() -> list[Stream]:
        streams = [Stream(running.body(prompt, max_tokens=max_tokens)) for prompt in prompts]
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=PATIENCE, limits=limits) as client:
            work = [stream.read(client, running.url) for stream in streams]
            await asyncio.gather(*work, *([meanwhile(streams)] if meanwhile else []))
        return streams

    return asyncio.run(main())


def single_runs(engine: Path, prompts: Sequence[str], max_tokens: int = MAX_TOKENS) -> list[str]:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    with LLM(engine, TARGET, max_batch_size=16) as llm:
        return [str(each.text) for each in llm.generate(list(prompts), params)]


def check(streams: Sequence[Stream], texts: Sequence[str]) -> None:
    assert [stream.problems for stream in streams] == [[]] * len(streams)
    assert [stream.finish_reason for stream in streams] == ["length"] * len(streams)
    assert [stream.text for stream in streams] == list(texts)


async def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, "what was awaited did not come"
        await asyncio.sleep(0.005)
