# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding: its parameters and frequencies, and both spellings of config.json, of which one is written."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from dflash_trt.checkpoint.facts import Facts

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


PARTIAL = "partial_rotary_factor"
NEOX = ("is_neox_style", "rope_is_neox_style")
"""False: pairs lie side by side. The first is vLLM's key (0.33, qwen3_dflash.py), the second SGLang's."""


def read_rope(config: Facts) -> Rope:
    """Rope facts in both spellings: rope_theta + rope_scaling, and rope_parameters (transformers >= 5).

    Raises CheckpointError where the two contradict each other.
    """
    interleaved = _read_interleaved(config)
    key = next((key for key in ("rope_parameters", "rope_scaling") if key in config), None)
    if key is None:
        return Rope(
            theta=_read_theta(config), scaling=None, partial_rotary_factor=_read_part(config), interleaved=interleaved
        )
    section = config.section(key)
    for fact in ("rope_theta", PARTIAL):
        if not section.agrees(config, fact):
            raise config.conflict(fact, f"the same value as in {key}.{fact}")
    scaling = _read_scaling(section)
    if key == "rope_parameters":
        place = section
        if "rope_scaling" in config and _read_scaling(config.section("rope_scaling")) != scaling:
            raise config.error("rope_scaling", "what rope_parameters says, or null")
    else:
        place = config
        if PARTIAL in section and PARTIAL not in config and section.number(PARTIAL) != 1:
            raise section.conflict(PARTIAL, f"the same value as {PARTIAL} at the top level")
    part = _read_part(place if PARTIAL in place else config)
    return Rope(theta=_read_theta(place), scaling=scaling, partial_rotary_factor=part, interleaved=interleaved)


def _read_interleaved(config: Facts) -> bool:
    styles = {key: config.flag(key) for key in NEOX if key in config}
    if len(set(styles.values())) > 1:
        raise config.conflict(NEOX[1], f"the same value as {NEOX[0]}")
    return False in styles.values()


def spell_rope(rope: Rope) -> dict[str, object]:
    """Spells `rope` as rope_theta and rope_scaling, which every runtime reads; nothing is left to defaults."""
    scaling: dict[str, object] | None = None
    if rope.scaling is not None:
        kind = "yarn" if isinstance(rope.scaling, Yarn) else "llama3"
        scaling = {"rope_type": kind, **msgspec.structs.asdict(rope.scaling)}
    part = {PARTIAL: rope.partial_rotary_factor} if rope.partial_rotary_factor != 1 else {}
    style = {NEOX[0]: False} if rope.interleaved else {}
    return {"rope_theta": rope.theta, "rope_scaling": scaling, **part, **style}


def _read_part(section: Facts) -> float:
    part = section.number(PARTIAL, default=1)
    if part > 1:
        raise section.error(PARTIAL, "a number > 0 and at most 1")
    return part


def _read_theta(section: Facts) -> float:
    theta = section.number("rope_theta")
    if theta <= 1:
        raise section.error("rope_theta", "a number > 1")
    return theta


def _read_scaling(section: Facts) -> Yarn | Llama3 | None:
    type_key = "rope_type" if "rope_type" in section else "type"  # "type" is the older spelling
    match section.text(type_key, choices=("default", "yarn", "llama3")):
        case "yarn":
            return _read_yarn(section)
        case "llama3":
            low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
            if low >= high:
                raise section.error("high_freq_factor", f"a number > low_freq_factor {low}")
            return Llama3(
                factor=section.number("factor"),
                low_freq_factor=low,
                high_freq_factor=high,
                original_max_position_embeddings=section.integer("original_max_position_embeddings"),
            )
        case _:
            return None


def _read_yarn(section: Facts) -> Yarn:
    """beta_fast, beta_slow, truncate and the attention factor have defaults that YaRN's format defines."""
    factor = section.number("factor")
    return Yarn(
        factor=factor,
        original_max_position_embeddings=section.integer("original_max_position_embeddings"),
        beta_fast=section.number("beta_fast", default=32),
        beta_slow=section.number("beta_slow", default=1),
        truncate=section.flag("truncate", default=True),
        attention_factor=_yarn_attention_factor(section, factor),
    )


def _yarn_attention_factor(section: Facts, factor: float) -> float:
    """attention_factor, else mscale / mscale_all_dim (DeepSeek), else 0.1 ln(factor) + 1 (YaRN, eq. 22)."""

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0

    if "attention_factor" in section:
        return section.number("attention_factor")
    if "mscale" in section and "mscale_all_dim" in section:
        return temperature(section.number("mscale")) / temperature(section.number("mscale_all_dim"))
    return temperature(1)
