# SPDX-License-Identifier: Apache-2.0
"""The engine directory: its graphs, how it is written, and the plans that TensorRT makes of it."""
