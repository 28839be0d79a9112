# SPDX-License-Identifier: Apache-2.0
"""Serves Triton's requests concurrently, on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Protocol

from dflash_trt.api.backend import Backend, DecoderMetrics
from dflash_trt.errors import RequestError
from dflash_trt.triton.model_file import TritonConfig
from dflash_trt.triton.request_tensors import RequestInputs, check_parameters, is_stop, read_inputs
from dflash_trt.triton.response_tensors import response_tensors

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Call(Protocol):
    """One request of Triton's, with its response sender."""

    request_id: str

    def tensors(self) -> Mapping[str, npt.NDArray[np.generic]]:
        """The inputs that were given, by name."""

    def parameters(self) -> Mapping[str, object]:
        """Fields of the request that are no inputs."""

    def send(self, tensors: Mapping[str, npt.NDArray[np.generic]], *, final: bool) -> None:
        """One response."""

    def fail(self, error: BaseException) -> None:
        """The last response, an error."""

    def is_cancelled(self) -> bool:
        """Whether the client has cancelled."""


class Service:
    """Serves calls until it is closed."""

    def __init__(
        self, backend: Backend, config: TritonConfig, publish: Callable[[DecoderMetrics | None], None]
    ) -> None:
        """`publish` is called with the backend's metrics, at each cancellation check and before each final response."""
        self._backend = backend
        self._publish = publish
        self._config = config
        self._running: dict[asyncio.Task[None], Call] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="dflash-trt triton", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._watch(), self._loop)

    def submit(self, call: Call) -> None:
        """Serves `call` in the background."""
        self._loop.call_soon_threadsafe(self._start, call)

    def close(self) -> None:
        """Fails every running call, then closes the backend."""
        asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._backend.close()

    def _start(self, call: Call) -> None:
        task = self._loop.create_task(self._serve(call))
        self._running[task] = call
        task.add_done_callback(self._running.pop)

    async def _serve(self, call: Call) -> None:
        """Every call gets its final response here, whatever happens."""
        try:
            check_parameters(call.parameters())
            tensors = call.tensors()
            if is_stop(tensors):
                raise self._stop(call.request_id)
            await self._generate(call, read_inputs(tensors))
        except (Exception, asyncio.CancelledError) as error:
            call.fail(error)

    async def _generate(self, call: Call, inputs: RequestInputs) -> None:
        streaming = inputs.streaming
        if streaming and not self._config.decoupled:
            raise RequestError("streaming: expected false, because this repository was written with --unary")
        deltas = streaming and self._config.stream_deltas
        text = inputs.prompt if inputs.echo else ""
        stream = self._backend.stream(inputs.prompt, inputs.params, incremental=streaming)
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                text += chunk.text
                is_last = chunk.completion is not None
                if is_last:
                    self._publish(
                        self._backend.metrics()
                    )  # before the response, so that a client that has it finds it counted
                if is_last or (streaming and chunk.text):
                    text_output = chunk.text if deltas else text
                    call.send(response_tensors(text_output, chunk.completion, inputs.returns), final=is_last)

    def _stop(self, request_id: str) -> BaseException:
        """Cancels the calls with this id; returns the stop request's own response."""
        if not request_id:
            return RequestError("stop: missing request id of the requests to stop")
        stopped = [task for task, call in self._running.items() if call.request_id == request_id]
        stopped.remove(asyncio.current_task())  # type: ignore[arg-type]  # runs in a task
        for task in stopped:
            task.cancel()
        return asyncio.CancelledError(f"stopped {len(stopped)} requests with the id {request_id}")

    async def _watch(self) -> None:
        """Cancels calls whose client has cancelled, and publishes metrics."""
        while True:
            self._publish(self._backend.metrics())
            await asyncio.sleep(self._config.cancellation_check_period_ms / 1000)
            for task, call in list(self._running.items()):
                if call.is_cancelled():
                    task.cancel()

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
