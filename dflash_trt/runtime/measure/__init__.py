# SPDX-License-Identifier: Apache-2.0
"""Judges a draft by running it: verify, capture, replay, calibrate, search a recipe, recover from quantisation."""
