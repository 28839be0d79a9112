# SPDX-License-Identifier: Apache-2.0
"""Private directories next to a result, in which it is written.

A workspace `.NAME.<16 hex digits>.partial` belongs to the process that holds the lock (flock) on the file `lock` in it:
containers that share a volume see each other's locks, and not each other's processes. Where a file system has no locks
abandoned workspaces cannot be told from others, and nothing is removed.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NAME = re.compile(r"\.(.+)\.[0-9a-f]{16}\.partial", re.DOTALL)
LOCK, OLD, REPLACED = "lock", "old", "replaced"
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h
UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV}


@contextmanager
def workspace(final: Path) -> Iterator[Path]:
    """A new directory beside `final`, for the owner alone, removed with all that is in it at the end; raises OSError.

    What killed processes left in that folder is recovered or removed first.
    """
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), error.filename) from None
    recover_abandoned(final.parent)
    directory, lock = _create(final)
    try:
        yield directory
    finally:
        _restore_and_remove(directory, final, lock)


def exchange(new: Path, final: Path, directory: Path) -> None:
    """The directories `new`, in the workspace `directory`, and `final` change places, so that one is always there.

    Where that takes two renames, a kill between them leaves the old one in the workspace, from which it is recovered.
    """
    if _exchange_at_once(new, final):
        return
    final.rename(directory / OLD)
    new.rename(final)
    (directory / OLD).rename(directory / REPLACED)


def recover_abandoned(folder: Path) -> None:
    """Brings back what stopped processes had moved aside, and removes their workspaces; those in use stay."""
    with suppress(OSError):
        for entry in list(os.scandir(folder)):
            match = NAME.fullmatch(entry.name)
            if (
                match
                and entry.is_dir(follow_symlinks=False)
                and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
            ):
                _recover_if_unlocked(Path(entry.path), folder / match[1])


def _create(final: Path) -> tuple[Path, int]:
    """A workspace and its lock's descriptor; retries if another process took a not yet locked one for abandoned."""
    while True:
        directory = final.with_name(f".{final.name}.{secrets.token_hex(8)}.partial")
        directory.mkdir(mode=0o700)
        try:
            lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        except OSError:  # no locks here: those who come later find none, either, and leave it alone
            return directory, lock
        if (directory / LOCK).exists():
            return directory, lock
        os.close(lock)


def _recover_if_unlocked(directory: Path, final: Path) -> None:
    try:
        lock = os.open(directory / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        directory.rmdir()  # killed before it had a lock; one that is just being made makes another
        return
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # in use, or the file system has no locks
        os.close(lock)
        return
    _restore_and_remove(directory, final, lock)


def _restore_and_remove(directory: Path, final: Path, lock: int) -> None:
    """Undoes half an exchange, then removes everything, the lock last: a process killed before leaves a workspace."""
    try:
        if (directory / OLD).exists() and not os.path.lexists(final):
            (directory / OLD).rename(final)
        for entry in list(directory.iterdir()):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name != LOCK:
                entry.unlink(missing_ok=True)
        (directory / LOCK).unlink(missing_ok=True)
    finally:
        os.close(lock)
    with suppress(OSError):
        directory.rmdir()


def _exchange_at_once(new: Path, final: Path) -> bool:
    """Whether renameat2 (Linux 3.15, glibc 2.28) did it; raises OSError where it may not."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(AT_FDCWD, os.fsencode(new), AT_FDCWD, os.fsencode(final), RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(final))
