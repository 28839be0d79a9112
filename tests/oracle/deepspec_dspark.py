# SPDX-License-Identifier: Apache-2.0
"""DeepSeek's own DSpark (github.com/deepseek-ai/DeepSpec @ afdfa7c9) on random drafts, as golden values and live."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_trt.checkpoint.draft_spec import MARKOV_CANDIDATES
from tests.reference.synthetic import DraftSizes, Markov, write_random_draft

SIZES = DraftSizes(block_size=7)


@dataclass(frozen=True)
class Case:
    """A draft, the rows of its context, and how many slots are proposed for."""

    name: str
    head: Markov
    num_context: int
    num_tokens: int = 7
    own_vocabulary: bool = True

    def write(self, directory: Path) -> Path:
        """The draft, in FP32."""
        return write_random_draft(
            directory, dialect="qwen3", dspark=self.head, own_vocabulary=self.own_vocabulary, dtype=torch.float32,
            sizes=SIZES,
        )  # fmt: skip

    def taps(self) -> torch.Tensor:
        """[T, A*H]."""
        generator = torch.Generator().manual_seed(self.num_context)
        return torch.randn(self.num_context, SIZES.num_taps * SIZES.hidden, generator=generator)


ANCHOR = 5
CASES = (
    Case("DeepSeek's DFlash", "none", 20),
    Case("vanilla", "vanilla", 20),
    Case("gated", "gated", 9),
    Case("short draft", "gated", 9, num_tokens=3),
)


def run(case: Case, directory: Path) -> dict[str, np.ndarray[Any, Any]]:
    """hidden [S, H], the greedy path [K], its scores [K] and survival [K] that DeepSpec gives.

    Only the best MARKOV_CANDIDATES of each slot by logits are candidates; DeepSpec has no such restriction.
    """
    from deepspec.modeling.dspark.qwen3.modeling import Qwen3DSparkModel
    from transformers import DynamicCache

    model = Qwen3DSparkModel.from_pretrained(
        case.write(directory), dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    block = torch.tensor([[ANCHOR] + [SIZES.vocab_size - 1] * (SIZES.block_size - 1)])
    with torch.inference_mode():
        hidden = model._forward_backbone(
            target_hidden_states=case.taps()[None], noise_embedding=model.embed_tokens(block), use_cache=True,
            position_ids=torch.arange(case.num_context + SIZES.block_size)[None], attention_mask=None,
            past_key_values=DynamicCache(), is_causal=False,
        )  # fmt: skip
        rows = hidden[:, : case.num_tokens]
        logits = model.compute_logits(rows)
        if case.head != "none":
            worst = logits.topk(MARKOV_CANDIDATES).values[..., -1:]
            logits = logits.masked_fill(logits < worst, -torch.inf)
        path, corrected = model.sample_draft_tokens(logits, first_prev_token_ids=block[:, 0], hidden_states=rows)
        confidence = model.predict_confidence_step(rows, torch.cat([block[:, :1], path[:, :-1]], dim=1))
    survival = torch.zeros(0) if confidence is None else confidence[0].sigmoid().cumprod(-1)
    scores = corrected[0].gather(1, path[0, :, None])[:, 0]
    arrays = {"hidden": hidden[0], "path": path[0], "scores": scores, "survival": survival}
    return {name: array.numpy() for name, array in arrays.items()}
