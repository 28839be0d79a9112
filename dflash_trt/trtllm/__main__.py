# SPDX-License-Identifier: Apache-2.0
"""`python -m dflash_trt.trtllm trtllm-serve ...`: a command or Python file with our drafter registered in every rank.

TensorRT-LLM spawns its ranks with mpi4py, which imports the main module of the spawning process into each of them
(as `__worker__`), so module-level code runs in all of them; `--custom_module_dirs` alone reaches only the process that
was started. Ranks of trtllm-llmapi-launch register with their first task.
"""

from __future__ import annotations

import os
import sys

from dflash_trt.errors import DFlashError
from dflash_trt.trtllm.launch_environment import is_trtllm_launch
from dflash_trt.trtllm.registration import register, register_in_remote_ranks, run_command

if __name__ == "__main__":
    try:
        release = register()
        if is_trtllm_launch(os.environ):
            register_in_remote_ranks()
    except DFlashError as problem:
        sys.exit(f"error: {problem}")
    print(f"dflash-trt: drafter registered in TensorRT-LLM {release}", file=sys.stderr)
    run_command(sys.argv[1:])
else:
    register()
