# SPDX-License-Identifier: Apache-2.0
"""JetSpec (arXiv 2606.18394): z-lab's tensors and keys, trained with a causal block, which causal_head marks.

Proposed as a chain, its drafts are those of a causal DFlash draft. A file without causal_head is z-lab's.
"""

from __future__ import annotations

from dflash_trt.checkpoint.dialects import zlab
from dflash_trt.checkpoint.dialects.dialect import Dialect
from dflash_trt.checkpoint.dialects.keys import SECTION
from dflash_trt.checkpoint.dialects.shared_keys import section_keys
from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.safetensors_file import Weights

KEY = "causal_head"


def recognises(config: Facts) -> bool:
    """Whether dflash_config has causal_head."""
    return KEY in section_keys(config, SECTION)


def read(config: Facts, weights: Weights) -> DraftSpec:
    """z-lab's facts; causal_head is the causality of every layer, and other keys must agree."""
    dflash = config.section(SECTION)
    causal = dflash.flag(KEY)
    for place in (dflash, config):
        for key in ("causal", "is_causal"):
            if key in place and place.flag(key) != causal:
                raise place.error(key, f"{str(causal).lower()}, as dflash_config.{KEY} says")
    return zlab.read(config, weights, causal=causal)


JETSPEC = Dialect(name="jetspec", recognises=recognises, read=read, is_canonical=True)
