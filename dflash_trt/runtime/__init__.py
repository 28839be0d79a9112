# SPDX-License-Identifier: Apache-2.0
"""The same engine where no TensorRT-LLM is: the decode loop, and in its folders what the loop drives."""
