# SPDX-License-Identifier: Apache-2.0
"""poolside's drafts of Laguna (architecture DFlashLagunaForCausalLM; SGLang's models/dflash.py, vLLM's laguna_dflash).

q, k and v are one tensor, every tap passes its own norm before fc, context rows pass every layer's input_layernorm,
too, and attention's output is multiplied by a softplus gate. All layers are causal and have a window.
"""

from __future__ import annotations

import re

from dflash_trt.checkpoint.decoded_tensor import row_range
from dflash_trt.checkpoint.dialects import zlab
from dflash_trt.checkpoint.dialects.dialect import Dialect
from dflash_trt.checkpoint.dialects.shared_keys import Places, layer_types, layers, recognised_by
from dflash_trt.checkpoint.draft_spec import DraftSpec, GateWidth
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.safetensors_file import Weights

ARCHITECTURE = "DFlashLagunaForCausalLM"
GATES: dict[str, GateWidth] = {"per-head": "per_head", "per-element": "per_element"}
FUSED = re.compile(r"(layers\.\d+\.self_attn\.)qkv_proj\.(weight|bias)")


def read(config: Facts, weights: Weights) -> DraftSpec:
    """The facts of a Laguna draft."""
    places = Places(config)
    facts = places.read_facts()
    if config.optional("num_experts", lambda key: config.integer(key, minimum=0)):
        raise config.error("num_experts", "0 (a dense MLP)")
    if config.optional("draft_vocab_size", config.integer) not in (None, facts["vocab_size"]):
        raise config.conflict("draft_vocab_size", f"vocab_size {facts['vocab_size']}")
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
    """Splits qkv_proj into three tensors, views of its rows; no data is copied."""
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


LAGUNA = Dialect(
    name="laguna",
    recognises=recognised_by(architectures=(ARCHITECTURE,)),
    read=read,
    is_canonical=False,
    canonical=canonical,
)
