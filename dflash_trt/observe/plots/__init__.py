# SPDX-License-Identifier: Apache-2.0
"""Curves of throughput against a user's speed, predicted or measured: reading them, drawing them, pages about them."""
