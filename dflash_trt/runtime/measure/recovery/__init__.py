# SPDX-License-Identifier: Apache-2.0
"""Quantisation-aware training: a draft learns to be quantised, from captured features alone."""
