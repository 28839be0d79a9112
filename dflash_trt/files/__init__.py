# SPDX-License-Identifier: Apache-2.0
"""Reads bytes from outside and writes results: strict JSON and YAML, atomic files and directories."""
