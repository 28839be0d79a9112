# SPDX-License-Identifier: Apache-2.0
"""Rows of a Parquet file from outside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from dflash_trt.errors import ConfigError
from dflash_trt.files.read import open_file

MAX_ROWS = 100_000
T = TypeVar("T")


def read_parquet(
    file: Path, columns: Sequence[str], kind: type[T], *, hint: str | None = None
) -> Iterator[tuple[str, T]]:
    """Each row's place and value, of those columns alone; raises ConfigError for a malformed file."""
    import pyarrow
    from pyarrow import parquet

    with open_file(file, ConfigError, hint=hint) as stream:
        try:
            table = parquet.ParquetFile(stream)
            if table.metadata.num_rows > MAX_ROWS:
                raise ConfigError(f"{file}: expected at most {MAX_ROWS} rows, found {table.metadata.num_rows}")
            rows = table.read(columns=list(columns)).to_pylist()
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file} is not a Parquet file: {error}", hint=hint) from None
    for number, row in enumerate(rows, start=1):
        where = f"{file}: row {number}"
        try:
            yield where, msgspec.convert(row, kind)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{where}: expected {', '.join(columns)}, found {error}", hint=hint) from None
