# SPDX-License-Identifier: Apache-2.0
"""Whole messages between rank 0 and another rank, over a TCP connection of `multiprocessing.connection`.

Commands could be broadcast through the process group at the same cost. But a connection also says which rank has
ended, the moment its process is gone, while a collective on GPUs would wait; and an idle rank may wait for ever.
Only bytes travel: nothing is pickled.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

MAX_MESSAGE_BYTES = 1 << 28
"""Of those who know the key: far more than the longest command, which carries 8 bytes for each token of its prompts."""
_STRANGERS = (AuthenticationError, AssertionError, ValueError)
"""What multiprocessing makes of a wrong digest, and of words that are no handshake."""


class StrangerError(Exception):
    """Who is at the other end does not know the key."""


@contextmanager
def _handshake() -> Iterator[None]:
    try:
        yield
    except EOFError:
        raise ConnectionResetError("the other end is gone") from None
    except _STRANGERS as error:
        raise StrangerError(str(error)) from None


class Link:
    """Whole messages over a connected socket."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(True)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected
        self._connection = Connection(os.dup(connected.fileno()))

    def fileno(self) -> int:
        """For selectors."""
        return self._connection.fileno()

    def challenge(self, key: bytes) -> None:
        """As the one that was called: lets the caller prove that it knows the key, then does so itself.

        Neither side sends the key, and until then no message may exceed 256 bytes. Raises StrangerError, or OSError
        when the other end is gone.
        """
        with _handshake():
            deliver_challenge(self._connection, key)
            answer_challenge(self._connection, key)

    def answer(self, key: bytes) -> None:
        """As the caller: proves that it knows the key, then lets the other end prove it. Raises as `challenge`."""
        with _handshake():
            answer_challenge(self._connection, key)
            deliver_challenge(self._connection, key)

    def send(self, message: bytes) -> None:
        """Sends a message; raises OSError when the other end is gone."""
        self._connection.send_bytes(message)

    def receive(self, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
        """Waits for a message; raises OSError when the other end is gone, or sends more than `max_bytes`."""
        try:
            return self._connection.recv_bytes(max_bytes)
        except EOFError:
            raise ConnectionResetError("the other end is gone") from None

    def wait_for_end(self, seconds: float) -> None:
        """Waits, at most so long, until the other end is gone."""
        deadline = time.monotonic() + seconds
        with suppress(OSError):
            while self._connection.poll(max(0.0, deadline - time.monotonic())):
                self.receive()

    def end(self) -> None:
        """Ends the connection for both ends, even while another thread waits for a message."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
