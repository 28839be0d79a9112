# SPDX-License-Identifier: Apache-2.0
"""Runs an engine directory without TensorRT-LLM: the decode loop, and in its folders what the loop drives."""
