# SPDX-License-Identifier: Apache-2.0
"""The note in a safetensors header that says who wrote the file: what bears ours may be replaced by us."""

from __future__ import annotations

from pathlib import Path

import msgspec

from dflash_trt import __version__
from dflash_trt.checkpoint.safetensors_file import MAX_HEADER_BYTES
from dflash_trt.errors import CheckpointError
from dflash_trt.files.read import open_file

PRODUCER_KEY = "producer"
PRODUCER = f"dflash-trt {__version__}"


class _Header(msgspec.Struct):
    metadata: dict[str, str] = msgspec.field(name="__metadata__", default_factory=dict)


def metadata(file: Path) -> dict[str, str]:
    """The metadata of a safetensors file's header; empty where there is none, or the file is something else."""
    try:
        with open_file(file, CheckpointError) as stream:
            length = int.from_bytes(stream.read(8), "little")
            return msgspec.json.decode(stream.read(min(length, MAX_HEADER_BYTES)), type=_Header).metadata
    except (CheckpointError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}


def is_ours(file: Path) -> bool:
    """Whether a safetensors file says that dflash-trt wrote it."""
    return metadata(file).get(PRODUCER_KEY, "").startswith("dflash-trt ")
