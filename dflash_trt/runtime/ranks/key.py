# SPDX-License-Identifier: Apache-2.0
"""The key that every rank of a job knows and nobody else; it never travels over the links or through torch's store.

On one host rank 0 writes it to a file of mode 0600, and only the file's name is published. Across hosts it comes from
the environment, or from MPI, whose messages are as private as its network.
"""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from dflash_trt.errors import RankError
from dflash_trt.launch_environment import Launch, is_one_host

VARIABLE = "DFLASH_TRT_RANKS_KEY"
_MIN_LENGTH = 32
_KEY_BYTES = 32
_HOW = f"make one with `openssl rand -hex 32`, then on every host: export {VARIABLE}=THE_KEY"


def fresh_key() -> bytes:
    """A key for one job."""
    return secrets.token_bytes(_KEY_BYTES)


def given_key(launch: Launch, environment: Mapping[str, str]) -> bytes | None:
    """The key that the user gives; None where rank 0 makes one: under mpiexec, and when all ranks are on this host.

    Raises RankError where there must be one, or where it is short enough to be guessed.
    """
    if (key := environment.get(VARIABLE)) is not None:
        if len(key) < _MIN_LENGTH:
            raise RankError(f"{VARIABLE}: expected at least {_MIN_LENGTH} characters, found {len(key)}", hint=_HOW)
        return key.encode()
    if launch.by_mpiexec or is_one_host(environment):
        return None
    raise RankError(f"ranks on several hosts: expected their key in {VARIABLE}, found none", hint=_HOW)


@contextmanager
def key_file(key: bytes) -> Iterator[Path]:
    """A file that only this user can read, with the key, for as long as the context lasts."""
    handle, name = tempfile.mkstemp(prefix="dflash-trt-ranks-")  # O_EXCL, mode 0600, a random name
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(key)
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def read_key_file(path: Path) -> bytes:
    """The key that rank 0 wrote; raises RankError for a file that another user could have written or read."""
    try:
        # The name comes through a store that anybody on this host may write to: neither follow nor wait.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            private = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
            key = file.read(2 * _KEY_BYTES)
    except OSError as error:
        raise RankError(f"{path}: expected the key of rank 0, found: {error.strerror}", hint=_HOW) from None
    if not private:
        raise RankError(f"{path}: expected a file that only this user may open, found another", hint=_HOW)
    if len(key) != _KEY_BYTES:
        raise RankError(f"{path}: expected a key of {_KEY_BYTES} bytes, found {len(key)}", hint=_HOW)
    return key
