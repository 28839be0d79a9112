# SPDX-License-Identifier: Apache-2.0
"""What runs on a GPU and knows no plan: streams and CUDA graphs, copies, kernels that torch.compile makes."""
