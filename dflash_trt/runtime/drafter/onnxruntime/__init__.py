# SPDX-License-Identifier: Apache-2.0
"""The graphs lowered for ONNX Runtime: quantised weights, the attention operator, fused norms."""
