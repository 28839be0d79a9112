# SPDX-License-Identifier: Apache-2.0
"""poolside's drafts of Laguna (architecture DFlashLagunaForCausalLM; SGLang's models/dflash.py, vLLM's laguna_dflash).

q, k and v lie in one tensor, every tap passes a norm of its own before fc, every layer's input_layernorm also goes
over the context rows, and a softplus gate over what attention returns. Causal, with a window in every layer.
"""

from __future__ import annotations

import re

from dflash_trt.checkpoint.dialects import zlab
from dflash_trt.checkpoint.dialects.dialect import Dialect, Places, Weights, has_architecture, layer_types, layers
from dflash_trt.checkpoint.draft_spec import DraftSpec, GateWidth
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.mapped import row_range

ARCHITECTURE = "DFlashLagunaForCausalLM"
GATES: dict[str, GateWidth] = {"per-head": "per_head", "per-element": "per_element"}
FUSED = re.compile(r"(layers\.\d+\.self_attn\.)qkv_proj\.(weight|bias)")


def recognises(config: Facts) -> bool:
    """Whether the architecture is Laguna's."""
    return has_architecture(config, ARCHITECTURE)


def read(config: Facts, weights: Weights) -> DraftSpec:
    """The facts of a Laguna draft."""
    places = Places(config)
    facts = places.read_facts()
    if config.optional("num_experts", lambda key: config.integer(key, minimum=0)):
        raise config.error("num_experts", "0 (a dense MLP)")
    if config.optional("draft_vocab_size", config.integer) not in (None, facts["vocab_size"]):
        raise config.conflict("draft_vocab_size", f"vocab_size {facts['vocab_size']}")
    entered = config.optional("eagle_aux_hidden_state_layer_ids", config.integers)
    if entered not in (None, tuple(tap + 1 for tap in facts["target_layer_ids"])):
        raise config.conflict("eagle_aux_hidden_state_layer_ids", "one more than each of target_layer_ids")
    return DraftSpec(
        **facts,
        model_type=config.text("model_type", choices=("laguna",)),
        layers=layers(layer_types(config), zlab.read_causality(places)),
        input_embedding_scale=1,
        tap_norms=True,
        context_input_layernorm=True,
        attention_gate=GATES[config.text("gating", choices=tuple(GATES))],
    )


def canonical(weights: Weights, spec: DraftSpec) -> Weights:
    """qkv_proj as three tensors: rows of it, which lie one behind the other, so that not a byte is moved."""
    q, kv = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
    result: Weights = {}
    for name, tensor in weights.items():
        match = FUSED.fullmatch(name)
        if match is None or tensor.shape[:1] != (q + 2 * kv,):
            result[name] = tensor
            continue
        begin = 0
        for part, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            own = f"{match[1]}{part}.{match[2]}"
            result[own] = row_range(tensor, own, begin, rows)
            begin += rows
    return result


LAGUNA = Dialect(name="laguna", recognises=recognises, read=read, is_canonical=False, canonical=canonical)
