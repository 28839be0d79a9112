# SPDX-License-Identifier: Apache-2.0
"""Model repositories for Triton Inference Server, and the model that Triton runs."""
