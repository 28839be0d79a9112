"""Writes small random drafter checkpoints in the exact layout of the published ones.

Every norm weight and bias is random, different per layer and far from 1 and 0, so that a swapped,
dropped or shared one changes the result.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

Dialect = Literal["gpt_oss", "qwen3"]
CONV_GROUP, CONV_TAPS, SELECTOR_RANK, TOP_K = 8, 2, 12, 5
"""Sizes of a synthetic DFlash2 drafter."""
MARKOV_RANK = 12
CORRELATOR: dict[str, float] = {
    "lilicorr_candidate_topk": 4, "lilicorr_factor_dim": 6, "lilicorr_hidden_size": 24, "lilicorr_logit_scale": 7.5,
    "lilicorr_mlp_ratio": 1.5, "lilicorr_num_heads": 3, "lilicorr_num_layers": 2, "lilicorr_vector_eps": 1e-6,
}  # fmt: skip
"""LiLiCorr's keys in dflash_config of a synthetic drafter."""
Markov = Literal["none", "vanilla", "gated"]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftSizes:
    """Widths of a synthetic drafter; N*D differs from H on purpose."""

    hidden: int = 48
    intermediate: int = 80
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    num_taps: int = 3
    num_target_layers: int = 6
    block_size: int = 6
    vocab_size: int = 96


def write_random_draft(
    path: Path | str,
    *,
    dialect: Dialect,
    layer_types: list[str] | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    sizes: DraftSizes | None = None,
    dflash2: bool = False,
    head_facts: dict[str, float] | None = None,
    dspark: Markov | None = None,
    lilicorr: Literal["plain", "convolved"] | None = None,
    correlator: Mapping[str, float] = CORRELATOR,
    own_vocabulary: bool = False,
) -> Path:
    """Writes config.json and model.safetensors into `path` and returns it.

    `dflash2` adds convolutions and a candidate selector, and `head_facts` to dflash_config; `dspark` is the Markov head
    of a draft in DeepSpec's layout, with a confidence head where there is one; `lilicorr` adds a correlator with the
    sizes `correlator`, and convolutions if they are asked for; `own_vocabulary` adds embedding and lm_head.

    layer_types gives the number of layers too; None means three, all full. is_causal None leaves the key out.
    """
    sizes = sizes or DraftSizes()
    layer_types = layer_types or ["full_attention"] * 3
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    config = _config(dialect, sizes, layer_types, sliding_window, dtype)
    if is_causal is not None:
        config["is_causal"] = is_causal
    tensors = _tensors(sizes, len(layer_types), has_biases=dialect == "gpt_oss", seed=seed)
    if dflash2:
        config["architectures"] = ["DFlash2DraftModel"]
        config["dflash_config"] |= {
            "block_size": config.pop("block_size"), "conv_group_size": CONV_GROUP, "conv_kernel_size": CONV_TAPS,
            "selector_rank": SELECTOR_RANK, "selector_top_k": TOP_K,
        }  # fmt: skip
        tensors |= _dflash2_tensors(sizes, len(layer_types), seed)
    if lilicorr is not None:
        config["architectures"] = ["LiLiCorrDraftModel"]
        config["dflash_config"] |= {"lilicorr_enabled": True, "block_size": config.pop("block_size"), **correlator}
        tensors |= _lilicorr_tensors(sizes, correlator, seed)
        if lilicorr == "convolved":
            config["dflash_config"] |= {"conv_group_size": CONV_GROUP, "conv_kernel_size": CONV_TAPS}
            added = _dflash2_tensors(sizes, len(layer_types), seed)
            tensors |= {name: tensor for name, tensor in added.items() if "selector" not in name}
    if dspark is not None:
        rank = 0 if dspark == "none" else MARKOV_RANK
        config |= config.pop("dflash_config") | {
            "architectures": ["Qwen3DSparkModel"], "num_anchors": 4, "markov_rank": rank,
            "enable_confidence_head": rank > 0,
        }  # fmt: skip
        if rank:
            config |= {"markov_head_type": dspark, "confidence_head_with_markov": True}
            tensors |= _dspark_tensors(sizes, seed, is_gated=dspark == "gated")
    if own_vocabulary:
        generator = torch.Generator().manual_seed(seed + 3000)
        for name in ("embed_tokens", "lm_head"):
            tensors[f"{name}.weight"] = torch.randn(sizes.vocab_size, sizes.hidden, generator=generator)
    if head_facts:
        config["dflash_config"] |= head_facts
    (path / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, path / "model.safetensors")
    return path


def _dflash2_tensors(sizes: DraftSizes, num_layers: int, seed: int) -> Tensors:
    """Convolutions that change every channel, and edges as large as logits."""
    generator = torch.Generator().manual_seed(seed + 1000)

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(*shape, generator=generator)

    H, groups = sizes.hidden, sizes.hidden // CONV_GROUP
    tensors = {
        f"candidate_selector.{name}_codebook": random(sizes.vocab_size, SELECTOR_RANK)
        for name in ("predecessor", "successor")
    }
    tensors["candidate_selector.hidden_projection.weight"] = random(SELECTOR_RANK, H, scale=H**-0.5)
    for layer in range(num_layers):
        for name in ("attention_conv", "mlp_conv"):
            prefix = f"layers.{layer}.{name}"
            tensors[f"{prefix}.base_kernel"] = random(2, CONV_TAPS, H, scale=0.5)
            tensors[f"{prefix}.kernel_projection.weight"] = random(2 * CONV_TAPS * groups, H, scale=0.3 * H**-0.5)
    return tensors


def _dspark_tensors(sizes: DraftSizes, seed: int, *, is_gated: bool) -> Tensors:
    """Biases as large as logits."""
    generator = torch.Generator().manual_seed(seed + 2000)
    r, width = MARKOV_RANK, sizes.hidden + MARKOV_RANK
    shapes = {f"markov_head.markov_{w}.weight": (sizes.vocab_size, r) for w in ("w1", "w2")}
    shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    if is_gated:
        shapes |= {"markov_head.gate_proj.weight": (r, width), "markov_head.gate_proj.bias": (r,)}
    scale = {"confidence_head.proj.weight": 0.1, "markov_head.gate_proj.weight": 0.3, "markov_head.gate_proj.bias": 2.0}
    return {name: scale.get(name, 1.0) * torch.randn(*shape, generator=generator) for name, shape in shapes.items()}


def _lilicorr_tensors(sizes: DraftSizes, correlator: Mapping[str, float], seed: int) -> Tensors:
    """A correlator in which every feature, embedding and bias moves the scores."""
    generator = torch.Generator().manual_seed(seed + 4000)
    H, S, C = sizes.hidden, sizes.block_size, int(correlator["lilicorr_hidden_size"])
    f, inner = int(correlator["lilicorr_factor_dim"]), int(correlator["lilicorr_mlp_ratio"] * C)
    heads, k = int(correlator["lilicorr_num_heads"]), int(correlator["lilicorr_candidate_topk"])
    linears = {
        "token_proj": (C, H), "pass_hidden_proj": (C, H), "context_proj": (C, H), "feature_mlp.up_proj": (C, 5),
        "feature_mlp.down_proj": (C, C), "factor_input_proj": (C, 3 * C), "out_head": (f, C), "in_head": (f, C),
        "anchor_out_head": (f, C),
    }  # fmt: skip
    norms = {"feature_norm": 5, "output_norm": C, "anchor_norm": C}
    tensors = {"feature_norm.bias": torch.randn(5, generator=generator)}
    for layer in (f"layers.{i}" for i in range(int(correlator["lilicorr_num_layers"]))):
        linears |= {
            f"{layer}.attn.out_proj": (C, C),
            f"{layer}.mlp.up_proj": (inner, C),
            f"{layer}.mlp.down_proj": (C, inner),
        }
        norms |= {f"{layer}.attn_norm": C, f"{layer}.mlp_norm": C}
        tensors[f"{layer}.attn.in_proj_weight"] = torch.randn(3 * C, C, generator=generator) * 1.5 * C**-0.5
        tensors[f"{layer}.attn.in_proj_bias"] = torch.randn(3 * C, generator=generator)
    for name, (rows, columns) in linears.items():
        tensors[f"{name}.weight"] = torch.randn(rows, columns, generator=generator) * columns**-0.5
        tensors[f"{name}.bias"] = 0.3 * torch.randn(rows, generator=generator)
    for name, width in norms.items():
        tensors[f"{name}.weight"] = 0.5 + 1.5 * torch.rand(width, generator=generator)
    tensors["slot_embedding"] = torch.randn(1, 1, S - 1, 1, C, generator=generator)
    tensors["rank_embedding"] = torch.randn(1, 1, 1, k, C, generator=generator)
    tensors["relative_slot_bias"] = 2 * torch.randn(heads, 2 * S - 1, generator=generator)
    tensors["same_slot_bias"] = 2 * torch.randn(heads, generator=generator)
    return {f"lilicorr.{name}": tensor for name, tensor in tensors.items()}


def _config(
    dialect: Dialect, sizes: DraftSizes, layer_types: list[str], sliding_window: int | None, dtype: torch.dtype
) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"], "attention_bias": dialect == "gpt_oss", "block_size": sizes.block_size,
        "dflash_config": {
            "mask_token_id": sizes.vocab_size - 1, "target_layer_ids": list(range(1, 1 + sizes.num_taps)),
        },
        "dtype": str(dtype).removeprefix("torch."), "eos_token_id": 2, "head_dim": sizes.head_dim, "hidden_act": "silu",
        "hidden_size": sizes.hidden, "intermediate_size": sizes.intermediate, "layer_types": layer_types,
        "model_type": dialect, "num_attention_heads": sizes.num_heads, "num_hidden_layers": len(layer_types),
        "num_key_value_heads": sizes.num_kv_heads, "num_target_layers": sizes.num_target_layers,
        "rms_norm_eps": 1e-5 if dialect == "gpt_oss" else 1e-6, "sliding_window": sliding_window,
        "tie_word_embeddings": False, "vocab_size": sizes.vocab_size,
    }  # fmt: skip
    if dialect == "qwen3":
        return config | {
            "max_position_embeddings": 4096, "rope_scaling": None, "rope_theta": 1000000,
            "use_sliding_window": "sliding_attention" in layer_types,
        }  # fmt: skip
    yarn = {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 256,
        "rope_type": "yarn", "truncate": False,
    }  # fmt: skip
    return config | {
        "initial_context_length": 256, "max_position_embeddings": 8192, "rope_scaling": yarn, "rope_theta": 150000,
    }  # fmt: skip


def _tensors(sizes: DraftSizes, num_layers: int, *, has_biases: bool, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = sizes.hidden, sizes.intermediate
    q_width, kv_width = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim

    def weight(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).div_(columns**0.5)

    def norm(width: int) -> torch.Tensor:
        return 0.5 + 1.5 * torch.rand(width, generator=generator)

    tensors = {
        "fc.weight": weight(hidden, sizes.num_taps * hidden),
        "hidden_norm.weight": norm(hidden),
        "norm.weight": norm(hidden),
    }
    shapes = {
        "self_attn.q_proj": (q_width, hidden), "self_attn.k_proj": (kv_width, hidden),
        "self_attn.v_proj": (kv_width, hidden), "self_attn.o_proj": (hidden, q_width),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    for layer in range(num_layers):
        prefix = f"layers.{layer}"
        for name, (rows, columns) in shapes.items():
            tensors[f"{prefix}.{name}.weight"] = weight(rows, columns)
            if has_biases and name.startswith("self_attn"):
                tensors[f"{prefix}.{name}.bias"] = 0.5 * torch.randn(rows, generator=generator)
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            tensors[f"{prefix}.{name}.weight"] = norm(sizes.head_dim)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = norm(hidden)
    return tensors
