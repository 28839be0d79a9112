# SPDX-License-Identifier: Apache-2.0
"""z-lab's own DFlash2 (the package dflash 0.1.0 from PyPI) on random drafts, as golden values and live."""

import time
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.fixtures_data import prompts
from tests.paths import FIXTURES
from tests.reference.synthetic import DraftSizes, write_random_draft

SIZES = DraftSizes()
SLIDING = "sliding_attention"


@dataclass(frozen=True)
class Case:
    """A draft, the rows of its context, and how many slots are proposed for."""

    name: str
    window: int
    num_context: int
    num_tokens: int
    head_facts: dict[str, float]
    block_size: int = SIZES.block_size

    def write(self, directory: Path) -> Path:
        """The draft, in FP32."""
        return write_random_draft(
            directory, dialect="qwen3", layer_types=[SLIDING] * 3, sliding_window=self.window, is_causal=False,
            dflash2=True, dtype=torch.float32, head_facts=self.head_facts,
            sizes=DraftSizes(block_size=self.block_size),
        )  # fmt: skip

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """Taps [T, A*H], embeddings [V, H], the lm_head [V, H] of a target, and the anchor."""
        generator = torch.Generator().manual_seed(self.num_context)
        taps = torch.randn(self.num_context, SIZES.num_taps * SIZES.hidden, generator=generator)
        table, head = torch.randn(2, SIZES.vocab_size, SIZES.hidden, generator=generator)
        return taps, table, head, 5


CAPPED = {"output_multiplier": 0.7, "final_logit_softcapping": 3.0}
CASES = (
    Case("whole block", 2048, 20, 5, {}),
    Case("short draft", 2048, 7, 3, {}),
    Case("window crossed", 9, 20, 5, {}),
    Case("capped logits", 2048, 20, 5, CAPPED),
    Case("window shorter than the block, capped", 4, 11, 5, CAPPED),
    Case("fewer rows run", 2048, 20, 3, {}, block_size=4),
)


def run(case: Case, directory: Path) -> dict[str, np.ndarray[Any, Any]]:
    """hidden [S, H], candidate ids [K, k], sorted, and the greedy path [K] that the package gives."""
    from dflash.model import DFlash2DraftModel

    model = DFlash2DraftModel.from_pretrained(case.write(directory), dtype=torch.float32).eval()
    taps, table, head, anchor = case.inputs()
    noise = table[torch.tensor([anchor] + [SIZES.vocab_size - 1] * (case.block_size - 1))]
    positions = torch.arange(case.num_context + case.block_size)
    with torch.inference_mode():
        hidden = model(target_hidden=taps[None], noise_embedding=noise[None], position_ids=positions[None])
        rows = hidden[:, 1 : 1 + case.num_tokens]
        path, ids, _ = model.propose(rows, torch.tensor([anchor]), lambda h: h @ head.T, 0.0)
    return {"hidden": hidden[0].numpy(), "ids": ids[0].sort(-1).values.numpy(), "path": path[0].numpy()}


STEPS_TOKENS, STEPS_PROMPTS = 96, 16
BLOCK_SIZES = (8, 4)
"""The trained draft's, and rows that a shortened block runs."""


def verify_steps(block_size: int) -> list[list[int]]:
    """Tokens of each verify step of the package's own loop over the first held-out prompts, greedy, FP32.

    Up to STEPS_TOKENS: the last steps of an answer are left out, as this loop runs fewer rows there.
    """
    import dflash.model as zlab
    from transformers import AutoModelForCausalLM

    target_dir = FIXTURES / "tiny-qwen3"
    target = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval()
    model = zlab.DFlash2DraftModel.from_pretrained(FIXTURES / "tiny-qwen3-dflash2", dtype=torch.float32).eval()
    zlab._cuda_time = time.perf_counter  # requires a GPU
    steps = []
    for prompt in prompts(target_dir)[:STEPS_PROMPTS]:
        run = zlab.dflash_generate(
            model, target, torch.tensor([prompt]), STEPS_TOKENS + block_size, None, block_size=block_size,
            return_stats=True,
        )  # fmt: skip
        steps.append(until_enough(run.acceptance_lengths))
    return steps


def until_enough(counts: list[int]) -> list[int]:
    """The first steps, until they have emitted STEPS_TOKENS."""
    totals = list(accumulate(counts))
    return counts[: next(i for i, total in enumerate(totals) if total >= STEPS_TOKENS) + 1]
