# SPDX-License-Identifier: Apache-2.0
"""Both graphs in torch: a function for each ONNX operator, patterns that have a kernel, and weights from their file."""
