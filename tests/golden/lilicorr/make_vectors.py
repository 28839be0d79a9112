# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.golden.lilicorr.make_vectors` writes the values of vLLM's LiLiCorr head for each case.

tests/oracle/vllm_lilicorr.py says which file it needs.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from tests.oracle.vllm_lilicorr import CASES, run


def main() -> None:
    """Writes vectors.npz."""
    with tempfile.TemporaryDirectory() as work:
        runs = {case.name: run(case, Path(work) / case.name) for case in CASES}
    arrays = {f"{name}/{key}": array for name, arrays in runs.items() for key, array in arrays.items()}
    np.savez_compressed(Path(__file__).parent / "vectors.npz", **arrays)


if __name__ == "__main__":
    main()
