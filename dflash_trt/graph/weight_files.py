# SPDX-License-Identifier: Apache-2.0
"""Files of FLOAT weights that ONNX Runtime maps and packs from, each gone as soon as it is packed.

ONNX Runtime (1.31) maps the files of all weights, then packs one weight after the other, and unmaps its file. With the
files unlinked in between, each unmapped one gives back the memory that the next packed weight takes: in all little more
than the weights once, where one file for all would stand beside what is packed until the end.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dflash_trt.errors import EngineError

PIECE = 2**18
"""Values that are computed and written at a time: FLOAT, they stay in the cache of a core."""
MIN_BYTES = 2**20
"""Smaller files stay until the end: ONNX Runtime computes with some of them, and maps those when it likes."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - TemporaryDirectory makes the names in it
MAPS = Path("/proc/self/maps")
SECONDS_BETWEEN_LOOKS = 0.01


class Matrix(NamedTuple):
    """A weight, most often a matrix, that has not been computed yet."""

    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[NDArray[np.float32]]]
    """Computes it: its values in order, some at a time."""

    @property
    def num_bytes(self) -> int:
        """In FLOAT."""
        return 4 * math.prod(self.shape)


def split(*arrays: NDArray[Any]) -> Iterator[Sequence[NDArray[Any]]]:
    """Arrays of as many rows, some rows of each at a time: of the first, whose rows are longest, at most PIECE values.

    A scalar is one row.
    """
    rows = [np.atleast_1d(array) for array in arrays]
    step = max(1, PIECE // max(1, math.prod(rows[0].shape[1:])))
    for begin in range(0, len(rows[0]), step):
        yield [array[begin : begin + step] for array in rows]


@contextmanager
def weight_files(matrices: Sequence[Matrix]) -> Iterator[Path]:
    """A folder with a file for each weight, named by its number; what is left of it is gone afterwards.

    Raises EngineError where there is no room for it.
    """
    size = sum(matrix.num_bytes for matrix in matrices)
    with tempfile.TemporaryDirectory(prefix="dflash-trt-", dir=_folder_for(size)) as name:
        folder = Path(name).resolve()  # as it stands in the list of maps
        files = [folder / str(number) for number in range(len(matrices))]
        try:
            with ThreadPoolExecutor(torch.get_num_threads()) as pool:
                list(pool.map(_write, files, matrices))
        except OSError as error:
            raise EngineError(
                f"{folder}: expected room for {size / 2**30:.1f} GiB of FLOAT weights while they load, found: {error}",
                hint="set TMPDIR to a directory with more room",
            ) from None
        large = [file for file, matrix in zip(files, matrices, strict=True) if matrix.num_bytes >= MIN_BYTES]
        with _unlinking(large):
            yield folder


def _folder_for(num_bytes: int) -> Path | None:
    """Shared memory where it has the room; else where temporary files go, which costs seconds a GiB."""
    has_room = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 1.25 * num_bytes
    return SHARED_MEMORY if has_room else None


def _write(file: Path, matrix: Matrix) -> None:
    with file.open("wb") as stream:
        for piece in matrix.pieces():
            stream.write(piece.data)


@contextmanager
def _unlinking(files: Sequence[Path]) -> Iterator[None]:
    """A thread that unlinks `files` once all are mapped."""
    done = threading.Event()

    def look() -> None:
        while not done.wait(SECONDS_BETWEEN_LOOKS) and not unlink_mapped(files):
            pass

    thread = threading.Thread(target=look, name="dflash-trt weights")
    if files and MAPS.exists():
        thread.start()
    try:
        yield
    finally:
        done.set()
        if thread.ident is not None:
            thread.join()


def unlink_mapped(files: Iterable[Path]) -> bool:
    """Unlinks files if this process has mapped all of them. Otherwise none: who maps them still needs their names."""
    pending = {str(file) for file in files}
    with MAPS.open(encoding="utf-8", errors="surrogateescape") as maps:
        pending.difference_update(line.rstrip("\n").split(" ", 5)[-1].lstrip() for line in list(maps))
    if pending:
        return False
    for file in files:
        file.unlink()
    return True
