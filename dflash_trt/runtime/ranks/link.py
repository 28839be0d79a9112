# SPDX-License-Identifier: Apache-2.0
"""What rank 0 and each other rank tell each other beside the target's collectives, over a TCP connection.

Commands could be broadcast through the process group at the same cost. But a connection also says which rank has
ended, the moment its process is gone, while a collective on GPUs would wait; and an idle rank may wait for ever.
"""

from __future__ import annotations

import hmac
import secrets
import socket
from contextlib import suppress
from typing import Protocol

START_SECONDS = 300.0
HANDSHAKE_SECONDS = 10.0
_STORE_KEY = "dflash_trt/link"


class Store(Protocol):
    """What is used of a store of torch.distributed."""

    def set(self, key: str, value: str) -> None:
        """Publishes a value."""

    def get(self, key: str) -> bytes:
        """Waits for a value."""


class Link:
    """Whole messages over a connected socket."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def send(self, message: bytes) -> None:
        """Sends a message; raises OSError when the other end is gone."""
        self._socket.sendall(len(message).to_bytes(8, "little") + message)

    def receive(self) -> bytes:
        """Waits for a message; raises OSError when the other end is gone."""
        return self._exactly(int.from_bytes(self._exactly(8), "little"))

    def set_timeout(self, seconds: float | None) -> None:
        """How long to wait for the other end; None: for ever."""
        self._socket.settimeout(seconds)

    def wait_for_end(self, seconds: float) -> None:
        """Waits, at most so long, until the other end is gone."""
        self.set_timeout(seconds)
        with suppress(OSError):
            while True:
                self.receive()

    def end(self) -> None:
        """Ends the connection for both ends, even while another thread waits for a message."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _exactly(self, num_bytes: int) -> bytes:
        received = bytearray()
        while len(received) < num_bytes:
            if not (part := self._socket.recv(num_bytes - len(received))):
                raise ConnectionResetError("the other end is gone")
            received += part
        return bytes(received)


def link_followers(store: Store, address: str, size: int) -> dict[int, Link]:
    """Rank 0's links to all others, by rank; `address` is where it listens, and nowhere else."""
    secret = secrets.token_bytes(32)
    links: dict[int, Link] = {}
    with socket.create_server((address, 0), backlog=size) as server:
        server.settimeout(START_SECONDS)
        store.set(_STORE_KEY, f"{server.getsockname()[1]} {secret.hex()}")
        while len(links) < size - 1:
            link = Link(server.accept()[0])
            link.set_timeout(HANDSHAKE_SECONDS)
            with suppress(OSError):  # anybody may connect: only who knows the secret is heard
                if hmac.compare_digest(link.receive(), secret):
                    links[int(link.receive())] = link
            link.set_timeout(None)
    return dict(sorted(links.items()))


def link_leader(store: Store, address: str, rank: int) -> Link:
    """The link of another rank to rank 0, which listens at `address`."""
    port, secret = store.get(_STORE_KEY).decode().split()
    link = Link(socket.create_connection((address, int(port)), timeout=START_SECONDS))
    link.send(bytes.fromhex(secret))
    link.send(b"%d" % rank)
    link.set_timeout(None)
    return link
