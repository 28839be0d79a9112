# SPDX-License-Identifier: Apache-2.0
"""Faster layers and operators for a CPU; without this room a runtime decodes the same, slower."""
