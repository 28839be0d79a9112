# SPDX-License-Identifier: Apache-2.0
"""The timing cache of TensorRT's builder: measured kernels, kept in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from dflash_trt.errors import BuildError
from dflash_trt.files.read import read_bytes
from dflash_trt.files.write import OutputKind, new_file

MAX_TIMING_BYTES = 2**30
TIMING_CACHE = OutputKind(
    name="a timing cache",
    recognizes=lambda file: True,  # TensorRT has read it, or `attach` has refused it
    form="file",
    option="--timing-cache FILE",
    is_cache=True,
)


class TimingCache(msgspec.Struct, frozen=True, kw_only=True):
    """A file that keeps what the builder measured."""

    file: Path
    reproducible: bool = False
    """Refuse to measure: every kernel is chosen from the file, so that builds with it choose alike."""

    def attach(self, trt: Any, config: Any) -> None:
        """Gives the file's content to a builder configuration; BuildError for a file of another GPU or version."""
        content = self._read()
        if self.reproducible:
            config.set_flag(trt.BuilderFlag.EDITABLE_TIMING_CACHE)
            config.set_flag(trt.BuilderFlag.ERROR_ON_TIMING_CACHE_MISS)
        cache = config.create_timing_cache(content)
        if cache is None or not config.set_timing_cache(cache, False):
            raise BuildError(
                f"{self.file} is a timing cache of another GPU or TensorRT, not of {trt.__version__}",
                hint="give --timing-cache another file",
            )

    def save(self, config: Any) -> None:
        """Writes what the build has learned; a reproducible build has learned nothing."""
        if self.reproducible:
            return
        with new_file(self.file, TIMING_CACHE, force=True) as temporary:
            temporary.write_bytes(memoryview(config.get_timing_cache().serialize()))

    def _read(self) -> bytes:
        if self.file.is_file():
            return read_bytes(self.file, BuildError, limit=MAX_TIMING_BYTES)
        if self.reproducible:
            raise BuildError(
                f"--reproducible: no timing cache at {self.file}", hint="build once without --reproducible to make it"
            )
        return b""
