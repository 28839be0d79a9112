# SPDX-License-Identifier: Apache-2.0
"""Settings of a recovery; loads no torch, for the command line's defaults."""

from __future__ import annotations

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that the user chooses."""

    steps: int = 1000
    seed: int = 0
    learning_rate: float = 3e-4
    """AdamW's, reached after 5 % of the steps; then half a cosine to 0."""
    sequences_per_step: int = 8
    anchors: int = 24
    """Blocks per sequence."""
    distillation: float = 0.5
    """The share of the loss that is the divergence from the draft as it was given, 0 to 1; the rest is the tokens'."""
