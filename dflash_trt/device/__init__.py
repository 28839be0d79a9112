# SPDX-License-Identifier: Apache-2.0
"""Work on a GPU without TensorRT: streams and CUDA graphs, uploads, functions that torch.compile fuses."""
