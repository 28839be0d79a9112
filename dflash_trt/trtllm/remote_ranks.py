# SPDX-License-Identifier: Apache-2.0
"""Registration in the ranks of trtllm-llmapi-launch, which import no main module but unpickle tasks.

Its ranks run TensorRT-LLM's own modules (llmapi/mgmn_leader_node.py on rank 0, mgmn_worker_node.py on the others) and
wait; the command, which is no MPI process, sends them functions through one method (llmapi/mpi_session.py, read on
NVIDIA/TensorRT-LLM's main of November 2026).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from typing import Any, TypeVar

from dflash_trt.errors import EngineError
from dflash_trt.trtllm.registration import register

SESSION = "tensorrt_llm.llmapi.mpi_session"
CLIENT = "RemoteMpiCommSessionClient"
T = TypeVar("T")


def register_in_remote_ranks() -> None:
    """Makes every task register the drafter in its rank first; EngineError where tasks are not sent as they were."""
    client: Any = getattr(import_module(SESSION), CLIENT, None)
    submit: Any = getattr(client, "submit", lambda: None)
    found = list(inspect.signature(submit).parameters)
    if found[:3] != ["self", "task", "args"]:
        raise EngineError(f"{SESSION}.{CLIENT}.submit: expected (self, task, *args, ...), found ({', '.join(found)})")

    @wraps(submit)
    def submit_registered(self: Any, task: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return submit(self, partial(run_registered, task), *args, **kwargs)

    client.submit = submit_registered


def run_registered(task: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """A task in the rank that it was sent to."""
    register()
    return task(*args, **kwargs)
