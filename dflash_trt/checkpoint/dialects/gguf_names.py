# SPDX-License-Identifier: Apache-2.0
"""Maps llama.cpp's names of the tensors in a draft's GGUF file to z-lab's."""

from __future__ import annotations

import re

from dflash_trt.checkpoint.draft_spec import CONFIDENCE, MARKOV, SELECTOR

NAMES = {
    "fc": "fc", "enc.output_norm": "hidden_norm", "output_norm": "norm", "token_embd": "embed_tokens",
    "output": "lm_head", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "attn_conv_proj": "attention_conv.kernel_projection", "ffn_conv_proj": "mlp_conv.kernel_projection",
    "selector_hidden": f"{SELECTOR}.hidden_projection", "markov_w1": f"{MARKOV}.markov_w1",
    "markov_w2": f"{MARKOV}.markov_w2", "conf_proj": f"{CONFIDENCE}.proj",
}  # fmt: skip
"""Modules: z-lab's names by llama.cpp's, without the layer's prefix."""
BARE = {
    "attn_conv_base": "attention_conv.base_kernel", "ffn_conv_base": "mlp_conv.base_kernel",
    "attn_sinks.weight": "self_attn.sinks", "selector_predecessor.weight": f"{SELECTOR}.predecessor_codebook",
    "selector_successor.weight": f"{SELECTOR}.successor_codebook",
}  # fmt: skip
"""Tensors whose z-lab name does not end as llama.cpp's does."""
IN_LAYER = re.compile(r"blk\.(\d+)\.(.+)")


def zlab_name(name: str) -> str:
    """z-lab's name of a tensor; an unknown name stays as it is."""
    match = IN_LAYER.fullmatch(name)
    layer, rest = (f"layers.{match[1]}.", match[2]) if match else ("", name)
    if rest in BARE:
        return layer + BARE[rest]
    module, _, suffix = rest.rpartition(".")
    return f"{layer}{NAMES[module]}.{suffix}" if module in NAMES else name
