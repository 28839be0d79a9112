# SPDX-License-Identifier: Apache-2.0
"""The drafter as two ONNX graphs, written by hand, and their lowering for ONNX Runtime on a CPU."""
