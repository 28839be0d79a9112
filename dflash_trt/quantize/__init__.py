# SPDX-License-Identifier: Apache-2.0
"""Recipes, calibration, scales and packing: a draft checkpoint becomes an NVFP4, FP8 or INT4 one."""
