# SPDX-License-Identifier: Apache-2.0
"""Writes directories that are either complete or not there."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_trt.errors import BuildError


@contextmanager
def new_directory(path: Path, *, force: bool = False) -> Iterator[Path]:
    """A temporary directory beside `path` that becomes `path` when the block ends without an error.

    An error removes it; what a killed process left is removed by the next call for the same path.
    Raises BuildError when `path` exists and `force` is false, or when it cannot be written (disk full).
    """
    try:
        final = Path(os.path.realpath(path))  # through links: the rename must stay on one file system
        if final.exists() and not (force and final.is_dir()):
            kind = "one" if final.is_dir() else "a file"
            raise BuildError(
                f"{path}: expected a directory that does not exist yet, found {kind}",
                hint="choose another -o DIR" + (", or replace it with --force" if final.is_dir() else ""),
            )
        _remove_abandoned(final)
        with _replacing(final, force) as temporary:
            yield temporary
    except OSError as error:
        found = f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
        raise BuildError(
            f"{path}: expected to write it, found: {found}", hint="free disk space or choose another -o DIR"
        ) from error


@contextmanager
def scratch_directory(path: Path) -> Iterator[Path]:
    """A name beside `path` for a directory on the way to it; whatever stands there at the end is removed."""
    final = Path(os.path.realpath(path))
    _remove_abandoned(final)
    scratch = final.with_name(f".{final.name}.scratch.partial-{os.getpid()}")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _replacing(final: Path, force: bool) -> Iterator[Path]:
    temporary = final.with_name(f".{final.name}.partial-{os.getpid()}")
    replaced = final.with_name(f".{final.name}.replaced.partial-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        _flush(temporary)
        if force and final.exists():
            final.rename(replaced)
        temporary.rename(final)
    finally:
        if replaced.exists() and not final.exists():
            replaced.rename(final)  # stopped between the two renames: the old directory comes back
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


def _remove_abandoned(path: Path) -> None:
    name = re.compile(rf"\.{re.escape(path.name)}\.((?:replaced|scratch)\.)?partial-(\d+)")
    for left in path.parent.glob(".*partial-*"):
        match = name.fullmatch(left.name)
        if match and match[1] == "scratch." and int(match[2]) == os.getpid():
            continue  # in use by this very build
        # A container gives every run the same process id: what bears ours was left by an earlier one.
        if match and (int(match[2]) == os.getpid() or not Path(f"/proc/{match[2]}").exists()):
            shutil.rmtree(left, ignore_errors=True)


def _flush(directory: Path) -> None:
    for entry in [*directory.iterdir(), directory]:
        descriptor = os.open(entry, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
