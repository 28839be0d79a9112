# SPDX-License-Identifier: Apache-2.0
"""A pair of real shape with random weights, and drafts that hold as often as a table says.

Random weights draft nothing that holds. So that steps cost what they cost users, target and drafter compute all they
would, and then the proposals are replaced by the target's own continuation, each position with its probability.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash_trt.runtime.decoder import Decoder
from dflash_trt.runtime.draft_length import DraftLength
from dflash_trt.runtime.pair import LocalPair
from dflash_trt.runtime.session import Session
from tests.reference.synthetic import DraftSizes, write_random_draft

REACHED = (0.80, 0.66, 0.55, 0.46, 0.39, 0.33, 0.28, 0.24, 0.21, 0.18, 0.16, 0.14, 0.12, 0.10, 0.09)
"""The share of passes that accept position 1, 2, ... and all before it: tau 5.7 with the whole block of 16."""
VOCAB_SIZE, PROMPT_TOKENS = 151936, 64
DRAFT = DraftSizes(
    hidden=1024,
    intermediate=3072,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    num_taps=5,
    num_target_layers=28,
    block_size=16,
    vocab_size=VOCAB_SIZE,
)


def write_pair(directory: Path) -> tuple[Path, Path]:
    """Target (Qwen3-0.6B's shape) and draft (five layers of the same) below `directory`, BF16."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=DRAFT.hidden,
        intermediate_size=DRAFT.intermediate,
        num_hidden_layers=DRAFT.num_target_layers,
        num_attention_heads=DRAFT.num_heads,
        num_key_value_heads=DRAFT.num_kv_heads,
        head_dim=DRAFT.head_dim,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory / "target")
    layers = ["full_attention"] * 5
    return directory / "target", write_random_draft(
        directory / "draft", dialect="qwen3", layer_types=layers, sizes=DRAFT
    )


def random_prompts(count: int) -> list[list[int]]:
    """Prompts of 64 tokens, the same each time."""
    rng = random.Random(0)
    return [[rng.randrange(VOCAB_SIZE - 1) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


class ForcedPair(LocalPair):
    """Proposes the target's own continuation up to a drawn position, and a wrong token there."""

    def __init__(self, session: Session, answers: dict[tuple[int, ...], list[int]], length: DraftLength) -> None:
        """`answers` are what plain decoding gives, by prompt."""
        super().__init__(session.target, session.drafter)
        self._answers = answers
        self.decoder = Decoder(self, session.decoder().slots, length)

    def draft(self, slots: Sequence[int], anchors: Sequence[int], num_tokens: int) -> list[list[int]]:
        """The drafter's proposals [B, num_tokens], replaced. The draw depends on request and position alone."""
        proposals = super().draft(slots, anchors, num_tokens)
        for row, slot in zip(proposals, slots, strict=True):
            request = self.decoder.running[slot]
            prompt, begin = tuple(request.prompt_ids), len(request.token_ids)
            draw = random.Random(hash((*prompt[:4], begin))).random()
            count = sum(share > draw for share in REACHED[:num_tokens])
            coming = self._answers[prompt][begin : begin + count + 1]
            row[: min(count, len(coming))] = coming[:count]
            if count < min(num_tokens, len(coming)):
                row[count] = (coming[count] + 1) % VOCAB_SIZE
        return proposals
