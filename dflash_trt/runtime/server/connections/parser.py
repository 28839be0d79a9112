# SPDX-License-Identifier: Apache-2.0
"""h11's parser with limits for headers, trailers and chunks: parsing one that has too many stalls all other clients."""

from __future__ import annotations

import h11
from h11._receivebuffer import ReceiveBuffer

MAX_HEADERS = 100
MAX_HEADER_BYTES = 16384
"""Most header bytes of a request, as in Apache and h11; each header takes 2 us of the event loop."""
SMALL_CHUNKS = 1024
CHUNK_BYTES = 256
"""Smallest mean size of a body's chunks after the first SMALL_CHUNKS; each takes 20 us, whatever its size."""


class Refusal(h11.RemoteProtocolError):
    """A request beyond a limit; the client gets the message."""


class LimitedBuffer(ReceiveBuffer):
    """Received bytes, from which h11 takes the headers and the trailers of a request."""

    has_request_line = True
    """Whether the next lines begin with the request line; else they are trailers."""

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """The lines before the next blank one, if that has arrived; Refusal for too many."""
        received = len(self)
        lines = super().maybe_extract_lines()
        size = received - len(self) if lines is not None else received
        number = len(lines) - self.has_request_line if lines is not None else 0
        if number > MAX_HEADERS or size > MAX_HEADER_BYTES:
            limit = f"at most {MAX_HEADERS} in {MAX_HEADER_BYTES} bytes"
            found = f"{number} in {size} bytes" if lines is not None else f"no end after {size} bytes"
            raise Refusal(f"headers: expected {limit}, found {found}")
        return lines


class LimitedConnection(h11.Connection):
    """The server's side of a connection; RemoteProtocolError for a request beyond a limit."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER)
        self._receive_buffer = self._buffer = LimitedBuffer()
        self._num_chunks = self._num_bytes = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        self._buffer.has_request_line = self.their_state is h11.IDLE
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
        elif isinstance(event, h11.Data):
            self._num_chunks += event.chunk_end
            self._num_bytes += len(event.data)
            if self._num_chunks > SMALL_CHUNKS + self._num_bytes // CHUNK_BYTES:
                found = f"{self._num_chunks} in {self._num_bytes} bytes"
                raise Refusal(f"body: expected chunks of at least {CHUNK_BYTES} bytes, found {found}")
        return event
