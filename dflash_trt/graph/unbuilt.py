# SPDX-License-Identifier: Apache-2.0
"""Facts of a draft that the graphs do not compute yet: each is refused by its name, none is dropped."""

from __future__ import annotations

from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.errors import BuildError


def refuse_unbuilt(spec: DraftSpec) -> None:
    """Raises BuildError for the first fact of `spec` that no graph computes."""
    unbuilt = {
        "layers.sinks": any(layer.sinks for layer in spec.layers),
        "biases": bool(spec.biases),
        "value_scale": spec.value_scale != 1,
        "tap_hidden_size": spec.tap_hidden_size not in (None, spec.hidden_size),
        "tap_norms": spec.tap_norms,
        "context_input_layernorm": spec.context_input_layernorm,
        "attention_gate": spec.attention_gate is not None,
        "rope.partial_rotary_factor": spec.rope.partial_rotary_factor != 1,
    }
    for feature, needed in unbuilt.items():
        if needed:
            raise BuildError(
                f"{feature}: expected a draft that does without, found one that needs it: the graphs do not compute it",
                hint="serve the checkpoint as it is: dflash-trt serve-config",
            )
