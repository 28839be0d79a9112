# SPDX-License-Identifier: Apache-2.0
"""A deployment file becomes resolved settings, memory, checks, and the text that TensorRT-LLM, vLLM and SGLang read."""
