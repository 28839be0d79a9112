# SPDX-License-Identifier: Apache-2.0
"""The speed of a server with drafts and without, alone and under load."""

from __future__ import annotations

import msgspec

from dflash_trt.errors import EndpointError
from dflash_trt.observe.diagnosis.probe_answers import prompts
from dflash_trt.observe.diagnosis.prober import OUT_OF_TIME, OutOfTimeError, Prober

BATCH = 16
ROUNDS = 5
LOAD_TOKENS = 32


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """Output tokens a second of all requests together, once for each round."""

    concurrency: int
    draft_length: int | None
    """Maximum draft tokens per step; 0 disables speculation, None leaves the choice to the server."""
    tokens_per_second: list[float]


def draft_lengths(prober: Prober, num_draft_tokens: int) -> list[int | None]:
    """Draft lengths whose speeds can be measured; None: the server's choice."""
    return [None, 0, max(1, num_draft_tokens // 2)] if prober.runtime.kind == "dflash-trt" else [None]


def speeds(prober: Prober, lengths: list[int | None]) -> tuple[list[Speed], str]:
    """Speeds of one and sixteen requests at a time, with each length in changing order; also why some are missing."""
    questions = list(prompts().short.values())
    measured: dict[tuple[int, int | None], list[float]] = {}
    why_not = ""
    try:
        for concurrency in (1, BATCH):
            for turn in range(ROUNDS + 1):
                for length in lengths if turn % 2 else lengths[::-1]:
                    asked = questions[:concurrency]
                    tokens, seconds = prober.ask_together(asked, max_tokens=LOAD_TOKENS, draft_length=length)
                    if turn > 0:  # the first warms up: graphs are captured, draft lengths found
                        measured.setdefault((concurrency, length), []).append(tokens / seconds)
    except OutOfTimeError:
        why_not = OUT_OF_TIME
    except EndpointError as error:
        if error.status != 429:
            raise
        why_not = f"the server refuses {BATCH} requests at a time"
    return [
        Speed(concurrency=concurrency, draft_length=length, tokens_per_second=rates)
        for (concurrency, length), rates in measured.items()
    ], why_not
