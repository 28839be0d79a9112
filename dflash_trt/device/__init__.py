# SPDX-License-Identifier: Apache-2.0
"""GPU code that is independent of plans: streams and CUDA graphs, copies, kernels by torch.compile."""
