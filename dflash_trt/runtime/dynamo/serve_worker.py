# SPDX-License-Identifier: Apache-2.0
"""Runs a worker in Dynamo's runtime."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

import uvloop
from dynamo._core import get_reasoning_parser_names, get_tool_parser_names
from dynamo.common.backend import Worker, WorkerConfig
from dynamo.common.utils.namespace import get_worker_namespace

from dflash_trt.api.runtime_options import RuntimeOptions
from dflash_trt.errors import ConfigError, EndpointError
from dflash_trt.runtime.checked_pair import CheckedPair
from dflash_trt.runtime.dynamo.worker import DFlashWorker

DYNAMOS_OWN = ("Unavailable: ", "InvalidRequest: ")
"""Prefixes of errors that Dynamo itself raises; a worker's own errors have others."""
HINTS = {
    "filesystem": "let DYN_FILE_KV name a folder in which this user may write, on a disk with space",
    "etcd": "start etcd, and let ETCD_ENDPOINTS name it; one machine needs none: --discovery-backend file",
}


def serve(
    pair: CheckedPair,
    options: RuntimeOptions,
    served_model_name: str,
    *,
    namespace: str,
    discovery_backend: str,
    reasoning_parser: str | None,
    tool_call_parser: str | None,
    drain_seconds: int,
) -> None:
    """Registers a worker and serves until SIGTERM, then until running requests end.

    Raises ConfigError for an unknown parser, EngineError where the decoder fails, and EndpointError where Dynamo's
    runtime does not start, or ends by itself.

    A target without a chat template serves completions only: the frontend never lists a chat model without one.
    """
    _check_parser("--reasoning-parser", reasoning_parser, get_reasoning_parser_names())
    _check_parser("--tool-call-parser", tool_call_parser, get_tool_parser_names())
    is_in_file = discovery_backend == "file"
    worker = DFlashWorker(pair, options, served_model_name, drain_seconds, is_in_file=is_in_file)
    config = WorkerConfig(
        namespace=get_worker_namespace(namespace),
        model_name=str(pair.target.directory),
        served_model_name=served_model_name,
        endpoint_types="completions" if pair.tokenizer.chat_template is None else "chat,completions",
        discovery_backend=discovery_backend,
        request_plane=os.environ.get("DYN_REQUEST_PLANE", "tcp"),
        response_plane=os.environ.get("DYN_RESPONSE_PLANE", "tcp"),
        event_plane=os.environ.get("DYN_EVENT_PLANE"),
        reasoning_parser=reasoning_parser,
        tool_call_parser=tool_call_parser,
    )

    def leave(number: int, _: object) -> None:
        if worker.is_leaving and number == signal.SIGINT:
            raise KeyboardInterrupt
        worker.is_leaving = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)  # Dynamo's handler calls the one before it
    try:
        uvloop.run(Worker(worker, config).run())
    except Exception as error:
        if worker.error is None and not str(error).startswith(DYNAMOS_OWN):
            raise
        problem = str(error).partition(": ")[2]
        worker.error = worker.error or EndpointError(
            f"expected Dynamo's runtime, with discovery by {discovery_backend}, found {problem}",
            hint=next((hint for word, hint in HINTS.items() if word in problem), None),
        )
    if worker.error is None and not worker.is_leaving:  # with etcd, a lost lease
        worker.error = EndpointError(
            "expected Dynamo's runtime to run until SIGTERM, found it ended; the log above says why",
            hint="start the worker again: it registers as it starts",
        )
    if worker.error is not None:
        raise worker.error from None


def _check_parser(option: str, name: str | None, known: Sequence[str]) -> None:
    if name is not None and name not in known:
        raise ConfigError(f"{option}: expected one of {', '.join(sorted(known))}, found {name}")
