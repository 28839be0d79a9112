# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.golden.dspark.make_vectors` writes what DeepSeek's own code gives for each case.

With a checkout of github.com/deepseek-ai/DeepSpec @ afdfa7c9 in PYTHONPATH, beside torch and transformers.
"""

from pathlib import Path

from tests.golden.write_vectors import write_vectors
from tests.oracle.deepspec_dspark import CASES, run

if __name__ == "__main__":
    write_vectors(Path(__file__).parent, CASES, run)
