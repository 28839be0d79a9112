# SPDX-License-Identifier: Apache-2.0
"""Servers seen from outside, and predictions: an extra that only the command line imports."""
