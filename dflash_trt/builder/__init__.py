# SPDX-License-Identifier: Apache-2.0
"""Writes engine directories."""
