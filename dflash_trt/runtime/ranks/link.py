# SPDX-License-Identifier: Apache-2.0
"""Messages between rank 0 and another rank, through a gloo group of torch.distributed.

They are bytes of msgpack, checked as they are decoded. Not broadcast_object_list: it unpickles what a peer sends, and
a pickle runs any code. Not broadcast either: it goes through a tree, so a rank would wait for others than rank 0, and
there is none in the other direction; to one other rank both are one message.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# The next command may be hours away, and a gloo wait that times out breaks the connection. The end of a process needs
# no timeout: the kernel closes its sockets, and gloo raises in the processes that wait for it.
FOREVER = timedelta(days=365)
FRAME_BYTES = 4096
"""A message's length and beginning travel in one tensor of this size, and only the rest of a long one in another."""
LENGTH_BYTES = 8
MAX_MESSAGE_BYTES = 2**28


class Link:
    """Whole messages to and from another rank; whatever fails is a RuntimeError."""

    def __init__(self, group: ProcessGroup, rank: int) -> None:
        self._group = group
        self._rank = rank

    def send(self, message: bytes, timeout: timedelta = FOREVER) -> None:
        """Sends a message once the other rank has received those before; one thread at a time."""
        framed = (len(message).to_bytes(LENGTH_BYTES, "little") + message).ljust(FRAME_BYTES, b"\0")
        buffer = torch.from_numpy(np.frombuffer(bytearray(framed), dtype=np.uint8))
        for part in buffer.tensor_split([FRAME_BYTES]):
            if len(part):
                self._group.send([part], self._rank, 0).wait(timeout)

    def receive(self) -> bytes:
        """Waits for the next message."""
        frame = self._receive(FRAME_BYTES)
        length = int.from_bytes(frame[:LENGTH_BYTES], "little")
        if length > MAX_MESSAGE_BYTES:
            raise RuntimeError(f"a message of {length} bytes from rank {self._rank}")
        num_missing = length + LENGTH_BYTES - FRAME_BYTES
        rest = self._receive(num_missing) if num_missing > 0 else b""
        return frame[LENGTH_BYTES : LENGTH_BYTES + length] + rest

    def _receive(self, num_bytes: int) -> bytes:
        buffer = np.empty(num_bytes, dtype=np.uint8)
        self._group.recv([torch.from_numpy(buffer)], self._rank, 0).wait(FOREVER)
        return buffer.tobytes()
