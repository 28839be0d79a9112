# SPDX-License-Identifier: Apache-2.0
"""Drafts as GGUF files, written by the package gguf with the keys and names of llama.cpp's converter."""

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load_file

NAMES = {
    "fc": "fc", "hidden_norm": "enc.output_norm", "norm": "output_norm", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "attention_conv.kernel_projection": "attn_conv_proj", "mlp_conv.kernel_projection": "ffn_conv_proj",
    "candidate_selector.hidden_projection": "selector_hidden", "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2", "confidence_head.proj": "conf_proj", "embed_tokens": "token_embd",
    "lm_head": "output",
}  # fmt: skip
WHOLE = {
    "attention_conv.base_kernel": "attn_conv_base", "mlp_conv.base_kernel": "ffn_conv_base",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
}  # fmt: skip
Type = gguf.GGMLQuantizationType


def llama_name(name: str) -> str:
    """llama.cpp's name of a tensor of z-lab's."""
    layer, rest = re.fullmatch(r"(?:layers\.(\d+)\.)?(.+)", name).groups()
    prefix = "" if layer is None else f"blk.{layer}."
    module, _, suffix = rest.rpartition(".")
    return prefix + (WHOLE.get(rest) or f"{NAMES[module]}.{suffix}")


def write_gguf(draft: Path, file: Path, kind: int = Type.BF16, *, skip: tuple[str, ...] = (), **changed: Any) -> Path:
    """The draft of z-lab's layout as a GGUF file, matrices of type `kind` where their columns allow it, the rest F32.

    `skip` and `changed` leave out and replace keys: `block_size=8`, `attention__causal=False`.
    """
    config = json.loads((draft / "config.json").read_text())
    section = config.get("dflash_config", {})
    value = config | section
    rope = config.get("rope_scaling") or {}
    keys: dict[str, Any] = {
        "block_count": config["num_hidden_layers"], "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"], "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"], "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(config["rope_theta"]), "rope.dimension_count": config["head_dim"],
        "block_size": value["block_size"], "target_layers": [i + 1 for i in value["target_layer_ids"]],
        "mask_token_id": value["mask_token_id"], "vocab_size": config["vocab_size"],
    }  # fmt: skip
    for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
        keys |= {key: section[key]} if key in section else {}
    if "is_causal" in config:
        keys["attention.causal"] = config["is_causal"]
    if any("sliding" in kind for kind in config.get("layer_types", ())):
        keys["attention.sliding_window"] = config["sliding_window"]
        keys["attention.sliding_window_pattern"] = ["sliding" in kind for kind in config["layer_types"]]
    if rope.get("rope_type") == "yarn":
        keys |= {"rope.scaling.type": "yarn", "rope.scaling.factor": float(rope["factor"]),
                 "rope.scaling.original_context_length": rope["original_max_position_embeddings"]}  # fmt: skip
    keys |= {key.replace("__", "."): new for key, new in changed.items()}
    writer = gguf.GGUFWriter(file, str(keys.pop("architecture", "dflash")))
    writer.add_token_list([f"token {i}" for i in range(keys.pop("vocab_size"))])
    writer.add_mask_token_id(keys.pop("mask_token_id"))
    for key, new in keys.items():
        if key not in skip:
            _add(writer, f"dflash.{key}", new)
    for name, tensor in load_file(draft / "model.safetensors").items():
        _add_tensor(writer, llama_name(name), tensor.float().numpy(), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
             list: writer.add_array}  # fmt: skip
    kinds[type(value)](key, value)


def _add_tensor(writer: gguf.GGUFWriter, name: str, values: NDArray[np.float32], kind: int) -> None:
    per_block, _ = gguf.GGML_QUANT_SIZES[kind]
    if values.ndim == 1 or values.shape[-1] % per_block or name.endswith("conv_base"):
        kind = Type.F32
    writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
