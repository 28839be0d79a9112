"""Random (target, drafter) pairs whose vocabulary is so small that an untrained drafter is often right."""

from pathlib import Path

import torch
from transformers import GptOssConfig, GptOssForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from tests.reference.synthetic import Dialect, DraftSizes, write_random_draft

VOCAB_SIZE = 5
"""Four tokens and the mask: about one proposal in four is accepted."""
TARGET_WINDOW = 8
"""Window of the gpt-oss target's even layers: shorter than the tests' outputs."""


def write_random_pair(path: Path, *, dialect: Dialect, seed: int = 0) -> tuple[Path, Path]:
    """Writes a target and a drafter below `path` and returns (target_dir, draft_dir)."""
    sizes = DraftSizes(vocab_size=VOCAB_SIZE)
    torch.manual_seed(seed)
    common = {
        "vocab_size": sizes.vocab_size, "hidden_size": sizes.hidden, "intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.num_target_layers, "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads, "head_dim": sizes.head_dim, "max_position_embeddings": 1024,
        "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip
    if dialect == "gpt_oss":
        config = GptOssConfig(**common, num_local_experts=4, num_experts_per_tok=2, sliding_window=TARGET_WINDOW)
        target: PreTrainedModel = GptOssForCausalLM(config)
    else:
        target = Qwen3ForCausalLM(Qwen3Config(**common))
    target.save_pretrained(path / "target")
    return path / "target", write_random_draft(path / "draft", dialect=dialect, seed=seed, sizes=sizes)
