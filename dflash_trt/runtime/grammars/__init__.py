# SPDX-License-Identifier: Apache-2.0
"""Structured outputs: what can be enforced, the grammars of llguidance, and the masks that enforce them."""
