# SPDX-License-Identifier: Apache-2.0
"""The one place that writes results: complete or not there, and in place of nothing but an older result.

A result is written in a private directory next to it. Such a workspace `.NAME.<16 hex digits>.partial` belongs to the
process that holds the lock (flock) on the file `lock` in it: containers that share a volume see each other's locks, and
not each other's processes. Only one process at a time has a workspace for a result, unless the result is a cache.
Where a file system has no locks abandoned workspaces cannot be told from others, and nothing is removed or refused.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dflash_trt.errors import BuildError
from dflash_trt.files.read import open_file

NAME = re.compile(r"\.(.+)\.[0-9a-f]{16}\.partial", re.DOTALL)
"""A workspace's."""
LOCK, OLD, REPLACED = "lock", "old", "replaced"
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h
UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV}
OWN: set[Path] = set()
"""Workspaces of this process."""


@contextmanager
def workspace(final: Path, *, shared: bool = False) -> Iterator[Path]:
    """A new directory next to `final`, for its owner only, removed with its contents at the end; raises OSError.

    Unless it is `shared`, it is an error if another process has one for `final`. Leftovers of killed processes in that
    folder are recovered or removed first. Removes parent directories it created if no result was written.
    """
    made = [parent for parent in final.parents if not os.path.lexists(parent)]
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), error.filename) from None
    recover_abandoned(final.parent)
    directory, lock = _create(final)
    OWN.add(directory)
    try:
        if not shared:
            _refuse_another(directory, final)
        os.write(lock, f"process {os.getpid()} on {os.uname().nodename}".encode())
        yield directory
    finally:
        OWN.discard(directory)
        _restore_and_remove(directory, final, lock)
        if not os.path.lexists(final):
            with suppress(OSError):
                for parent in made:
                    parent.rmdir()


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


def _refuse_another(mine: Path, final: Path) -> None:
    """Raises OSError where another process writes `final`; of those that begin at once one goes on, by its name."""
    for entry in list(os.scandir(final.parent)):
        match, other = NAME.fullmatch(entry.name), Path(entry.path)
        if match and match[1] == final.name and other not in OWN:
            while (owner := _owner(other)) is not None:
                if owner or other.name < mine.name:
                    raise OSError(errno.EBUSY, f"another command that writes it ({owner or 'just started'})")
                time.sleep(0.001)


def _owner(directory: Path) -> str | None:
    """The process that holds a workspace, nothing while it may still give way; None where no process is seen."""
    try:
        lock = os.open(directory / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.read(lock, 1000).decode(errors="replace")
    except OSError:
        return None
    finally:
        os.close(lock)
    return None


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


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputKind:
    """Paths that a command writes, and those that they replace."""

    name: str
    """Name with its article, for "expected an engine directory"."""
    recognizes: Callable[[Path], bool]
    """Whether the file or directory at a path is one of ours."""
    form: Literal["directory", "file"] = "directory"
    option: str = "-o DIR"
    """Option with which the user names another place."""
    is_cache: bool = False
    """Whether several processes may write it at once: the last one's stays."""


def bearing(mark: str | bytes, within: int = 4096) -> Callable[[Path], bool]:
    """For `OutputKind.recognizes`: whether a file has `mark` in its first bytes."""
    sought = mark.encode() if isinstance(mark, str) else mark

    def bears(file: Path) -> bool:
        with open_file(file, BuildError) as stream:
            return sought in stream.read(within)

    return bears


@contextmanager
def new_directory(path: Path, kind: OutputKind, *, force: bool = False) -> Iterator[Path]:
    """A directory that becomes `path` when the block ends without an error; raises BuildError."""
    with _writing(path, kind, force) as (directory, final):
        new = directory / "new"
        new.mkdir()
        yield new
        _flush(new)
        check_replaceable(path, kind, force=force)  # hours may have gone by
        if final.exists():
            exchange(new, final, directory)
        else:
            new.rename(final)


@contextmanager
def new_file(path: Path, kind: OutputKind, *, force: bool = False) -> Iterator[Path]:
    """The name of a file to write, which becomes `path` when the block ends without an error; else as above."""
    with _writing(path, kind, force) as (directory, final):
        new = directory / "new"
        yield new
        _flush(new)
        check_replaceable(path, kind, force=force)
        if final.exists():
            new.replace(final)
        else:
            _rename_to_nothing(new, final)


@contextmanager
def sole_writer(path: Path, kind: OutputKind, *, force: bool = False) -> Iterator[None]:
    """Keeps other processes from writing `path` during the block; BuildError where one does, or it cannot be written.

    For what is written beside it before it is complete.
    """
    with ExitStack() as stack:
        with as_build_error(path, kind.option):
            check_replaceable(path, kind, force=force)
            stack.enter_context(workspace(_followed(path)))
        yield


@contextmanager
def scratch_directory(path: Path) -> Iterator[Path]:
    """A name near `path` for a directory on the way to it, removed at the end; BuildError when it cannot be written."""
    with as_build_error(path, "-o DIR"), workspace(_followed(path)) as directory:
        yield directory / "scratch"


def check_replaceable(path: Path, kind: OutputKind, *, force: bool) -> None:
    """Raises BuildError where `path` is neither free nor, with `force`, empty or of that kind."""
    try:
        mode = path.stat().st_mode
    except OSError:  # other obstacles show when it is written
        return
    hint, expected = f"choose another {kind.option}", f"expected a {kind.form} that does not exist yet"
    if kind.form == "directory" and not stat.S_ISDIR(mode):
        raise BuildError(f"{path}: {expected}, found a file", hint=hint)
    if kind.form == "file" and not stat.S_ISREG(mode):
        found = "a directory" if stat.S_ISDIR(mode) else "something that is not a file"
        raise BuildError(f"{path}: {expected}, found {found}", hint=hint)
    if not (_is_empty(path) or kind.recognizes(path)):
        raise BuildError(f"{path}: expected {kind.name} or none, found another {kind.form}", hint=hint)
    if not force:
        raise BuildError(f"{path}: {expected}, found one", hint=f"{hint}, or replace it with --force")


@contextmanager
def _writing(path: Path, kind: OutputKind, force: bool) -> Iterator[tuple[Path, Path]]:
    """A workspace, and where `path` lies once links are followed: a rename must stay on one file system."""
    with as_build_error(path, kind.option):
        final = _followed(path)
        check_replaceable(path, kind, force=force)
        with workspace(final, shared=kind.is_cache) as directory:
            check_replaceable(path, kind, force=force)  # again: what a killed process had moved aside is back
            yield directory, final
        _flush_entry(final.parent)


@contextmanager
def as_build_error(path: Path, option: str) -> Iterator[None]:
    """Raises an OSError of the block as a BuildError that names `path`, and the option with which to choose another."""
    try:
        yield
    except OSError as error:
        found = f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
        first = FIRST.get(error.errno or 0, "")
        raise BuildError(
            f"{path}: expected to write it, found: {found}", hint=f"{first}choose another {option}"
        ) from error


def _followed(path: Path) -> Path:
    """Where `path` lies once links are followed; OSError for a link that leads to itself."""
    final = Path(os.path.realpath(path))
    if final.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return final


FIRST = dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free disk space or ")
FIRST[errno.EBUSY] = "wait for its end or "


def _is_empty(path: Path) -> bool:
    return not any(path.iterdir()) if path.is_dir() else path.stat().st_size == 0


def _rename_to_nothing(new: Path, final: Path) -> None:
    """Raises FileExistsError where something has appeared meanwhile."""
    try:
        os.link(new, final)
    except OSError as error:
        if isinstance(error, FileExistsError):
            raise
        new.rename(final)  # a file system without links


def _flush(path: Path) -> None:
    """Flushes a path with all files and folders below it."""
    for folder, _, names in os.walk(path):
        for name in names:
            _flush_entry(Path(folder, name))
        _flush_entry(Path(folder))
    if path.is_file():
        _flush_entry(path)


def _flush_entry(path: Path) -> None:
    if not stat.S_ISREG(mode := path.lstat().st_mode) and not stat.S_ISDIR(mode):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
