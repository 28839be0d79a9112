# SPDX-License-Identifier: Apache-2.0
"""Compiles TensorRT plans into an engine directory, on the GPU machine. Not yet run with libnvinfer's builder."""
