# SPDX-License-Identifier: Apache-2.0
"""Small drafts in other dialects than z-lab's, with the keys and tensor names of the published ones.

Each is the draft of `write_random_draft`, respelled here by hand and not by the package's own writers.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint.samples import edit_tensors
from tests.reference.synthetic import write_random_draft

FULL, SLIDING = "full_attention", "sliding_attention"
MIXED = [SLIDING, FULL, SLIDING]
Config = dict[str, Any]


def respell(directory: Path, change: Callable[[Config], Config]) -> Path:
    """Replaces config.json by what `change` makes of it."""
    file = directory / "config.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    return directory


def write_speculators(path: Path, **changed: object) -> Path:
    """A sliding draft as speculators 0.9's `save_pretrained` writes it."""
    write_random_draft(path, dialect="qwen3", layer_types=MIXED, sliding_window=7)

    def change(config: Config) -> Config:
        dflash, block_size = config.pop("dflash_config"), config.pop("block_size")
        for key in ("architectures", "num_target_layers"):
            del config[key]
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
        del config["rope_scaling"]
        return {
            "architectures": ["DFlashSpeculator"], "block_size": block_size, "draft_vocab_size": config["vocab_size"],
            "aux_hidden_state_layer_ids": [i + 1 for i in dflash["target_layer_ids"]], "dtype": "bfloat16",
            "has_no_defaults_at_init": False, "mask_token_id": dflash["mask_token_id"], "sample_from_anchor": False,
            "sliding_window_non_causal": False,
            "speculators_config": {
                "algorithm": "dflash", "default_proposal_method": "greedy",
                "proposal_methods": [
                    {"proposal_type": "greedy", "speculative_tokens": block_size - 1, "verifier_accept_k": 1,
                     "accept_tolerance": 0.0}
                ],
                "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "Qwen/Qwen3-8B"},
            },
            "speculators_model_type": "dflash", "speculators_version": "0.9.0", "target_hidden_size": None,
            "transformer_layer_config": config, "transformers_version": "5.23.0",
        } | changed  # fmt: skip

    return respell(path, change)


def write_modelopt(path: Path, *, window: int = 7) -> Path:
    """A draft with a window as modelopt's DFlashExporter writes it: the config of a gpt-oss target's draft."""
    write_random_draft(path, dialect="qwen3")
    section = {"use_swa": True, "swa_window_size": window, "causal": False}

    def change(config: Config) -> Config:
        del config["sliding_window"], config["use_sliding_window"], config["eos_token_id"]
        config["torch_dtype"] = config.pop("dtype")
        added = {"initializer_range": 0.02, "attention_dropout": 0.0, "tie_word_embeddings": False}
        return config | added | {"dflash_config": config["dflash_config"] | section}

    return respell(path, change)


def write_jetspec(path: Path) -> Path:
    """A draft with a causal block, as JetSpec's training writes it."""
    write_random_draft(path, dialect="qwen3")
    return respell(path, lambda config: config | {"dflash_config": config["dflash_config"] | {"causal_head": True}})


def write_nemotron(path: Path) -> Path:
    """A draft with its own embedding, with the keys of NVIDIA's Nemotron-3.5 drafts, and the block_size they lack."""
    write_random_draft(path, dialect="qwen3")
    yarn = {"factor": 128.0, "original_max_position_embeddings": 64, "rope_theta": 10000, "rope_type": "yarn"}

    def change(config: Config) -> Config:
        section = {"attention_sink_bias": False, "causal": False, "use_swa": False, "sample_from_anchor": False}
        for key in ("rope_scaling", "num_target_layers", "use_sliding_window"):
            del config[key]
        return config | {
            "attention_sink_bias": False, "dflash_query_causal": False, "draft_vocab_size": None,
            "dspark_fixup_head_type": None, "dspark_markov_rank": None, "has_embed_tokens": True, "has_lm_head": False,
            "eagle_aux_hidden_state_layer_ids": [2, 3, 4], "mask_token_id": 95, "num_aux_layers": 3, "pard_token": 95,
            "rope_parameters": yarn, "rope_theta": 10000, "target_layer_ids": [1, 2, 3], "train_embed_tokens": False,
            "sample_from_anchor": False, "use_cache": False, "dflash_config": config["dflash_config"] | section,
        }  # fmt: skip

    add_random(path, {"embed_tokens.weight": (96, 48)})
    return respell(path, change)


def write_speculators_vocabulary(path: Path, *, rows: int = 40) -> Path:
    """A Speculators draft with embedding and lm_head of its own, for `rows` tokens of the vocabulary."""
    write_speculators(path, draft_vocab_size=rows)
    add_random(path, {"embed_tokens.weight": (96, 48), "lm_head.weight": (rows, 48)})
    tokens = torch.randperm(96, generator=torch.Generator().manual_seed(5))[:rows].sort().values
    t2d = torch.zeros(96, dtype=torch.bool)
    t2d[tokens] = True
    return edit_tensors(path, lambda tensors: tensors.update(d2t=tokens - torch.arange(rows), t2d=t2d))


def write_laguna(path: Path) -> Path:
    """A draft as poolside publishes those of Laguna-XS-2.1 and Laguna-S-2.1."""
    write_random_draft(path, dialect="qwen3", layer_types=[SLIDING] * 3, sliding_window=7)
    add_random(path, {f"layers.{i}.self_attn.g_proj.weight": (4, 48) for i in range(3)})
    add_random(path, {f"aux_hidden_norms.{i}.weight": (48,) for i in range(3)}, seed=1)
    edit_tensors(path, _fuse)

    def change(config: Config) -> Config:
        section = config["dflash_config"] | {"causal": True, "block_size": config.pop("block_size")}
        section["num_target_layers"] = config.pop("num_target_layers")
        for key in ("rope_scaling", "use_sliding_window", "eos_token_id"):
            del config[key]
        config["torch_dtype"] = config.pop("dtype")
        return config | {
            "architectures": ["DFlashLagunaForCausalLM"], "model_type": "laguna", "gating": "per-head",
            "draft_vocab_size": 96, "eagle_aux_hidden_state_layer_ids": [2, 3, 4], "num_experts": 0,
            "dflash_config": section,
        }  # fmt: skip

    return respell(path, change)


def _fuse(tensors: dict[str, torch.Tensor]) -> None:
    for i in range(3):
        parts = [tensors.pop(f"layers.{i}.self_attn.{x}_proj.weight") for x in "qkv"]
        tensors[f"layers.{i}.self_attn.qkv_proj.weight"] = torch.cat(parts)


def write_mimo(path: Path) -> Path:
    """A draft as Xiaomi publishes MiMo-V2.6-Flash-RL's in `dflash/`, its mask embedding as safetensors."""
    write_random_draft(path, dialect="qwen3", layer_types=[SLIDING] * 3, sliding_window=7, is_causal=False)
    add_random(path, {f"layers.{i}.self_attn.attention_sink_bias": (4,) for i in range(3)})
    weights = path / "model.safetensors"
    index = dict.fromkeys(load_file(weights), "dflash_draft_model.safetensors")
    weights.rename(path / "dflash_draft_model.safetensors")
    text = json.dumps({"metadata": {"total_size": 0}, "weight_map": index})
    (path / "model.safetensors.index.json").write_text(text)
    mask = torch.randn(48, generator=torch.Generator().manual_seed(2)).bfloat16()
    save_file({"mask_embedding": mask}, path / "mask_embedding.safetensors")

    def change(config: Config) -> Config:
        section = config["dflash_config"] | {
            "num_anchors": 4096, "block_size": 6, "attention_value_scale": 0.612, "attention_sink_bias": True,
        }  # fmt: skip
        for key in ("model_type", "rope_scaling"):
            del config[key]
        return config | {
            "add_swa_attention_sink_bias": True, "v_head_dim": 16, "partial_rotary_factor": 0.5,
            "target_hidden_size": 48, "dflash_config": section,
        }  # fmt: skip

    return respell(path, change)


def write_muse_glimmer(path: Path) -> Path:
    """A draft as transformers 5.23 saves a MuseGlimmerAssistantModel."""
    write_random_draft(path, dialect="qwen3", layer_types=MIXED, sliding_window=7)
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    edit_tensors(path, lambda tensors: tensors.update({new: tensors.pop(old) for old, new in names.items()}))

    def change(config: Config) -> Config:
        dflash = config.pop("dflash_config")
        for key in ("attention_bias", "num_target_layers", "rope_scaling", "use_sliding_window", "vocab_size"):
            del config[key]
        return config | dflash | {
            "architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant",
            "attention_dropout": 0, "bos_token_id": 0, "pad_token_id": 1,
            "rope_parameters": {"rope_theta": config.pop("rope_theta"), "rope_type": "default"},
        }  # fmt: skip

    return respell(path, change)


def write_dspark(path: Path) -> Path:
    """DeepSpec's layout, with every head."""
    return write_random_draft(path, dialect="qwen3", dspark="gated")


def write_anchor_first(path: Path) -> Path:
    """z-lab's layout with blocks whose first row proposes, interleaved RoPE and windows switched off."""
    write_random_draft(path, dialect="qwen3", layer_types=MIXED, sliding_window=7)
    said = {"query_zero_predicts_next": True, "is_neox_style": False, "use_sliding_window": False}
    return respell(path, lambda config: config | said)


def write_specforge(path: Path, *, rows: int = 40) -> Path:
    """SpecForge's DSpark with a smaller vocabulary, its keys in dflash_config and a loss weight among them."""
    write_random_draft(path, dialect="qwen3", dspark="vanilla")
    add_random(path, {"lm_head.weight": (rows, 48), "markov_head.markov_w2.weight": (rows, 12)})
    tokens = torch.randperm(96, generator=torch.Generator().manual_seed(5))[:rows].sort().values
    edit_tensors(path, lambda tensors: tensors.update(d2t=tokens - torch.arange(rows)))

    def change(config: Config) -> Config:
        moved = ("mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type", "enable_confidence_head")
        section = {key: config.pop(key) for key in (*moved, "confidence_head_with_markov")}
        section |= {"projector_type": "dspark", "attention_mode": "gqa", "confidence_head_alpha": 1.0}
        del config["num_anchors"]
        return config | {
            "architectures": ["DSparkDraftModel"], "draft_vocab_size": rows, "dflash_config": section,
            "auto_map": {"AutoModel": "dspark.DSparkDraftModel"}, "is_causal": True, "max_window_layers": 3,
        }  # fmt: skip

    return respell(path, change)


WRITERS: dict[str, Callable[[Path], Path]] = {
    "dspark": write_dspark,
    "anchor_first": write_anchor_first,
    "specforge": write_specforge,
    "zlab": lambda path: write_random_draft(path, dialect="qwen3"),
    "modelopt": write_modelopt,
    "nemotron": write_nemotron,
    "jetspec": write_jetspec,
    "speculators": write_speculators,
    "speculators_vocabulary": write_speculators_vocabulary,
    "laguna": write_laguna,
    "mimo": write_mimo,
    "muse_glimmer": write_muse_glimmer,
}


def add_random(directory: Path, shapes: dict[str, tuple[int, ...]], *, seed: int = 0) -> None:
    """Adds BF16 tensors, far from 0 and 1, to model.safetensors."""
    generator = torch.Generator().manual_seed(100 + seed)
    new = {name: (0.5 + 0.5 * torch.randn(shape, generator=generator)).bfloat16() for name, shape in shapes.items()}
    edit_tensors(directory, lambda tensors: tensors.update(new))
