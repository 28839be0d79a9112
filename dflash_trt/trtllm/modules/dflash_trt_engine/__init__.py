# SPDX-License-Identifier: Apache-2.0
"""What `--custom_module_dirs` imports: registers the drafter in this process.

TensorRT-LLM puts the directory above this one first on sys.path, so that nothing else may lie beside this package.
"""

from dflash_trt.trtllm.registration import register

register()
