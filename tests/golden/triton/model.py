# SPDX-License-Identifier: Apache-2.0
from dflash_trt.triton.model import TritonPythonModel as TritonPythonModel
