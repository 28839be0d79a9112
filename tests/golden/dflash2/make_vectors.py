# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.golden.dflash2.make_vectors` writes what z-lab's package gives for each case, and its steps.

In an environment with `pip install --no-deps dflash==0.1.0` beside torch and transformers.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np

from tests.oracle.zlab_dflash2 import BLOCK_SIZES, CASES, run, verify_steps


def main() -> None:
    """Writes vectors.npz and steps.json."""
    with tempfile.TemporaryDirectory() as work:
        runs = {case.name: run(case, Path(work) / case.name) for case in CASES}
    arrays = {f"{name}/{key}": array for name, arrays in runs.items() for key, array in arrays.items()}
    np.savez_compressed(Path(__file__).parent / "vectors.npz", **arrays)
    steps = {str(block_size): verify_steps(block_size) for block_size in BLOCK_SIZES}
    (Path(__file__).parent / "steps.json").write_text(json.dumps(steps) + "\n")


if __name__ == "__main__":
    main()
