# SPDX-License-Identifier: Apache-2.0
"""Writes drafts in the layout of vLLM's Speculators library (speculators 0.9)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dflash_trt.checkpoint.dialects import dflash2, dspark, zlab
from dflash_trt.checkpoint.dialects.dialect import Layout, refuse_unless, unrepresentable
from dflash_trt.checkpoint.dialects.layer_types import LayerType, layers, windows_of
from dflash_trt.checkpoint.draft_spec import DraftSpec

VERSION = "0.9.0"
DEFAULTS = zlab.PLAIN | zlab.OPTIONAL
EXPRESSED = {
    fact: DEFAULTS[fact]
    for fact in (
        "own_embedding", "draft_vocab_size", "block_conv", "candidate_selector", "num_target_layers", "markov_head",
        "sample_from_anchor",
    )
}  # fmt: skip
"""Facts that the library expresses outside of the backbone, with z-lab's values."""
PLAIN = {fact: plain for fact, plain in DEFAULTS.items() if fact not in EXPRESSED}
"""Facts that the library cannot express, with their values for its drafts."""


def to_config(spec: DraftSpec, dtype: str) -> dict[str, object]:
    """config.json as speculators 0.9 writes it, but for the verifier's name; num_target_layers is ours."""
    refuse_unless("speculators", spec, PLAIN)
    windows, sinks, rope = windows_of(spec), [layer.sinks for layer in spec.layers], spec.rope
    for fact, expected, found, is_represented in (
        ("sliding_window", "one window for all sliding layers", sorted(windows), len(windows) <= 1),
        ("layers.sinks", "no sinks", sinks, not any(sinks)),
        ("partial_rotary_factor", "1", rope.partial_rotary_factor, rope.partial_rotary_factor == 1),
        ("rope.interleaved", "False", rope.interleaved, not rope.interleaved),
    ):
        if not is_represented:
            raise unrepresentable("speculators", fact, expected, found)
    _refuse_causality(spec)
    types = [LayerType(layer.sliding_window is not None, layer.sliding_window) for layer in spec.layers]
    plain = msgspec.structs.replace(spec, model_type="qwen3", layers=layers(types, None), **EXPRESSED)
    backbone = zlab.to_config(plain, dtype)
    for key in ("architectures", "block_size", "dflash_config"):
        del backbone[key]
    algorithm, architecture, more = "dflash", zlab.ARCHITECTURE, dict[str, object]()
    if spec.block_conv is not None or spec.candidate_selector is not None:
        algorithm, architecture = "dflash2", dflash2.ARCHITECTURES[0]
        more = dflash2.additions_to_config(spec, "speculators")
    elif spec.is_dspark:
        algorithm, architecture, more = "dspark", dspark.ARCHITECTURES[1], dspark.head_to_config(spec.markov_head)
    count = {} if spec.num_target_layers is None else {"num_target_layers": spec.num_target_layers}
    return {
        "architectures": [architecture],
        "aux_hidden_state_layer_ids": [tap + 1 for tap in spec.target_layer_ids],
        "block_size": spec.block_size,
        "draft_vocab_size": spec.draft_vocab_size or spec.vocab_size,
        "dtype": dtype,
        "mask_token_id": spec.mask_token_id,
        **count,
        "sample_from_anchor": spec.sample_from_anchor,
        "sliding_window_non_causal": not any(layer.causal for layer in spec.layers),
        **more,
        "speculators_model_type": algorithm,
        "speculators_version": VERSION,
        "target_hidden_size": None,
        "transformer_layer_config": backbone,
    }


def _refuse_causality(spec: DraftSpec) -> None:
    """Raises CheckpointError where the library, or vLLM 0.33, would compute another causality than that of `spec`."""
    found = [layer.causal for layer in spec.layers]
    if spec.is_dspark:
        if not zlab.follow_rule(spec.layers):
            raise unrepresentable("speculators", "causal", "sliding layers causal and full ones not, in DSpark", found)
    elif len(set(found)) > 1 or any(layer.causal for layer in spec.layers if layer.sliding_window is None):
        raise unrepresentable("speculators", "causal", "one value for all layers, true only if all slide", found)


def name_verifier(config: dict[str, object], name: str, architectures: Sequence[str]) -> dict[str, object]:
    """`config` with the target, which Speculators' readers load as the verifier of this draft."""
    block_size = config["block_size"]
    assert isinstance(block_size, int)
    num_draft_tokens = block_size if config["sample_from_anchor"] else block_size - 1
    proposal = {"proposal_type": "greedy", "speculative_tokens": num_draft_tokens}
    return config | {
        "speculators_config": {
            "algorithm": config["speculators_model_type"],
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": name, "architectures": list(architectures)},
        }
    }


LAYOUT = Layout(name="speculators", to_config=to_config, holds_quantised=False)
