# SPDX-License-Identifier: Apache-2.0
"""Serves Triton's requests concurrently, on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from dflash_trt.api.backend import Backend, DecoderMetrics
from dflash_trt.api.completion import Completion
from dflash_trt.api.fields import NumberField
from dflash_trt.api.neutral_fields import check_neutral
from dflash_trt.api.sampling_params import OPENAI_TEMPERATURE, SAMPLER_FIELDS, SamplingParams
from dflash_trt.errors import RequestError
from dflash_trt.triton.model_file import TritonConfig

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

SAMPLING_STOP = "sampling_param_stop"
DEFAULT_MAX_TOKENS = 32  # TensorRT-LLM's
UNCHANGED_FIELDS = frozenset(SamplingParams.__struct_fields__) - {"max_tokens", "temperature", "logprobs"}
"""Settings that are taken as they are, where the model has a tensor for them."""


class RequestInputs(msgspec.Struct, frozen=True, kw_only=True):
    """One request."""

    prompt: str
    params: SamplingParams
    streaming: bool
    """Whether each step gets a response, or only the last."""
    echo: bool
    """Whether the output begins with the prompt."""
    returns: frozenset[str]
    """Which of finish_reason, stop_reason, cumulative_logprob and perf_metrics are returned."""


def read_inputs(tensors: Mapping[str, npt.NDArray[np.generic]]) -> RequestInputs:
    """Raises RequestError for invalid inputs."""
    scalars = {
        spec.name: _scalar(spec.name, tensors[spec.name])
        for spec in INPUTS
        if spec.name in tensors and spec.name not in (TEXT_INPUT, SAMPLING_STOP)
    }
    sampling = {name.removeprefix(SAMPLING): value for name, value in scalars.items() if name.startswith(SAMPLING)}
    if SAMPLING_STOP in tensors:
        sampling["stop"] = _texts(SAMPLING_STOP, tensors[SAMPLING_STOP])
    returns = {name.removeprefix("return_") for name in scalars if name.startswith("return_") and scalars[name]}
    if sampling.get("return_perf_metrics", False):
        returns.add("perf_metrics")
    streaming = bool(scalars.get("streaming", False))
    return RequestInputs(
        prompt=_prompt(tensors),
        params=_params(sampling, with_logprobs="cumulative_logprob" in returns),
        streaming=streaming,
        echo=not streaming and not sampling.get("exclude_input_from_output", True),
        returns=frozenset(returns),
    )


def _params(fields: Mapping[str, Any], *, with_logprobs: bool) -> SamplingParams:
    """SamplingParams with TensorRT-LLM's defaults: greedy unless temperature, top_k or top_p is set."""
    check_neutral("best_of", fields.get("best_of"), shown_as=f"{SAMPLING}best_of")
    is_greedy = not fields.keys() & {"temperature", "top_k", "top_p"}
    return SamplingParams(
        max_tokens=fields.get("max_tokens", DEFAULT_MAX_TOKENS),
        temperature=fields.get("temperature", 0.0 if is_greedy else OPENAI_TEMPERATURE),
        logprobs=with_logprobs,
        **{name: fields[name] for name in UNCHANGED_FIELDS if name in fields},
    )


def is_stop(tensors: Mapping[str, npt.NDArray[np.generic]]) -> bool:
    """Whether a request only stops the requests with its id."""
    return "stop" in tensors and bool(_scalar("stop", tensors["stop"]))


def _prompt(tensors: Mapping[str, npt.NDArray[np.generic]]) -> str:
    if TEXT_INPUT not in tensors:
        raise RequestError(f"{TEXT_INPUT}: missing input")
    texts = _texts(TEXT_INPUT, tensors[TEXT_INPUT])
    if len(texts) != 1 or not texts[0]:
        raise RequestError(
            f"{TEXT_INPUT}: expected one prompt, found {'an empty text' if len(texts) == 1 else len(texts)}"
        )
    return texts[0]


def _scalar(name: str, tensor: npt.NDArray[np.generic]) -> Any:
    if tensor.size != 1:
        raise RequestError(f"{name}: expected one value, found {tensor.size}")
    return tensor.item()


def _texts(name: str, tensor: npt.NDArray[np.generic]) -> tuple[str, ...]:
    try:
        return tuple(item.decode() if isinstance(item, bytes) else str(item) for item in tensor.reshape(-1).tolist())
    except UnicodeDecodeError as error:
        raise RequestError(f"{name}: expected UTF-8, found {error.reason} at byte {error.start}") from None


SAMPLING = "sampling_param_"
ANY, ONE = -1, 1


class TensorSpec(msgspec.Struct, frozen=True):
    """One input or output."""

    name: str
    data_type: str
    """Triton's name for it, without TYPE_."""
    length: int
    """Size of the only dimension, or ANY."""


def _data_type(field: NumberField) -> str:
    if field.type is float:
        return "FP32"
    return "UINT64" if field.bounds.high > 2**31 - 1 else "INT32"


TEXT_INPUT = "text_input"
INPUTS = (
    TensorSpec(TEXT_INPUT, "STRING", ANY),  # the only one that is required
    TensorSpec("streaming", "BOOL", ONE),
    TensorSpec("sampling_param_best_of", "INT32", ONE),
    *(TensorSpec(f"{SAMPLING}{name}", _data_type(field), ONE) for name, field in SAMPLER_FIELDS.items()),
    TensorSpec("sampling_param_max_tokens", "INT32", ONE),
    TensorSpec("sampling_param_stop", "STRING", ANY),
    TensorSpec("sampling_param_exclude_input_from_output", "BOOL", ONE),
    TensorSpec("sampling_param_return_perf_metrics", "BOOL", ONE),
    TensorSpec("return_finish_reason", "BOOL", ONE),
    TensorSpec("return_stop_reason", "BOOL", ONE),
    TensorSpec("return_cumulative_logprob", "BOOL", ONE),
    TensorSpec("stop", "BOOL", ONE),
)
OUTPUTS = (
    TensorSpec("text_output", "STRING", ANY),
    TensorSpec("finish_reason", "STRING", ANY),
    TensorSpec("stop_reason", "STRING", ANY),
    TensorSpec("cumulative_logprob", "FP32", ANY),
    TensorSpec("kv_cache_reused_block", "INT32", ANY),
    TensorSpec("kv_cache_missed_block", "INT32", ANY),
    TensorSpec("kv_cache_alloc_new_blocks", "INT32", ANY),
    TensorSpec("kv_cache_alloc_total_blocks", "INT32", ANY),
    TensorSpec("kv_cache_hit_rate", "FP32", ANY),
    TensorSpec("arrival_time_ns", "INT64", ONE),
    TensorSpec("first_scheduled_time_ns", "INT64", ONE),
    TensorSpec("first_token_time_ns", "INT64", ONE),
    TensorSpec("last_token_time_ns", "INT64", ONE),
    TensorSpec("acceptance_rate", "FP32", ONE),
    TensorSpec("total_accepted_draft_tokens", "INT32", ONE),
    TensorSpec("total_draft_tokens", "INT32", ONE),
    # Ours: what both rates are of.
    TensorSpec("acceptance_length", "FP32", ONE),
    TensorSpec("num_output_tokens", "INT32", ONE),
)


NO_REASON = "None"
"""What NVIDIA's model sends where there is no reason."""
DATA_TYPES = {spec.name: spec.data_type for spec in OUTPUTS}
# Output tensors of what only TensorRT-LLM measures -> its names for that.
KV_CACHE = {
    "kv_cache_reused_block": "num_reused_blocks",
    "kv_cache_missed_block": "num_missed_blocks",
    "kv_cache_alloc_new_blocks": "num_new_allocated_blocks",
    "kv_cache_alloc_total_blocks": "num_total_allocated_blocks",
    "kv_cache_hit_rate": "kv_cache_hit_rate",
}
Values = dict[str, str | float | int]


def response_tensors(
    text: str, completion: Completion | None, returns: frozenset[str]
) -> dict[str, npt.NDArray[np.generic]]:
    """The output tensors by name, with a completion also `returns`; unknown values are left out."""
    values: Values = {"text_output": text}
    if completion is not None:
        values |= _requested(completion, returns)
    return {name: _tensor(name, value) for name, value in values.items()}


def _requested(completion: Completion, returns: frozenset[str]) -> Values:
    values: Values = {}
    if "finish_reason" in returns:
        values["finish_reason"] = str(completion.finish_reason)
    if "stop_reason" in returns:
        values["stop_reason"] = NO_REASON if completion.stop_reason is None else str(completion.stop_reason)
    if "cumulative_logprob" in returns and completion.cumulative_logprob is not None:
        values["cumulative_logprob"] = completion.cumulative_logprob
    if "perf_metrics" in returns:
        values |= _perf_metrics(completion)
    return values


def _perf_metrics(completion: Completion) -> Values:
    times = {
        "arrival_time_ns": 0.0,
        "first_scheduled_time_ns": completion.queue_seconds,
        "first_token_time_ns": completion.ttft_seconds,
        "last_token_time_ns": completion.seconds,
    }
    values: Values = {
        name: round((completion.arrived + seconds) * 1e9) for name, seconds in times.items() if seconds is not None
    }
    if (acceptance := completion.acceptance) is not None and acceptance.proposed is not None:
        values |= {
            "acceptance_rate": acceptance.accepted / acceptance.proposed if acceptance.proposed else 0.0,
            "total_accepted_draft_tokens": acceptance.accepted,
            "total_draft_tokens": acceptance.proposed,
            "acceptance_length": acceptance.tau or 0.0,
        }
    metrics = completion.other_metrics
    values |= {tensor: metrics[name] for tensor, name in KV_CACHE.items() if name in metrics}
    return values | {"num_output_tokens": len(completion.token_ids)}


def _tensor(name: str, value: str | float | int) -> npt.NDArray[np.generic]:
    import numpy as np

    if isinstance(value, str):
        return np.array([value.encode()], dtype=np.object_)
    return np.array([value], dtype={"FP32": np.float32, "INT32": np.int32, "INT64": np.int64}[DATA_TYPES[name]])


class Call(Protocol):
    """One request of Triton's, with its response sender."""

    request_id: str

    def tensors(self) -> Mapping[str, npt.NDArray[np.generic]]:
        """The inputs that were given, by name."""

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
        """Cancels the calls with this id; what is returned is the stop request's own response."""
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
