# SPDX-License-Identifier: Apache-2.0
"""Refuses keys of config.json that no dialect has read and that are not known to change nothing."""

from __future__ import annotations

import json

from dflash_trt.checkpoint.dialects.allowed_keys import ALLOWED
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.errors import CheckpointError, cut

SECTION = "dflash_config"
BACKBONE = "transformer_layer_config"
ROTARY = ("rope_parameters", "rope_scaling")
PLAIN: dict[str, tuple[object, ...]] = {
    "attention_bias": (False,), "attention_mode": ("gqa", "mha"), "logit_scale": (1,), "mlp_bias": (False,),
    "norm_before_fc": (False,), "norm_before_residual": (False,), "projector_type": ("dflash", "dflash2", "dspark"),
    "shift_label": (False,), "use_aux_hidden_state": (True,), "use_qk_norm": (True,),
}  # fmt: skip
"""Values that change nothing, by key."""
ROTARY_KEYS = {
    "attention_factor", "beta_fast", "beta_slow", "factor", "finetuned", "high_freq_factor", "low_freq_factor",
    "mrope_interleaved", "mrope_section", "mscale", "mscale_all_dim", "original_max_position_embeddings",
    "partial_rotary_factor", "rope_theta", "rope_type", "truncate", "type",
}  # fmt: skip
"""Keys that a rotary section may hold, whatever its type uses; for text, the axes of M-RoPE agree."""


def refuse_unread(config: Facts) -> None:
    """Raises CheckpointError for the first unread key of `config` that may be a fact; all facts must be read before."""
    for place in (config, *_sections(config, BACKBONE)):
        for key in place.unread():
            if key not in (SECTION, *ROTARY):
                _refuse_unless_plain(place, key)
        for name in ROTARY:
            for section in _sections(place, name):
                for key in sorted(section.keys() - ROTARY_KEYS):
                    raise _unknown(section, key)
    for section in _sections(config, SECTION):
        for key in section.unread():
            _refuse_unless_plain(section, key)


def _refuse_unless_plain(place: Facts, key: str) -> None:
    if key in ALLOWED:
        return
    if key not in PLAIN:
        raise _unknown(place, key)
    if not any(place.holds(key, value) for value in PLAIN[key]):
        raise place.error(key, " or ".join(json.dumps(value) for value in PLAIN[key]) + ", which is what is computed")


def _unknown(place: Facts, key: str) -> CheckpointError:
    hint = f"if nothing is computed from {cut(key)}, remove it from config.json"
    return place.error(key, "only keys that are computed or known to change nothing", hint)


def _sections(place: Facts, name: str) -> list[Facts]:
    return [place.section(name)] if place.peek(name) else []
