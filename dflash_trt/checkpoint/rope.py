# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: its parameters, and the frequencies they define."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Yarn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="yarn"):
    """YaRN (arXiv 2309.00071): interpolates low frequencies, keeps high ones, scales attention."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    """Whether the correction range is rounded to whole dimensions (gpt-oss: false)."""
    attention_factor: float
    """Multiplies cos and sin; 0.1 ln(factor) + 1 unless the checkpoint gives another."""


class Llama3(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="llama3"):
    """Llama 3.1's frequency scaling (transformers `modeling_rope_utils`, rope_type llama3)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


class Rope(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Rotary embedding of a draft, over the head or over its first dimensions."""

    theta: float
    scaling: Yarn | Llama3 | None
    partial_rotary_factor: float = 1
    """Part of the head that is rotated: its first int(head_dim * factor) dimensions, as in transformers."""
    interleaved: bool = False
    """Whether dimensions 2i and 2i + 1 are a pair (GPT-J, GLM); if not, i and i + rotary_dim / 2 are (NeoX)."""

    @property
    def attention_factor(self) -> float:
        """The factor on cos and sin."""
        return self.scaling.attention_factor if isinstance(self.scaling, Yarn) else 1.0

    def rotary_dim(self, head_dim: int) -> int:
        """Number of a head's dimensions that are rotated."""
        return int(head_dim * self.partial_rotary_factor)

    def inverse_frequencies(self, head_dim: int) -> NDArray[np.float64]:
        """Radians per position of each rotated pair, [rotary_dim / 2] float64."""
        import numpy as np

        head_dim = self.rotary_dim(head_dim)
        inverse = self.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        match self.scaling:
            case Yarn() as yarn:
                return inverse / yarn.factor + (inverse - inverse / yarn.factor) * self._yarn_share(yarn, head_dim)
            case Llama3() as llama3:
                return _llama3(llama3, inverse)
            case None:
                return inverse

    def _yarn_share(self, yarn: Yarn, head_dim: int) -> NDArray[np.float64]:
        """Share of the unscaled frequency that YaRN keeps for each pair: 1 for fast pairs, 0 for slow ones."""
        import numpy as np

        def dimension(rotations: float) -> float:
            context = yarn.original_max_position_embeddings
            return head_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = dimension(yarn.beta_fast), dimension(yarn.beta_slow)
        if yarn.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        high += 0.001 if low == high else 0  # keeps the ramp finite, as in transformers
        ramp = (np.arange(head_dim // 2, dtype=np.float64) - low) / (high - low)
        share: NDArray[np.float64] = 1 - np.clip(ramp, 0, 1)
        return share


def _llama3(scaling: Llama3, inverse: NDArray[np.float64]) -> NDArray[np.float64]:
    import numpy as np

    rotations = scaling.original_max_position_embeddings * inverse / (2 * math.pi)
    share = np.clip((rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0, 1)
    return inverse / scaling.factor + (inverse - inverse / scaling.factor) * share
