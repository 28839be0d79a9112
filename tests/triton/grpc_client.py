# SPDX-License-Identifier: Apache-2.0
"""tritonclient's streaming interface as an iterator."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import numpy as np
import tritonclient.grpc as triton

from dflash_trt.triton.tensors import INPUTS
from tests.triton.server import LOOPBACK, PATIENCE, RefusedError, Server

TYPES = {
    "STRING": ("BYTES", np.object_), "BOOL": ("BOOL", np.bool_), "INT32": ("INT32", np.int32),
    "UINT64": ("UINT64", np.uint64), "FP32": ("FP32", np.float32),
}  # fmt: skip
DATA_TYPES = {spec.name: spec.data_type for spec in INPUTS}


def tensor(name: str, value: object, data_type: str | None = None) -> triton.InferInput:
    """One input, of the type that the model has for it or of another one."""
    kind, dtype = TYPES[data_type or DATA_TYPES[name]]
    values = [
        item.encode() if isinstance(item, str) else item for item in (value if isinstance(value, list) else [value])
    ]
    found = triton.InferInput(name, [len(values)], kind)
    found.set_data_from_numpy(np.array(values, dtype=dtype))
    return found


class GrpcClient:
    """One stream to a server."""

    def __init__(self, server: Server) -> None:
        self._client = triton.InferenceServerClient(f"{LOOPBACK}:{server.grpc}")
        self._responses: queue.Queue[tuple[triton.InferResult, Exception | None]] = queue.Queue()
        self._client.start_stream(callback=lambda result, error: self._responses.put((result, error)))

    def __enter__(self) -> GrpcClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Unless it is cancelled, the end waits for answers under way, and after a failed test for ever.
        self._client.stop_stream(cancel_requests=kind not in (None, RefusedError))
        self._client.close()

    def leave(self) -> None:
        """Ends the stream in the middle of an answer."""
        self._client.stop_stream(cancel_requests=True)
        self._client.close()

    def stream(
        self, inputs: Mapping[str, object] | list[triton.InferInput], request_id: str = ""
    ) -> Iterator[dict[str, Any]]:
        """The outputs of each response up to the final one; raises RefusedError for an error."""
        tensors = inputs if isinstance(inputs, list) else [tensor(*item) for item in inputs.items()]
        self._client.async_stream_infer(
            "tensorrt_llm", tensors, request_id=request_id, enable_empty_final_response=True
        )
        is_final = False
        while not is_final:
            result, error = self._responses.get(timeout=PATIENCE)
            if error is not None:
                raise RefusedError(str(error))
            response = result.get_response()
            outputs = {output.name: result.as_numpy(output.name)[0] for output in response.outputs}
            yield {name: value.decode() if isinstance(value, bytes) else value for name, value in outputs.items()}
            is_final = response.parameters["triton_final_response"].bool_param
