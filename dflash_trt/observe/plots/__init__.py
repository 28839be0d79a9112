# SPDX-License-Identifier: Apache-2.0
"""Throughput against a user's speed, predicted or measured: the points that count, and the picture of them."""
