# SPDX-License-Identifier: Apache-2.0
"""Addresses of a worker, which Dynamo reads from the environment when its package is imported."""

from __future__ import annotations

import errno
import os
import socket
from ipaddress import ip_address

from dflash_trt.errors import ConfigError

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
                f"--metrics-port: expected a free port on {host}, found {port}: {error.strerror}",
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
