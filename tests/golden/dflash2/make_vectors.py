# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.golden.dflash2.make_vectors` writes what z-lab's package gives for each case, and its steps.

In an environment with `pip install --no-deps dflash==0.1.0` beside torch and transformers.
"""

import json
from pathlib import Path

from tests.golden.write_vectors import write_vectors
from tests.oracle.zlab_dflash2 import BLOCK_SIZES, CASES, run, verify_steps

if __name__ == "__main__":
    folder = Path(__file__).parent
    write_vectors(folder, CASES, run)
    steps = {str(block_size): verify_steps(block_size) for block_size in BLOCK_SIZES}
    (folder / "steps.json").write_text(json.dumps(steps) + "\n")
