# SPDX-License-Identifier: Apache-2.0
"""`POST /paired-speed`: the verdict on the page's comparison, by the same rules as `dflash-trt try`."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from dflash_trt.api.paired_speed import Pair, paired_speed
from dflash_trt.runtime.server.http_error import HttpError, StructResponse
from dflash_trt.runtime.server.request.body import BodyReader

MAX_PAIRS = 256
MAX_BODY_BYTES = 2**16
BODIES = BodyReader(MAX_BODY_BYTES)


class Comparison(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Pairs that the page has measured, and the acceptance length of their answers."""

    pairs: Annotated[tuple[Pair, ...], msgspec.Meta(min_length=1, max_length=MAX_PAIRS)]
    acceptance_length: Annotated[float, msgspec.Meta(ge=1, le=1e6)] | None = None


async def judge_pairs(request: Request) -> Response:
    """Sentence, outcome and whether more pairs would add little; HttpError 400 for anything but a Comparison."""
    async with BODIES.read(request) as body:
        try:
            measured = msgspec.json.decode(body, type=Comparison)
        except msgspec.DecodeError as error:
            raise HttpError(400, f"body: {error}") from None
    speed = await asyncio.to_thread(paired_speed, measured.pairs, measured.acceptance_length)
    return StructResponse({"sentence": speed.sentence, "outcome": speed.outcome, "is_narrow": speed.is_narrow})
