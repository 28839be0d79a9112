# SPDX-License-Identifier: Apache-2.0
"""Keys of config.json that no dialect has read: those that change nothing pass, those that might are refused by name.

What is read is computed. Of the rest, `dflash_config` and the rotary sections may hold nothing but what is listed
here; the top level, full of transformers' own keys, nothing whose name speaks of what a draft computes.
"""

from __future__ import annotations

import json
import re

from dflash_trt.checkpoint.facts import Facts
from dflash_trt.errors import CheckpointError, cut

SECTION = "dflash_config"
BACKBONE = "transformer_layer_config"
ROTARY = ("rope_parameters", "rope_scaling")
SPEAKS = re.compile(
    "rope|rotary|neox|interleav|causal|anchor|predict|shift|norm|gate|gating|scal|multiplier|softcap|window|swa|head"
    "|bias|sink|conv_|selector|markov|projector|attention_mode"
)
"""Parts of names that may be of what a draft computes."""
TRAINING = re.compile(
    r"loss|anchors|^confidence_\w+_alpha$|^dpace_|dropout|_decay|schedule|warmup|learning_rate|^train_"
    "|^moe_|router|expert"
)
"""Names of losses, schedules and what else only training reads; and of experts, whose tensors would not fit."""
INERT = {
    "eagle_aux_hidden_state_layer_ids", "max_window_layers", "norm_topk_prob", "num_aux_layers", "pard_token",
    "sliding_window", "target_num_hidden_layers",
}  # fmt: skip
"""Keys that say again what others say (windows follow from layer_types), or speak of experts."""
PLAIN: dict[str, tuple[object, ...]] = {
    "attention_bias": (False,), "attention_mode": ("gqa", "mha"), "logit_scale": (1,), "mlp_bias": (False,),
    "norm_before_fc": (False,), "norm_before_residual": (False,), "projector_type": ("dflash", "dflash2", "dspark"),
    "shift_label": (False,), "use_aux_hidden_state": (True,), "use_qk_norm": (True,),
}  # fmt: skip
"""Values with which a key changes nothing."""
ROTARY_KEYS = {
    "attention_factor", "beta_fast", "beta_slow", "factor", "finetuned", "high_freq_factor", "low_freq_factor",
    "mrope_interleaved", "mrope_section", "mscale", "mscale_all_dim", "original_max_position_embeddings",
    "partial_rotary_factor", "rope_theta", "rope_type", "truncate", "type",
}  # fmt: skip
"""What a rotary section may hold, used or not by its type; with text alone, the axes of M-RoPE agree."""


def refuse_unread(config: Facts) -> None:
    """Raises CheckpointError for the first key of `config`, after its facts were read, that might have been one."""
    for place in (config, *_sections(config, BACKBONE)):
        for key in place.unread():
            if SPEAKS.search(key.lower()) and key not in (SECTION, *ROTARY):
                _refuse_unless_plain(place, key)
        for name in ROTARY:
            for section in _sections(place, name):
                for key in sorted(section.keys() - ROTARY_KEYS):
                    raise _unknown(section, key)
    for section in _sections(config, SECTION):
        for key in section.unread():
            _refuse_unless_plain(section, key)


def _refuse_unless_plain(place: Facts, key: str) -> None:
    if key in INERT or TRAINING.search(key.lower()):
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
