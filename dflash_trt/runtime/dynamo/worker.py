# SPDX-License-Identifier: Apache-2.0
"""Dynamo worker: a backend as an LLMEngine (dynamo.common.backend of ai-dynamo 1.6.1)."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

import msgspec
from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.metrics import register_engine_registry
from dynamo.common.backend.publisher import ComponentSnapshot, PushSource
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument, Unknown

from dflash_trt.api.backend import Chunk, DecoderMetrics
from dflash_trt.api.completion import FinishReason
from dflash_trt.api.runtime_options import RuntimeOptions
from dflash_trt.engine.signatures import TOKENS_PER_PAGE
from dflash_trt.errors import DFlashError, EngineError, RequestError
from dflash_trt.runtime.checked_pair import CheckedPair
from dflash_trt.runtime.dynamo.file_discovery import await_loss
from dflash_trt.runtime.dynamo.generate_request import read_request
from dflash_trt.runtime.kvcache.prefix_index import ROOT
from dflash_trt.runtime.server.answer.usage import completion_metrics
from dflash_trt.runtime.server.served_backend import RoutedBackend, check_room
from dflash_trt.runtime.server.telemetry.prometheus import ServerMetrics

SNAPSHOT_SECONDS = 0.1
DRAIN_POLL_SECONDS = 0.01


class DFlashWorker(LLMEngine):  # type: ignore[misc]
    """A worker for one pair of models, which are loaded when it starts."""

    def __init__(
        self,
        pair: CheckedPair,
        options: RuntimeOptions,
        served_model_name: str,
        drain_seconds: int,
        *,
        is_in_file: bool,
    ) -> None:
        self.error: DFlashError | None = None
        """Error that ended the worker, or kept it from starting."""
        self.is_leaving = False
        """Whether it has been asked to shut down."""
        self._is_in_file = is_in_file
        self._pair = pair
        self._options = options
        self._drain_seconds = drain_seconds
        self._served_model_name = served_model_name
        self._backend: RoutedBackend | None = None
        self._running: dict[str, Callable[[], None]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[DFlashWorker, Any]:
        """Never called: `dflash-trt dynamo` reads the command line."""
        raise NotImplementedError

    async def start(self, worker_id: int) -> EngineConfig:
        """Loads both models; returns their figures for the router and the planner."""
        if self.is_leaving:  # asked before Dynamo installed its handler
            signal.raise_signal(signal.SIGTERM)
        from dflash_trt.runtime.load import open_embedded  # it loads torch: seconds

        try:
            backend: RoutedBackend = await asyncio.to_thread(open_embedded, self._pair, self._options)
            self._backend = backend
            check_room(backend)
        except DFlashError as error:
            self.error = error
            raise
        self._loop = asyncio.get_running_loop()
        if self._is_in_file:
            self._tasks.append(self._loop.create_task(self._end_when_lost(worker_id)))
        self._metrics = ServerMetrics(self._served_model_name, backend)
        return EngineConfig(
            model=str(self._pair.target.directory),  # the frontend reads its tokenizer
            served_model_name=self._served_model_name,
            runtime_data={"spec_decode": {"nextn": backend.num_draft_tokens, "source": "engine"}},
            llm=LlmRegistration(
                context_length=backend.max_length,
                kv_cache_block_size=TOKENS_PER_PAGE,
                total_kv_blocks=backend.num_cache_tokens // TOKENS_PER_PAGE,
                max_num_seqs=backend.max_batch_size,
            ),
        )

    async def generate(self, request: Mapping[str, Any], context: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the answer, a chunk for each verify step."""
        backend = self._backend
        assert backend is not None
        try:
            prompt, params = read_request(request, backend.max_length)
            cancel, chunks = backend.start(prompt, params)
        except RequestError as error:
            raise InvalidArgument(str(error)) from None
        except EngineError as error:
            raise self._shut_down(error) from None
        self._running[context.id()] = cancel
        if context.is_stopped():  # too early for `abort` to find it
            cancel()
        emitted: float | None = None
        try:
            async for chunk in chunks:
                if _is_cancelled(chunk) and not context.is_stopped():
                    raise EngineShutdown("the worker ended before the answer did")  # the frontend asks another one
                emitted = self._metrics.observe_chunk(chunk, emitted)
                yield self._chunk(len(prompt), chunk)
        except EngineError as error:
            raise self._shut_down(error) from None
        finally:
            del self._running[context.id()]
            cancel()

    async def abort(self, context: Any) -> None:
        """Cancels a request whose client has gone; its slot is free before the next step."""
        if (cancel := self._running.get(context.id())) is not None:
            cancel()

    async def cleanup(self) -> None:
        """Waits for running requests, while new ones go elsewhere; then closes the backend."""
        deadline = self._drain_seconds + time.monotonic()
        while self._running and time.monotonic() < deadline:
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        for task in self._tasks:
            task.cancel()
        if self._backend is not None:
            if self.error is None and self._backend.error is not None:
                self.error = EngineError(
                    f"the decoder has failed: {self._backend.error}", hint="start the worker again"
                )
            await asyncio.to_thread(self._backend.close)

    async def health_check_payload(self) -> dict[str, Any]:
        """A prompt of one token other than the mask token."""
        mask = self._pair.manifest.draft.mask_token_id
        payload: dict[str, Any] = build_health_check_payload(int(mask == 0))
        return payload

    async def register_prometheus(self, metrics: Any) -> None:
        """Adds the metrics of the server, with acceptance, to the worker's /metrics."""
        register_engine_registry(metrics, self._metrics.registry)

    async def kv_event_sources(self) -> list[PushSource]:
        """Sources of events about cached prefixes for the router."""
        assert self._backend is not None
        backend = self._backend
        return [PushSource(on_ready=lambda publisher: backend.watch_shared_pages(KvEvents(publisher)))]

    def component_metrics_dp_ranks(self) -> list[int]:
        """Data-parallel ranks: only rank 0."""
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        """Starts publishing the load."""
        publishing = self._publish_load(publisher)
        self._loop.call_soon_threadsafe(lambda: self._tasks.append(self._loop.create_task(publishing)))

    async def _publish_load(self, publisher: Any) -> None:
        assert self._backend is not None
        total = self._backend.num_cache_tokens // TOKENS_PER_PAGE
        while True:
            metrics = self._backend.metrics()
            used = total - metrics.free_cache_tokens // TOKENS_PER_PAGE
            snapshot = ComponentSnapshot(
                kv_used_blocks=used,
                kv_total_blocks=total,
                gpu_cache_usage=used / total,
                kv_cache_hit_rate=_hit_rate(metrics),
                dp_rank=0,
            )
            publisher.publish(0, snapshot)
            await asyncio.sleep(SNAPSHOT_SECONDS)

    async def _end_when_lost(self, worker_id: int) -> None:
        if (lost := await await_loss(worker_id, lambda: self.is_leaving)) is not None:
            self.error = lost
            signal.raise_signal(signal.SIGTERM)

    def _chunk(self, num_prompt_tokens: int, chunk: Chunk) -> dict[str, Any]:
        document: dict[str, Any] = {"token_ids": chunk.token_ids, "index": 0}
        if chunk.logprobs is not None:
            document["log_probs"] = chunk.logprobs
        if (completion := chunk.completion) is not None:
            num_tokens = len(completion.token_ids)
            self._metrics.observe_completion(num_prompt_tokens, completion)
            document["finish_reason"] = str(completion.finish_reason)
            document["completion_usage"] = {
                "prompt_tokens": num_prompt_tokens,
                "completion_tokens": num_tokens,
                "total_tokens": num_prompt_tokens + num_tokens,
                "prompt_tokens_details": {"cached_tokens": completion.num_cached_tokens},
            }
            assert self._backend is not None
            metrics = completion_metrics(completion, self._backend.num_draft_tokens)
            document["engine_data"] = {"metrics": msgspec.to_builtins(metrics)}
        return document

    def _shut_down(self, error: EngineError) -> Exception:
        """The error for the frontend; if the decoder has ended, the worker shuts down and the request is migrated."""
        self._metrics.observe_failure(error)
        if self._backend is not None and self._backend.is_alive:
            return Unknown(str(error))  # type: ignore[no-any-return]
        signal.raise_signal(signal.SIGTERM)
        return EngineShutdown(str(error))  # type: ignore[no-any-return]


def _is_cancelled(chunk: Chunk) -> bool:
    return chunk.completion is not None and chunk.completion.finish_reason == FinishReason.CANCELLED


def _hit_rate(metrics: DecoderMetrics) -> float | None:
    return metrics.prefix_cache_hits / metrics.prefix_cache_queries if metrics.prefix_cache_queries else None


class KvEvents:
    """Publishes shared pages as Dynamo's KV events; the number of an entry is the hash of its block."""

    def __init__(self, publisher: Any) -> None:
        self._publisher = publisher

    def stored(self, number: int, before: int, token_ids: Sequence[int]) -> None:
        """Publishes a page that prompts can reuse."""
        parent = None if before == ROOT else before
        self._publisher.publish_stored(list(token_ids), [len(token_ids)], [number], parent)

    def removed(self, number: int) -> None:
        """Publishes that a page was evicted."""
        self._publisher.publish_removed([number])
