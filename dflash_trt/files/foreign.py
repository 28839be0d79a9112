# SPDX-License-Identifier: Apache-2.0
"""Names what a download left in the place of a file, by its first bytes."""

from __future__ import annotations

NUM_BYTES = 512
"""First bytes of a file that `foreign_content` looks at."""
AGAIN = "download the file again; a page in its place means that the download needs a login or another address"


def foreign_content(begin: bytes) -> tuple[str, str] | None:
    """Name of the file's kind and a hint, by its first bytes; None for a file that may belong to a checkpoint."""
    text = begin.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith(b"version https://git-lfs"):
        return "a pointer of Git LFS", "fetch the file that it stands for: git lfs pull"
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "a web page", AGAIN
    return None
