# SPDX-License-Identifier: Apache-2.0
"""Private directories in which results are written before a rename puts them in place.

A workspace `.NAME.partial` beside the result NAME belongs to the process that holds a lock (flock) on the file `owner`
in it: containers that share a volume see each other's locks, but not each other's processes. The lock is on a file, as
NFS has no exclusive locks for directories. An unlocked workspace was abandoned by a process that was killed. Where a
file system has no locks, nothing is removed or refused.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SUFFIX = ".partial"
OWNER = "owner"
"""File in a workspace that its process locks and names itself in; a directory without one is not ours to remove."""
OLD = "old"
"""Folder in a workspace with the older result, moved aside for a newer one."""
LIBC = ctypes.CDLL(None)
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h
HELD: set[Path] = set()
"""Results that this process writes."""


@contextmanager
def workspace(final: Path, *, shared: bool = False) -> Iterator[Path]:
    """New directory beside `final`, accessible to this user only, removed with its contents at the end.

    Unless it is `shared`, raises OSError (EBUSY) if another process writes `final`. First recovers what killed
    processes left in the folder. Removes parent directories it created if no result was written.
    """
    made = [parent for parent in final.parents if not os.path.lexists(parent)]
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), error.filename) from None
    recover_abandoned(final.parent)
    is_named = not shared and final not in HELD
    directory, lock = _create(final, is_named=is_named)
    held = {final} if is_named else set()
    HELD.update(held)
    try:
        os.write(lock, f"process {os.getpid()} on {os.uname().nodename}".encode())
        yield directory
    finally:
        HELD.difference_update(held)
        _restore_and_remove(directory, lock)
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
            if not _is_workspace(directory):
                continue
            try:
                lock = os.open(directory / OWNER, os.O_RDWR | os.O_NOFOLLOW)
            except FileNotFoundError:
                directory.rmdir()  # killed before it had a lock; a process that is about to lock it makes another
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # in use, or no locks here
                os.close(lock)
                continue
            if _is_current(directory, lock):
                _restore_and_remove(directory, lock)
            else:
                os.close(lock)


def _create(final: Path, *, is_named: bool) -> tuple[Path, int]:
    """A workspace of `final` and its lock.

    One that `is_named` has the name on which all processes agree: OSError (EBUSY) where another process holds it,
    FileExistsError where something else has its name.
    """
    while True:
        directory = final.with_name(f".{final.name}{SUFFIX}")
        if not is_named:
            directory = Path(tempfile.mkdtemp(suffix=SUFFIX, prefix=f".{final.name}.", dir=final.parent))
        else:
            with suppress(FileExistsError):
                directory.mkdir(mode=0o700)
        try:
            if not _is_workspace(directory):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(directory))
            lock = os.open(directory / OWNER, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:  # removed by its owner, or by a process that took it for abandoned
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(lock, 1000, 0).decode(errors="replace")
            os.close(lock)
            if is_named and owner:
                raise OSError(errno.EBUSY, f"another command that writes it ({owner})") from None
            time.sleep(0.001)  # the owner is starting, or a process tests whether it is abandoned
            continue
        except OSError:  # no locks here
            if not is_named:
                return directory, lock
            is_named = False
            if os.fstat(lock).st_size:
                os.close(lock)
            else:
                _restore_and_remove(directory, lock)
            continue
        if not _is_current(directory, lock):
            os.close(lock)
        elif os.fstat(lock).st_size:  # the owner was killed just now
            _restore_and_remove(directory, lock)
        else:
            return directory, lock


def _is_workspace(directory: Path) -> bool:
    """Whether a process of this user made the directory, rather than something else that has such a name."""
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return False
    names = {entry.name for entry in directory.iterdir()}
    return OWNER in names or not names


def _is_current(directory: Path, lock: int) -> bool:
    """Whether the locked file is still the workspace's, which its former owner may have removed."""
    try:
        return os.path.samestat(os.fstat(lock), (directory / OWNER).lstat())
    except FileNotFoundError:
        return False


def _restore_and_remove(directory: Path, lock: int) -> None:
    """Undoes half a replacement, then removes everything, the lock last: a process killed before leaves a workspace."""
    try:
        for old in (directory / OLD).glob("*"):
            if not os.path.lexists(final := directory.with_name(old.name)):
                old.rename(final)
        for entry in directory.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name != OWNER:
                entry.unlink(missing_ok=True)
        (directory / OWNER).unlink(missing_ok=True)
    finally:
        os.close(lock)  # before the directory goes: NFS keeps open files in it
    with suppress(OSError):
        directory.rmdir()
