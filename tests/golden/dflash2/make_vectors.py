# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.golden.dflash2.make_vectors` writes what z-lab's package gives for each case.

In an environment with `pip install --no-deps dflash==0.1.0` beside torch and transformers.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from tests.oracle.zlab_dflash2 import CASES, run


def main() -> None:
    """Writes vectors.npz."""
    with tempfile.TemporaryDirectory() as work:
        runs = {case.name: run(case, Path(work) / case.name) for case in CASES}
    arrays = {f"{name}/{key}": array for name, arrays in runs.items() for key, array in arrays.items()}
    np.savez_compressed(Path(__file__).parent / "vectors.npz", **arrays)


if __name__ == "__main__":
    main()
