# SPDX-License-Identifier: Apache-2.0
"""The one place that writes results: complete or not there, and in place of nothing but an older result."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dflash_trt.errors import BuildError
from dflash_trt.files.read import open_file
from dflash_trt.files.workspace import replace_directory, workspace

FIRST = dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free disk space or ")
FIRST[errno.EBUSY] = "wait for its end or "


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputKind:
    """A kind of result; a command replaces older results of the same kind only."""

    name: str
    """Name with its article: "an engine directory"."""
    recognizes: Callable[[Path], bool]
    """Whether the file or directory at a path is one of ours."""
    form: Literal["directory", "file"] = "directory"
    option: str = "-o DIR"
    """Option with which the user names another place."""
    is_cache: bool = False
    """Whether several processes may write it at once; the last one wins."""


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
        check_replaceable(path, kind, force=force)  # again: the block may have taken hours
        replace_directory(new, final, directory)


@contextmanager
def new_file(path: Path, kind: OutputKind, *, force: bool = False) -> Iterator[Path]:
    """The name of a file to write, which becomes `path` when the block ends without an error; raises BuildError."""
    with _writing(path, kind, force) as (directory, final):
        new = directory / "new"
        yield new
        _flush(new)
        check_replaceable(path, kind, force=force)
        new.replace(final)


@contextmanager
def sole_writer(path: Path, kind: OutputKind, *, force: bool = False) -> Iterator[None]:
    """Keeps other processes from writing `path` during the block; BuildError where one does, or it cannot be written.

    Used where unfinished work is kept in files beside `path`.
    """
    with ExitStack() as stack:
        with as_build_error(path, kind.option):
            check_replaceable(path, kind, force=force)
            stack.enter_context(workspace(_followed(path)))
        yield


@contextmanager
def scratch_directory(path: Path) -> Iterator[Path]:
    """A name beside `path` for a temporary directory, removed at the end; BuildError when it cannot be written."""
    with as_build_error(path, "-o DIR"), workspace(_followed(path)) as directory:
        yield directory / "scratch"


def check_replaceable(path: Path, kind: OutputKind, *, force: bool) -> None:
    """Raises BuildError where `path` is neither free nor, with `force`, empty or of that kind."""
    try:
        mode = path.stat().st_mode
    except OSError:  # other errors are reported when it is written
        return
    hint = f"choose another {kind.option}"
    is_form = stat.S_ISDIR if kind.form == "directory" else stat.S_ISREG
    if not is_form(mode):
        raise BuildError(f"{path} already exists and is not a {kind.form}", hint=hint)
    if not (_is_empty(path) or kind.recognizes(path)):
        raise BuildError(f"{path} already exists and is not {kind.name}, so it is not replaced", hint=hint)
    if not force:
        raise BuildError(f"{path} already exists", hint=f"{hint}, or replace it with --force")


@contextmanager
def _writing(path: Path, kind: OutputKind, force: bool) -> Iterator[tuple[Path, Path]]:
    """A workspace, and `path` with links resolved, as a rename must stay on one file system."""
    with as_build_error(path, kind.option):
        final = _followed(path)
        check_replaceable(path, kind, force=force)
        with workspace(final, shared=kind.is_cache) as directory:
            check_replaceable(path, kind, force=force)  # again: the workspace may have recovered one
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
        raise BuildError(f"cannot write {path}: {found}", hint=f"{first}choose another {option}") from error


def _followed(path: Path) -> Path:
    """`path` with links resolved; OSError for a link that leads to itself."""
    final = Path(os.path.realpath(path))
    if final.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return final


def _is_empty(path: Path) -> bool:
    return not any(path.iterdir()) if path.is_dir() else path.stat().st_size == 0


def _flush(path: Path) -> None:
    """Flushes to disk a path with all files and folders below it."""
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
