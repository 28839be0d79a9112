# SPDX-License-Identifier: Apache-2.0
"""Metrics, traces and the log."""
