# SPDX-License-Identifier: Apache-2.0
"""Addresses of a worker, and a watch on its registration in a folder, Dynamo's discovery without etcd.

Dynamo 1.6.1 writes a worker's files once, and renews only their times afterwards (lib/runtime/src/storage/kv/file.rs).
When they are deleted, by hand or by a process that found the worker stopped for ten seconds, no frontend finds it
again. With etcd, Dynamo shuts down a worker that has lost its lease; here we do.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import tempfile
import time
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path

from dflash_trt.errors import ConfigError, EngineError

ADDRESSES = ("DYN_TCP_RPC_HOST", "DYN_EVENT_PLANE_HOST", "DYN_SYSTEM_HOST")


def set_addresses(host: str, metrics_port: int | None) -> None:
    """Sets the address, and the port of metrics if given; ConfigError for one that this machine does not have."""
    address = _own_address(host)
    for name in ADDRESSES:
        os.environ.setdefault(name, address)
    if metrics_port is not None:
        _check_port(os.environ["DYN_SYSTEM_HOST"], metrics_port)
        os.environ["DYN_SYSTEM_PORT"] = str(metrics_port)


def _check_port(host: str, port: int) -> None:
    """Raises ConfigError for a port in use, where Dynamo would go on without metrics."""
    if port <= 0:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                return  # another address family, which Dynamo reports
            raise ConfigError(
                f"--metrics-port: port {port} on {host} cannot be used: {error.strerror}",
                hint="stop the process that listens there, or choose another port",
            ) from None


def _own_address(host: str) -> str:
    """An address of this machine: Dynamo's event plane takes neither names nor 0.0.0.0."""
    try:
        address = socket.gethostbyname(host)
        with socket.socket() as probe:
            probe.bind((address, 0))
    except OSError as error:
        raise ConfigError(f"--host: expected this machine's address or name, found {host}: {error.strerror}") from None
    if ip_address(address).is_unspecified:
        raise ConfigError(f"--host: expected the address by which frontends reach this machine, found {host}")
    return address


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
