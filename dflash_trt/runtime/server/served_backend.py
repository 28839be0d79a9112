# SPDX-License-Identifier: Apache-2.0
"""The backends of a server and of a Dynamo worker."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

from dflash_trt.api.backend import Backend, Chunk, DecoderMetrics, Prompt
from dflash_trt.api.sampling_params import Grammar, SamplingParams
from dflash_trt.errors import RequestError
from dflash_trt.runtime.kvcache.prefix_index import PageWatcher

if TYPE_CHECKING:
    from dflash_trt.runtime.answer import Put
    from dflash_trt.runtime.request import Request

MIN_LENGTH = 2
"""Fewest tokens of a request: one of the prompt, one of the answer."""


class Grammars(Protocol):
    """Compiles grammars over the target's vocabulary, and keeps the last ones."""

    def submit(self, grammar: Grammar) -> Future[Any]:
        """Compiles a grammar in the background; the future's RequestError says what cannot be enforced."""


class ServedBackend(Backend, Protocol):
    """A backend for many clients, with its limits and its state.

    Only the embedded runtime is one: TensorRT-LLM's executor has a server of its own.
    """

    def request(self, prompt: Prompt, params: SamplingParams, put: Put, *, incremental: bool = True) -> Request:
        """A request whose chunks, or the error that ended it, are `put` on the decoder's thread.

        There is one chunk at the end unless `incremental`. Raises RequestError for an invalid one.
        """

    def submit(self, request: Request) -> None:
        """Queues a request; EngineError when the backend is closed or has failed."""

    def cancel(self, request: Request) -> None:
        """Ends a request before the next step; one that has ended stays as it is."""

    def metrics(self) -> DecoderMetrics:
        """Current load, and totals since the start."""

    @property
    def max_batch_size(self) -> int:
        """Most requests that run at once."""

    @property
    def max_length(self) -> int:
        """Most tokens of a prompt and its answer together."""

    @property
    def unscaled_length(self) -> int | None:
        """Tokens up to which the draft's RoPE is not scaled; None where it never is."""

    @property
    def is_alive(self) -> bool:
        """Whether it takes requests: not after `close`, nor after a failure."""

    @property
    def step_seconds(self) -> float:
        """Seconds since the current step began; 0 while no request runs."""

    @property
    def error(self) -> Exception | None:
        """The failure that ended it; None if it runs, or was closed."""

    @property
    def grammars(self) -> Grammars:
        """Compiler of grammars, with which a request starts at once; RequestError where there can be none."""


class RoutedBackend(ServedBackend, Protocol):
    """A worker's backend; the router sends a prompt to the worker whose caches hold its beginning."""

    @property
    def num_cache_tokens(self) -> int:
        """Tokens that fit in the caches."""

    def watch_shared_pages(self, watcher: PageWatcher) -> None:
        """Calls `watcher`, on the decoder's thread, whenever a page becomes shared or stops being so."""

    def start(self, prompt: Prompt, params: SamplingParams) -> tuple[Callable[[], None], AsyncGenerator[Chunk, None]]:
        """Submits a request: what cancels it, and its chunks, which end with the last one even if it is cancelled."""


def check_room(backend: ServedBackend) -> None:
    """Raises RequestError where the caches hold less than the shortest request."""
    if backend.max_length < MIN_LENGTH:
        raise RequestError(
            f"cache_gib: expected room for at least {MIN_LENGTH} tokens, found {backend.max_length}",
            hint="give the caches more with --cache-gib",
        )
