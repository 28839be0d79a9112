# SPDX-License-Identifier: Apache-2.0
"""Requests on an event loop of their own: each is answered as its runtime goes on, and none waits for another's end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Protocol

from dflash_trt.errors import RequestError
from dflash_trt.runtime.backend import Backend
from dflash_trt.runtime.metrics import DecoderMetrics
from dflash_trt.triton.model_file import TritonConfig
from dflash_trt.triton.request_inputs import RequestInputs, is_stop, read_inputs
from dflash_trt.triton.response import response_tensors

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Call(Protocol):
    """One request of Triton's, and the way back to who sent it."""

    request_id: str

    def tensors(self) -> Mapping[str, npt.NDArray[np.generic]]:
        """The inputs that were given, by name."""

    def send(self, tensors: Mapping[str, npt.NDArray[np.generic]], *, final: bool) -> None:
        """One response."""

    def fail(self, error: BaseException) -> None:
        """The last response, an error."""

    def is_cancelled(self) -> bool:
        """Whether nobody waits for the answer any more."""


class Service:
    """Answers calls until it is closed."""

    def __init__(
        self, backend: Backend, config: TritonConfig, publish: Callable[[DecoderMetrics | None], None]
    ) -> None:
        """`publish` is called with the backend's readings, at each check and before each last response."""
        self._backend = backend
        self._publish = publish
        self._config = config
        self._running: dict[asyncio.Task[None], Call] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="dflash-trt triton", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._watch(), self._loop)

    def submit(self, call: Call) -> None:
        """Answers `call` in the background."""
        self._loop.call_soon_threadsafe(self._start, call)

    def close(self) -> None:
        """Ends every call with an error, then the backend."""
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
        """Every call gets its last response here, whatever happens."""
        try:
            tensors = call.tensors()
            if is_stop(tensors):
                raise self._stop(call.request_id)
            await self._answer(call, read_inputs(tensors))
        except (Exception, asyncio.CancelledError) as error:
            call.fail(error)

    async def _answer(self, call: Call, inputs: RequestInputs) -> None:
        streaming = inputs.streaming
        if streaming and not self._config.decoupled:
            raise RequestError("streaming: expected false, which is all that a repository written with --unary serves")
        deltas = streaming and self._config.stream_deltas
        text = inputs.prompt if inputs.echo else ""
        stream = self._backend.stream(inputs.prompt, inputs.params, incremental=streaming)
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                text += chunk.text
                is_last = chunk.completion is not None
                if is_last:
                    self._publish(self._backend.metrics())  # who has the answer finds it counted
                if is_last or (streaming and chunk.text):
                    shown = chunk.text if deltas else text
                    call.send(response_tensors(shown, chunk.completion, inputs.returns), final=is_last)

    def _stop(self, request_id: str) -> BaseException:
        """Cancels the calls with this id; the call that asks for it has no other answer than what is returned."""
        if not request_id:
            return RequestError("stop: expected the request id of the requests to stop, found none")
        stopped = [task for task, call in self._running.items() if call.request_id == request_id]
        stopped.remove(asyncio.current_task())  # type: ignore[arg-type]  # we run in a task
        for task in stopped:
            task.cancel()
        return asyncio.CancelledError(f"stopped {len(stopped)} requests with the id {request_id}")

    async def _watch(self) -> None:
        """Cancels what nobody waits for any more, and publishes readings."""
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
