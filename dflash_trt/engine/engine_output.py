# SPDX-License-Identifier: Apache-2.0
"""Where an engine may be written, and how one that is there is recognised."""

from __future__ import annotations

from pathlib import Path

import msgspec

from dflash_trt.engine.manifest import MANIFEST
from dflash_trt.errors import BuildError
from dflash_trt.files.read import read_bytes
from dflash_trt.files.write import OutputKind, check_replaceable

MAX_MANIFEST_BYTES = 2**26


class _Marker(msgspec.Struct):
    """Keys that distinguish an engine's manifest.json, of any version, from those of web pages and packages."""

    schema_version: int
    tool_version: str
    graphs: dict[str, object]
    sha256: dict[str, str]


def is_engine(directory: Path) -> bool:
    """Whether a directory is one that `build` wrote, whole or damaged."""
    file = directory / MANIFEST
    try:
        return bool(msgspec.json.decode(read_bytes(file, BuildError, limit=MAX_MANIFEST_BYTES), type=_Marker))
    except (BuildError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


ENGINE = OutputKind(name="an engine directory", recognizes=is_engine)


def check_output(output: Path, *, force: bool) -> None:
    """Raises BuildError where no engine can be written; onnx takes only paths that are UTF-8."""
    try:
        str(output).encode()
    except UnicodeEncodeError:
        raise BuildError(
            f"{str(output)!r}: expected a path in UTF-8, found other bytes", hint="choose another -o DIR"
        ) from None
    check_replaceable(output, ENGINE, force=force)
