# SPDX-License-Identifier: Apache-2.0
"""Admission control: how many sequences of each client run or wait, and how much memory their answers may take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil

from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.runtime.server.http_error import HttpError

PROMPT_TOKEN_BYTES = 128
"""Bytes of a prompt's token, which each of its answers copies."""
TOKEN_BYTES = 1024
"""Bytes of an output token, its text and its step."""
LOGPROB_BYTES = 384
"""Bytes of a token's log probability, with the token's text."""
STEP_TOKEN_BYTES = 512
"""Bytes of a token that `return_steps` lists."""
OTHERS_SHARE = 8
"""Reciprocal of the share of places that one client leaves to others."""


def answer_bytes(num_prompt_tokens: int, max_tokens: int, params: SamplingParams, num_step_tokens: int = 0) -> int:
    """Most bytes of one answer; `num_step_tokens` are listed for each step, of which each may emit one token.

    Each constant is above what tracemalloc counts for CPython 3.11; most of it is the answer as objects, before it is
    encoded as JSON.
    """
    logprobs = (1 + params.top_logprobs) * LOGPROB_BYTES
    per_prompt_token = PROMPT_TOKEN_BYTES + logprobs * bool(params.prompt_logprobs)
    per_token = TOKEN_BYTES + logprobs * bool(params.logprobs) + num_step_tokens * STEP_TOKEN_BYTES
    return num_prompt_tokens * per_prompt_token + max_tokens * per_token


class ClientCounter:
    """Counts what is in use, by all clients and by each."""

    def __init__(self) -> None:
        self.active = 0
        self.by_client: Counter[str] = Counter()

    @contextmanager
    def _counted(self, client: str, number: int) -> Iterator[None]:
        """Counts `number` until the block ends."""
        self.active += number
        self.by_client[client] += number
        try:
            yield
        finally:
            self.active -= number
            self.by_client[client] -= number
            if not self.by_client[client]:
                del self.by_client[client]


class Admission(ClientCounter):
    """Bounds what runs or waits, in sequences or in bytes; a request beyond a bound gets 429 at once."""

    def __init__(self, limit: int, *, field: str = "n", unit: str = "sequences", unit_size: int = 1) -> None:
        """`field` of a request, and `unit` of `unit_size`, are for error messages."""
        super().__init__()
        self.limit = limit
        self.limit_per_client = limit - limit // OTHERS_SHARE
        self._field, self._unit, self._unit_size = field, unit, unit_size

    @contextmanager
    def admit(self, number: int, client: str) -> Iterator[None]:
        """Holds the places of one request until the block ends."""
        sizes = (self.limit_per_client, number, self.active, self.limit, self.by_client[client])
        most, asked, active, limit, of_client = (ceil(size / self._unit_size) for size in sizes)
        if number > self.limit_per_client:
            message = f"{self._field}: expected at most {most} {self._unit} in one request, found {asked}"
            raise HttpError(400, message)
        if self.active + number > self.limit:
            raise overloaded(f"{active} of {limit} {self._unit} are running or queued")
        if self.by_client[client] + number > self.limit_per_client:
            raise overloaded(f"{of_client} {self._unit} of this client are running or queued")
        with self._counted(client, number):
            yield


def overloaded(reason: str) -> HttpError:
    """The 429 of a request that may be tried again."""
    message = f"server overloaded: {reason}"
    return HttpError(429, message, code="server_overloaded", headers={"retry-after": "1"})
