# SPDX-License-Identifier: Apache-2.0
"""The listening socket, and how many connections the limit of open files allows."""

from __future__ import annotations

import errno
import resource
import socket
from pathlib import Path

from dflash_trt.errors import RequestError

RESERVED_FILES = 16
"""File descriptors kept free for the page and for logs."""
MIN_CONNECTIONS = 8
HOST_HINT = "with --host 127.0.0.1 only this machine can connect, with --host 0.0.0.0 also others"


def bind(host: str, port: int) -> socket.socket:
    """Returns a bound socket that does not listen yet; RequestError where the address is not available."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise RequestError(f"{host} is not an address of this machine: {error.strerror}", hint=HOST_HINT) from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise RequestError(f"{host} is not an address of this machine", hint=HOST_HINT) from None
        problem = f"port {port} on {host} cannot be used: {error.strerror}"
        if error.errno == errno.EADDRINUSE:
            problem = f"port {port} on {host} is already in use"
        raise RequestError(
            problem, hint="stop the process that listens there, or choose another port with --port"
        ) from None
    return bound


def max_connections() -> int:
    """Connections that the limit of open files allows; raises the soft limit to the hard one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    limit = hard - num_open - RESERVED_FILES
    if limit < MIN_CONNECTIONS:
        raise RequestError(
            f"the limit of open files is {hard}; the server needs {num_open + RESERVED_FILES + MIN_CONNECTIONS}",
            hint="raise it with ulimit -n",
        )
    return limit
