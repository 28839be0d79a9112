# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.golden.lilicorr.make_vectors` writes the values of vLLM's LiLiCorr head for each case.

tests/oracle/vllm_lilicorr.py says which file it needs.
"""

from pathlib import Path

from tests.golden.write_vectors import write_vectors
from tests.oracle.vllm_lilicorr import CASES, run

if __name__ == "__main__":
    write_vectors(Path(__file__).parent, CASES, run)
