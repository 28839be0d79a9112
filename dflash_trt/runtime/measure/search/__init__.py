# SPDX-License-Identifier: Apache-2.0
"""Searches the smallest recipe within a budget of acceptance, measured on captured answers."""
