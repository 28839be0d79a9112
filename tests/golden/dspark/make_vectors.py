# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.golden.dspark.make_vectors` writes what DeepSeek's own code gives for each case.

With a checkout of github.com/deepseek-ai/DeepSpec @ afdfa7c9 in PYTHONPATH, beside torch and transformers.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from tests.oracle.deepspec_dspark import CASES, run


def main() -> None:
    """Writes vectors.npz."""
    with tempfile.TemporaryDirectory() as work:
        runs = {case.name: run(case, Path(work) / case.name) for case in CASES}
    arrays = {f"{name}/{key}": array for name, arrays in runs.items() for key, array in arrays.items()}
    np.savez_compressed(Path(__file__).parent / "vectors.npz", **arrays)


if __name__ == "__main__":
    main()
