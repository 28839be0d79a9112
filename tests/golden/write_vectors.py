# SPDX-License-Identifier: Apache-2.0
"""Writes golden values of an oracle's cases."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np


class Case(Protocol):
    """A case of an oracle."""

    @property
    def name(self) -> str:
        """The prefix of its arrays."""


C = TypeVar("C", bound=Case)


def write_vectors(folder: Path, cases: Iterable[C], run: Callable[[C, Path], dict[str, np.ndarray[Any, Any]]]) -> None:
    """Writes vectors.npz with the arrays that `run` gives for each case, which gets a directory of its own."""
    with tempfile.TemporaryDirectory() as work:
        runs = {case.name: run(case, Path(work) / case.name) for case in cases}
    arrays = {f"{name}/{key}": array for name, found in runs.items() for key, array in found.items()}
    np.savez_compressed(folder / "vectors.npz", **arrays)
