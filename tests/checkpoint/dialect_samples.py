# SPDX-License-Identifier: Apache-2.0
"""Small drafts in other dialects than z-lab's, with the keys and tensor names of the published ones.

Each is the draft of `write_random_draft`, respelled here by hand and not by the package's own writers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
            "architectures": ["DFlashSpeculator"],
            "aux_hidden_state_layer_ids": [i + 1 for i in dflash["target_layer_ids"]],
            "block_size": block_size,
            "draft_vocab_size": config["vocab_size"],
            "dtype": "bfloat16",
            "has_no_defaults_at_init": False,
            "mask_token_id": dflash["mask_token_id"],
            "sample_from_anchor": False,
            "sliding_window_non_causal": False,
            "speculators_config": {
                "algorithm": "dflash",
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {"proposal_type": "greedy", "speculative_tokens": block_size - 1, "verifier_accept_k": 1,
                     "accept_tolerance": 0.0}
                ],
                "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "Qwen/Qwen3-8B"},
            },
            "speculators_model_type": "dflash",
            "speculators_version": "0.9.0",
            "target_hidden_size": None,
            "transformer_layer_config": config,
            "transformers_version": "5.23.0",
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
