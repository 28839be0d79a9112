# SPDX-License-Identifier: Apache-2.0
"""Bounded reading of bytes and UTF-8 text from regular files."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from dflash_trt.errors import DFlashError

KINDS = {
    stat.S_IFDIR: "Is a directory",  # the operating system's wording
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
MAX_NAME_BYTES = 255  # limit of a file's name on Linux
NUM_BYTES = 512
"""First bytes of a file that `foreign_content` looks at."""
AGAIN = "download the file again; a page in its place means that the download needs a login or another address"


def is_file_name(name: str) -> bool:
    """Whether `name`, which was read from a file, is a plain file name and never a path to another directory."""
    is_name = name not in ("", "..") and Path(name).name == name
    return is_name and name.isprintable() and len(name.encode()) <= MAX_NAME_BYTES


def is_directory(name: str) -> bool:
    """Whether `name`, which was read from a file, is a directory here; False for text that cannot be a path."""
    with suppress(OSError):  # too long, or no permission to look
        return bool(name) and Path(name).is_dir()
    return False


def is_file(name: str) -> bool:
    """Whether `name`, which was read from a file, is a regular file here."""
    with suppress(OSError):
        return bool(name) and Path(name).is_file()
    return False


@contextmanager
def open_file(
    file: Path, error: type[DFlashError], *, may_be_pipe: bool = False, hint: str | None = None
) -> Iterator[BinaryIO]:
    """Opens `file` for reading; refuses pipes, devices and sockets before reading a byte.

    `may_be_pipe` is for arguments such as `--prompts <(head -5 FILE)`. Raises `error` when the file cannot be read,
    also within the block.
    """
    try:
        is_pipe = may_be_pipe and stat.S_ISFIFO(file.stat().st_mode)
        # O_NONBLOCK: `open` would wait for a pipe without a writer.
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | (0 if is_pipe else os.O_NONBLOCK))
        with os.fdopen(descriptor, "rb") as stream:
            kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
            if kind != stat.S_IFREG and not (is_pipe and kind == stat.S_IFIFO):
                found = KINDS.get(kind, "something else")
                raise error(f"cannot read {file}: {found}", hint=hint)
            yield stream
    except (OSError, ValueError) as problem:  # ValueError: a NUL in the name
        found = problem.strerror if isinstance(problem, OSError) and problem.strerror else str(problem)
        raise error(f"cannot read {file}: {found}", hint=hint) from None


def read_bytes(
    file: Path, error: type[DFlashError], *, limit: int, may_be_pipe: bool = False, hint: str | None = None
) -> bytes:
    """The content of `file`; raises `error` when it cannot be read or is larger than `limit` bytes."""
    with open_file(file, error, may_be_pipe=may_be_pipe, hint=hint) as stream:
        content = stream.read(limit + 1)
    if len(content) > limit:
        raise error(f"{file}: expected at most {limit} bytes, found more", hint=hint)
    return content


def decode(
    content: bytes, where: object, error: type[DFlashError], *, what: str = "text", hint: str | None = None
) -> str:
    """`content`, which comes from `where`, as text; raises `error` with the first byte that is not UTF-8."""
    try:
        return content.decode()
    except UnicodeDecodeError as problem:
        found = f"byte {content[problem.start]:#04x} at {problem.start}, which is not UTF-8"
        raise error(f"{where}: expected {what}, found {found}", hint=hint) from None


def read_text(file: Path, error: type[DFlashError], *, limit: int) -> str:
    """The text of `file`; raises `error` when it cannot be read, is larger than `limit` bytes or not UTF-8."""
    return decode(read_bytes(file, error, limit=limit), file, error)


def foreign_content(begin: bytes) -> tuple[str, str] | None:
    """Name of the file's kind and a hint, by its first bytes; None for a file that may belong to a checkpoint."""
    text = begin.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith(b"version https://git-lfs"):
        return "a pointer of Git LFS", "fetch the file that it stands for: git lfs pull"
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "a web page", AGAIN
    return None
