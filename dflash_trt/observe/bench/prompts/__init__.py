# SPDX-License-Identifier: Apache-2.0
"""Prompts of a bench run: data sets of the hub, SPEED-Bench, and files."""
