# SPDX-License-Identifier: Apache-2.0
"""Private directories in which results are written before a rename puts them in place.

A workspace `.NAME.partial` beside the result NAME belongs to the process that holds a lock (flock) on it: containers
that share a volume see each other's locks, but not each other's processes. An unlocked one was abandoned by a process
that was killed. Where a file system has no locks, nothing is removed or refused.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SUFFIX = ".partial"
OWNER = "owner"
"""File in a workspace that names its process; a directory without one is not ours to remove."""
OLD = "old"
"""Folder in a workspace with the older result, moved aside for a newer one."""
LIBC = ctypes.CDLL(None)
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h
HELD: set[Path] = set()
"""Results that this process writes."""


@contextmanager
def workspace(final: Path, *, shared: bool = False) -> Iterator[Path]:
    """New directory beside `final` for this user alone, removed with its contents at the end; raises OSError.

    Unless it is `shared`, another process that writes `final` is such an error. What killed processes left in the
    folder is recovered first. Removes parent directories it created if no result was written.
    """
    made = [parent for parent in final.parents if not os.path.lexists(parent)]
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), error.filename) from None
    recover_abandoned(final.parent)
    is_named = not shared and final not in HELD
    directory, lock = _named(final) if is_named else _numbered(final)
    held = {final} if is_named else set()
    HELD.update(held)
    try:
        (directory / OWNER).write_text(f"process {os.getpid()} on {os.uname().nodename}")
        yield directory
    finally:
        HELD.difference_update(held)
        _restore_and_remove(directory)
        os.close(lock)
        if not os.path.lexists(final):
            with suppress(OSError):
                for parent in made:
                    parent.rmdir()


def replace_directory(new: Path, final: Path, directory: Path) -> None:
    """Puts `new` in the place of `final`, by an exchange where the file system has one (renameat2 of Linux).

    Elsewhere an older `final` waits in the workspace `directory`, from which it is recovered after a kill.
    """
    if not final.exists():
        new.rename(final)
    elif LIBC.renameat2(AT_FDCWD, os.fsencode(new), AT_FDCWD, os.fsencode(final), RENAME_EXCHANGE) != 0:
        (directory / OLD).mkdir()
        final.rename(directory / OLD / final.name)
        new.rename(final)


def recover_abandoned(folder: Path) -> None:
    """Brings back what killed processes had moved aside, and removes their workspaces; those in use stay."""
    for directory in folder.glob(f".*{SUFFIX}"):
        with suppress(OSError):
            lock = _open(directory)
            try:
                if os.fstat(lock).st_uid == os.geteuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if (directory / OWNER).is_file():
                        _restore_and_remove(directory)
                    else:  # killed before it wrote anything, or not ours
                        directory.rmdir()
            finally:
                os.close(lock)


def _named(final: Path) -> tuple[Path, int]:
    """The one workspace of `final` that all processes agree on, and its lock; OSError (EBUSY) if another has it."""
    directory = final.with_name(f".{final.name}{SUFFIX}")
    while True:
        with suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        try:
            lock = _open(directory)
        except FileNotFoundError:  # its owner has just removed it
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            owner = directory / OWNER
            name = owner.read_text(errors="replace") if owner.exists() else "just started"
            raise OSError(errno.EBUSY, f"another command that writes it ({name})") from None
        except OSError:  # no locks here
            os.close(lock)
            with suppress(OSError):
                directory.rmdir()
            return _numbered(final)
        if _is_free(directory, lock):
            return directory, lock
        os.close(lock)


def _is_free(directory: Path, lock: int) -> bool:
    """Whether the locked directory is still there; FileExistsError for one that no process of ours left."""
    try:
        found, left = directory.lstat(), any(directory.iterdir())
    except FileNotFoundError:
        return False
    if left or found.st_uid != os.geteuid():
        os.close(lock)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(directory))
    return os.path.samestat(os.fstat(lock), found)


def _numbered(final: Path) -> tuple[Path, int]:
    """A workspace of `final` beside others, and its lock."""
    while True:
        directory = Path(tempfile.mkdtemp(suffix=SUFFIX, prefix=f".{final.name}.", dir=final.parent))
        with suppress(FileNotFoundError):  # taken for abandoned by another process
            lock = _open(directory)
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if directory.exists():
                return directory, lock
            os.close(lock)


def _open(directory: Path) -> int:
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _restore_and_remove(directory: Path) -> None:
    for old in (directory / OLD).glob("*"):
        if not os.path.lexists(final := directory.with_name(old.name)):
            old.rename(final)
    shutil.rmtree(directory, ignore_errors=True)
