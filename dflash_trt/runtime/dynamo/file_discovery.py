# SPDX-License-Identifier: Apache-2.0
"""Watches a worker's registration in a folder, Dynamo's discovery without etcd.

Dynamo 1.6.1 writes a worker's files once, and renews only their times afterwards (lib/runtime/src/storage/kv/file.rs).
When they are deleted, by hand or by a process that found the worker stopped for ten seconds, no frontend finds it
again. With etcd, Dynamo shuts down a worker that has lost its lease; here we do.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from dflash_trt.errors import EngineError

POLL_SECONDS = 0.25
REGISTRATION_SECONDS = 60.0


async def await_loss(worker_id: int, is_leaving: Callable[[], bool]) -> EngineError | None:
    """Returns the error when a file of the registration is gone; None when the worker shuts down."""
    folder = Path(os.environ.get("DYN_FILE_KV") or Path(tempfile.gettempdir(), "dynamo_store_kv"))
    registered: set[Path] = set()
    deadline = time.monotonic() + REGISTRATION_SECONDS
    while True:
        found = _files(folder, worker_id)
        if is_leaving():
            return None
        if not registered <= found or (not found and time.monotonic() > deadline):
            state = (
                f"found {len(found)} of {len(registered)}"
                if registered
                else f"found none in {REGISTRATION_SECONDS:g} s"
            )
            return EngineError(
                f"{folder}: expected the files by which frontends find this worker, {state}",
                hint="start the worker again; after the whole folder was deleted, the frontend, too",
            )
        registered = found
        await asyncio.sleep(POLL_SECONDS)


def _files(folder: Path, worker_id: int) -> set[Path]:
    try:
        return set(folder.glob(f"v1/*/*%2F{worker_id:x}"))
    except OSError:  # deleted while it was read
        return set()
