# SPDX-License-Identifier: Apache-2.0
"""TritonPythonModel: passes requests of Triton's Python backend to a runtime, and sends its responses.

`triton_python_backend_utils` exists only in the backend's process (Triton 2.51).
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import traceback
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as triton  # type: ignore[import-not-found]

from dflash_trt.api.backend import Backend, DecoderMetrics
from dflash_trt.errors import ConfigError, DFlashError, RequestError
from dflash_trt.triton import mpi_ranks
from dflash_trt.triton.model_file import MODEL_FILE, EmbeddedModel, TrtllmModel, read_model
from dflash_trt.triton.request_tensors import check_numpy
from dflash_trt.triton.service import Service
from dflash_trt.triton.tensors import INPUTS
from dflash_trt.triton.watchdog import start_watchdog
from dflash_trt.trtllm.launch_environment import read_mpi_launch

GAUGE, COUNTER = "GAUGE", "COUNTER"  # names of attributes of triton.MetricFamily, which exists only in initialize()
METRICS = {
    "dflash_running_requests": (GAUGE, "running", "Requests that hold a slot"),
    "dflash_waiting_requests": (GAUGE, "waiting", "Queued requests"),
    "dflash_free_slots": (GAUGE, "free_slots", "Free slots"),
    "dflash_output_tokens": (COUNTER, "output_tokens", "Tokens emitted"),
    "dflash_verify_steps": (COUNTER, "acceptance.all_passes", "Verify passes, counted once for each request in them"),
    "dflash_draft_tokens": (COUNTER, "acceptance.proposed", "Draft tokens verified"),
    "dflash_accepted_draft_tokens": (COUNTER, "acceptance.accepted", "Draft tokens accepted"),
    "dflash_forced_tokens": (COUNTER, "acceptance.forced", "Tokens that a grammar forced"),
}
"""Kind, field of DecoderMetrics and help text by name on Triton's /metrics page."""


class TritonPythonModel:
    """One instance serves all requests."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Loads the runtime that model.yaml names; under `mpirun`, ranks other than 0 work in here until the end."""
        check_numpy()
        file = Path(args["model_repository"]) / args["model_version"] / MODEL_FILE
        model = read_model(file)
        config = model.triton_config
        decoupled = triton.using_decoupled_model_transaction_policy(json.loads(args["model_config"]))
        if decoupled != config.decoupled:
            raise ConfigError(
                f"{file}: triton_config.decoupled: expected {decoupled}, as config.pbtxt says, found {config.decoupled}"
            )
        backend = _open_embedded(model) if isinstance(model, EmbeddedModel) else _open_trtllm(model)
        self._service = Service(backend, config, TritonMetrics(args["model_name"]).publish)
        self._watchdog = start_watchdog()

    def execute(self, requests: Sequence[Any]) -> None:
        """Submits requests and returns at once; responses follow through their response senders."""
        for request in requests:
            self._service.submit(TritonCall(request))

    def finalize(self) -> None:
        """Stops the runtime."""
        self._watchdog.terminate()
        self._watchdog.wait()
        self._service.close()
        gc.collect()  # an exception's frames that hold a request would keep the process alive


def _open_embedded(model: EmbeddedModel) -> Backend:
    from dflash_trt.runtime.load import open_engine

    return open_engine(model.engine, model.target, model)


def _open_trtllm(model: TrtllmModel) -> Backend:
    from dflash_trt.trtllm.llm_backend import TrtllmBackend

    if model.triton_config.engine_mode:
        mpi_ranks.use_engine_drafter()
    if read_mpi_launch(os.environ).rank > 0:
        mpi_ranks.work()
    return TrtllmBackend(model.arguments | mpi_ranks.leader_session())


class TritonMetrics:
    """The runtime's metrics on the server's /metrics page."""

    def __init__(self, model_name: str) -> None:
        self._families = {
            name: triton.MetricFamily(name, text, getattr(triton.MetricFamily, kind))
            for name, (kind, _, text) in METRICS.items()
        }
        self._metrics = {name: family.Metric(labels={"model": model_name}) for name, family in self._families.items()}

    def publish(self, snapshot: DecoderMetrics | None) -> None:
        """Set gauges, and increment counters by the difference."""
        if snapshot is None:
            return
        for name, (kind, field, _) in METRICS.items():
            metric, value = self._metrics[name], attrgetter(field)(snapshot)
            if kind == GAUGE:
                metric.set(value)
            else:
                metric.increment(value - metric.value())


class TritonCall:
    """A request of the Python backend."""

    def __init__(self, request: Any) -> None:
        self._request = request
        self._sender = request.get_response_sender()
        self._is_open = True
        self.request_id: str = request.request_id()

    def tensors(self) -> dict[str, npt.NDArray[np.generic]]:
        """The inputs that were given, by name."""
        inputs = {spec.name: triton.get_input_tensor_by_name(self._request, spec.name) for spec in INPUTS}
        return {name: tensor.as_numpy() for name, tensor in inputs.items() if tensor is not None}

    def parameters(self) -> Mapping[str, object]:
        """Fields of the request that are no inputs: Triton's HTTP endpoints put every unknown key here."""
        return dict(json.loads(self._request.parameters()))

    def send(self, tensors: Mapping[str, npt.NDArray[np.generic]], *, final: bool) -> None:
        """One response."""
        outputs = [triton.Tensor(name, tensor) for name, tensor in tensors.items()]
        self._send(triton.InferenceResponse(output_tensors=outputs), final)

    def fail(self, error: BaseException) -> None:
        """The last response, an error."""
        code = triton.TritonError.INTERNAL
        if isinstance(error, asyncio.CancelledError):
            code = triton.TritonError.CANCELLED
        elif isinstance(error, RequestError):
            code = triton.TritonError.INVALID_ARG
        else:
            triton.Logger.log_error("".join(traceback.format_exception(error)))
        message = error.message if isinstance(error, DFlashError) else str(error)
        message = message or ("cancelled" if code == triton.TritonError.CANCELLED else repr(error))
        self._send(triton.InferenceResponse(error=triton.TritonError(message, code)), final=True)

    def is_cancelled(self) -> bool:
        """Whether the client has cancelled; not asked after the final response, which would crash the server."""
        return self._is_open and bool(self._sender.is_cancelled())

    def _send(self, response: Any, final: bool) -> None:
        self._is_open = not final
        self._sender.send(response, flags=triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0)
