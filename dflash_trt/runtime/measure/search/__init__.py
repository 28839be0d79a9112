# SPDX-License-Identifier: Apache-2.0
"""Which recipe is smallest within a budget of acceptance: measured on captured answers."""
