# SPDX-License-Identifier: Apache-2.0
"""Drafts in GGUF, as llama.cpp's conversion/qwen.py writes them (DFlashModel; architecture "dflash").

Qwen3's layers with rotated halves. Tap i is `target_layers` i + 1, the mask token the tokenizer's; a draft with
`selector_*` tensors is DFlash2, one with `markov_*` DSpark. llama.cpp's files have no biases.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from dflash_trt.checkpoint.decoded_tensor import DecodedTensor
from dflash_trt.checkpoint.dialects import dflash2, dspark, zlab
from dflash_trt.checkpoint.dialects.dialect import Dialect, renamed
from dflash_trt.checkpoint.dialects.shared_keys import FULL, MAX_LAYERS, SLIDING, recognised_by
from dflash_trt.checkpoint.draft_spec import CONFIDENCE, MARKOV, SELECTOR, DraftSpec
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.gguf_file import read_gguf
from dflash_trt.checkpoint.gguf_tensor import SERVED
from dflash_trt.checkpoint.safetensors_file import Weights
from dflash_trt.errors import CheckpointError, cut

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


ARCHITECTURE, PREFIX = "dflash", "dflash."
KIND, MASK, TOKENS = "general.architecture", "tokenizer.ggml.mask_token_id", "tokenizer.ggml.tokens"
INERT = {
    "attention.value_length", "expert_feed_forward_length", "expert_shared_feed_forward_length",
    "rope.dimension_sections", "rope.scaling.finetuned", "target_hidden_size", "vocab_size",
}  # fmt: skip
"""Keys that change nothing: text rotates all axes of M-RoPE alike, and tensor shapes imply the others."""
PLAIN = {"expert_count": 0, "expert_used_count": 0, "attention.clamp_kqv": 0.0, "rope.scaling.attn_factor": 1.0}
"""Values that change nothing, by key."""
RUNTIME = {"logit_scale": "output_multiplier", "final_logit_softcapping": "final_logit_softcapping",
           "embedding_scale": "input_embedding_scale"}  # fmt: skip
SIZES = {
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "context_length": "max_position_embeddings", "block_size": "block_size",
}  # fmt: skip


def read_metadata(file: Path) -> Facts:
    """The draft's metadata from a GGUF header; raises CheckpointError for a file of another architecture."""
    gguf = read_gguf(file)
    if (found := gguf.metadata.get(KIND)) != ARCHITECTURE:
        hint = "targets and other drafters are read from safetensors alone; llama.cpp serves their GGUF files"
        if isinstance(found, str) and ARCHITECTURE in found:
            hint = (
                "forks of llama.cpp write and serve it; convert the safetensors with llama.cpp's own"
                " convert_hf_to_gguf.py, or give them to dflash-trt"
            )
        raise CheckpointError(
            f"{file}: {KIND}: expected {ARCHITECTURE}, a draft of DFlash's family, found {cut(str(found))}", hint=hint
        )
    kept = {key: value for key, value in gguf.metadata.items() if key.startswith(PREFIX) or key in (KIND, MASK, TOKENS)}
    return Facts(kept, file)


def load(file: Path) -> Weights:
    """The tensors by z-lab's names."""
    tensors = read_gguf(file).tensors
    for name in tensors:
        if name == "d2t" or name.endswith((".scale", ".input_scale")):
            what = "a smaller vocabulary" if name == "d2t" else "scales beside the weights"
            raise CheckpointError(f"{file}: expected tensors of whole weights, found {name!r} ({what})", hint=SERVED)
    return renamed(tensors, zlab_name)


def describe(weights: Weights) -> str:
    """'GGUF: 38 Q8_0, 20 F32; Q8_0 read as BF16'."""
    packed = Counter(each.stored_type for each in weights.values() if isinstance(each, DecodedTensor))
    plain = Counter(each.dtype for each in weights.values() if not isinstance(each, DecodedTensor))
    counts = ", ".join(f"{count} {kind}" for kind, count in (packed + plain).most_common())
    return f"GGUF: {counts}" + (f"; {', '.join(sorted(packed))} read as BF16" if packed else "")


def read(config: Facts, weights: Weights) -> DraftSpec:
    """The facts of a GGUF file's metadata; its tensors say whether it is DFlash, DFlash2 or DSpark."""
    values = _as_config(config, weights)
    facts, section = Facts(values, config.file), values["dflash_config"]
    assert isinstance(section, dict)
    if "markov_rank" in section:
        return dspark.read(facts, weights)
    return dflash2.read(facts, weights) if "selector_rank" in section else zlab.read(facts, weights)


def refuse_unread(config: Facts) -> None:
    """Raises CheckpointError for metadata of the draft that was not read and may change what it computes."""
    for key in config.unread():
        name = key.removeprefix(PREFIX)
        if name == key or name in INERT or (name in PLAIN and config.holds(key, PLAIN[name])):
            continue
        raise config.error(key, "only keys that are computed or known to change nothing", SERVED)


def _as_config(config: Facts, weights: Weights) -> dict[str, object]:
    """config.json as z-lab would have written it."""
    num_layers = config.integer(f"{PREFIX}block_count", maximum=MAX_LAYERS)
    head_dim = config.integer(f"{PREFIX}attention.key_length")
    layers = _layers(config, num_layers)
    section: dict[str, object] = {"mask_token_id": config.integer(MASK, minimum=0)}
    entered = config.integers(f"{PREFIX}target_layers")
    if min(entered) < 1:
        raise config.error(f"{PREFIX}target_layers", "ids from 1 on (the residual stream that enters a decoder layer)")
    section["target_layer_ids"] = [layer - 1 for layer in entered]
    anchor = f"{PREFIX}sample_from_anchor"
    has_markov = f"{MARKOV}.markov_w1.weight" in weights
    if has_markov and anchor not in config:
        raise config.error(anchor, "true or false, which runtimes take differently where a DSpark draft says nothing")
    section["sample_from_anchor"] = config.flag(anchor, default=False)
    section |= _additions(config, weights) | (_head(weights) if has_markov else {})
    architecture = dspark.ARCHITECTURES[0] if has_markov else zlab.ARCHITECTURE
    if "selector_rank" in section:
        architecture = dflash2.ARCHITECTURES[0]
    rotary = config.optional(f"{PREFIX}rope.dimension_count", config.integer) or head_dim
    return {
        "architectures": [architecture],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "attention_bias": "layers.0.self_attn.q_proj.bias" in weights,
        "num_hidden_layers": num_layers,
        "rms_norm_eps": config.number(f"{PREFIX}attention.layer_norm_rms_epsilon"),
        "rope_theta": config.number(f"{PREFIX}rope.freq_base"),
        "rope_scaling": _scaling(config),
        "partial_rotary_factor": rotary / head_dim,
        "vocab_size": config.integer(TOKENS),
        "dflash_config": section,
        **{own: config.integer(f"{PREFIX}{key}") for key, own in SIZES.items()},
        **{own: config.number(f"{PREFIX}{key}") for key, own in RUNTIME.items() if f"{PREFIX}{key}" in config},
        **layers,
    }


def _layers(config: Facts, num_layers: int) -> dict[str, object]:
    """Windows and causality; a key that is not there was not in the config.json that was converted either."""
    window, pattern = f"{PREFIX}attention.sliding_window", f"{PREFIX}attention.sliding_window_pattern"
    causal = f"{PREFIX}attention.causal"
    layers: dict[str, object] = {"is_causal": config.flag(causal)} if causal in config else {}
    slides = config.flags(pattern) if pattern in config else (False,) * num_layers
    if len(slides) != num_layers:
        raise config.error(pattern, f"{num_layers} times true or false")
    size = config.optional(window, lambda key: config.integer(key, minimum=0))
    if any(slides) and not size:
        raise config.error(window, "the window of the layers that slide")
    types = [SLIDING if each else FULL for each in slides]
    return layers | {"layer_types": types, "sliding_window": size if any(slides) else None}


def _additions(config: Facts, weights: Weights) -> dict[str, object]:
    """Convolutions and selector of a DFlash2 draft."""
    keys = [key for key in dflash2.KEYS if f"{PREFIX}{key}" in config]
    if not keys and f"{SELECTOR}.hidden_projection.weight" not in weights:
        return {}
    return {key: config.integer(f"{PREFIX}{key}") for key in sorted(dflash2.KEYS)}


def _head(weights: Weights) -> dict[str, object]:
    """A Markov head, whose sizes are those of its tensors; llama.cpp has no gated ones."""
    confidence = f"{CONFIDENCE}.proj.weight" in weights
    return {
        "markov_rank": weights[f"{MARKOV}.markov_w1.weight"].shape[-1],
        "markov_head_type": "vanilla",
        "enable_confidence_head": confidence,
        dspark.WITH_MARKOV: confidence,
    }


def _scaling(config: Facts) -> dict[str, object] | None:
    """YaRN, or none; llama.cpp rounds its correction range, and scales attention as YaRN's paper does."""
    place = f"{PREFIX}rope.scaling."
    kind = config.optional(f"{place}type", lambda key: config.text(key, choices=("none", "yarn")))
    if kind != "yarn":
        return None
    length = config.integer(f"{place}original_context_length")
    scaling = {"rope_type": kind, "factor": config.number(f"{place}factor"), "original_max_position_embeddings": length}
    betas = {beta: f"{place}yarn_{beta}" for beta in ("beta_fast", "beta_slow")}
    return scaling | {beta: config.number(key) for beta, key in betas.items() if key in config}


GGUF = Dialect(
    name="gguf",
    recognises=recognised_by(values={KIND: ARCHITECTURE}),
    read=read,
    is_canonical=False,
    load=load,
    refuse_unread=refuse_unread,
)
