# SPDX-License-Identifier: Apache-2.0
"""Pairs with random weights, and drafts that hold as often as a table says.

Random weights draft nothing that holds. So that steps cost what they cost users, target and drafter compute all they
would, and then either is made to agree with the other, each position with its probability:

* `ForcedRunner` replaces the proposals by the target's own continuation, so the text is that of plain decoding. It
  needs a target whose blocks round as its single tokens do.
* `ForcedLogits` raises the target's logits of the proposals, so what the draft proposed comes out, as in vLLM's
  synthetic acceptance: for any loop and any rounding.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from dflash_trt.engine.proposals import Draw, Proposals
from dflash_trt.runtime.decoder import Decoder
from dflash_trt.runtime.model_runner import ModelRunner
from dflash_trt.runtime.policy.draft_length import DraftLength
from dflash_trt.runtime.request import Request
from dflash_trt.runtime.session import Session
from dflash_trt.runtime.targets.target import Segment
from tests.reference.synthetic import DraftSizes, write_random_draft

REACHED = (0.80, 0.66, 0.55, 0.46, 0.39, 0.33, 0.28, 0.24, 0.21, 0.18, 0.16, 0.14, 0.12, 0.10, 0.09)
"""The share of passes that accept position 1, 2, ... and all before it: tau 5.7 with the whole block of 16."""
PROMPT_TOKENS = 64
GOLDEN_RATIO = 0.6180339887498949
"""Multiples of it, less their whole part, fill 0 to 1 evenly: few draws have the mean of many."""
LARGE = 1e4
"""Above any logit."""
SIZES = {
    "qwen3-0.6b": DraftSizes(
        hidden=1024, intermediate=3072, num_heads=16, num_kv_heads=8, head_dim=128, num_taps=5, num_target_layers=28,
        block_size=16, vocab_size=151936,
    ),
    "qwen3-8b": DraftSizes(
        hidden=4096, intermediate=12288, num_heads=32, num_kv_heads=8, head_dim=128, num_taps=5, num_target_layers=36,
        block_size=16, vocab_size=151936,
    ),
    "gpt-oss-20b": DraftSizes(
        hidden=2880, intermediate=7680, num_heads=64, num_kv_heads=8, head_dim=64, num_taps=5, num_target_layers=24,
        block_size=8, vocab_size=201088,
    ),
    "gpt-oss-120b": DraftSizes(
        hidden=2880, intermediate=7680, num_heads=64, num_kv_heads=8, head_dim=64, num_taps=5, num_target_layers=36,
        block_size=10, vocab_size=201088,
    ),
    "tiny": DraftSizes(hidden=64, intermediate=128, head_dim=64, block_size=16, vocab_size=512),
    "moe": DraftSizes(
        hidden=256, intermediate=512, num_heads=4, num_kv_heads=2, head_dim=64, num_taps=3, num_target_layers=5,
        block_size=16, vocab_size=4096,
    ),
}  # fmt: skip
"""Drafts of the published targets, of a small one of ours with experts, and one that a CPU decodes in seconds."""
DRAFT, MOE_DRAFT = SIZES["qwen3-0.6b"], SIZES["moe"]


def write_pair(directory: Path) -> tuple[Path, Path]:
    """Target (Qwen3-0.6B's shape) and draft (five layers of the same) below `directory`, BF16."""
    config = Qwen3Config(tie_word_embeddings=True, **target_sizes(DRAFT))
    return _write(directory, Qwen3ForCausalLM, config, DRAFT, 5)


def write_moe_pair(directory: Path) -> tuple[Path, Path]:
    """A small Qwen3-MoE target of 16 experts, four to a token, and draft of two layers below `directory`, BF16."""
    config = Qwen3MoeConfig(
        num_experts=16, num_experts_per_tok=4, moe_intermediate_size=MOE_DRAFT.hidden, **target_sizes(MOE_DRAFT)
    )
    return _write(directory, Qwen3MoeForCausalLM, config, MOE_DRAFT, 2)


def target_sizes(draft: DraftSizes) -> dict[str, Any]:
    """Options of a configuration of the target that a draft of these sizes fits."""
    return {
        "vocab_size": draft.vocab_size,
        "hidden_size": draft.hidden,
        "intermediate_size": draft.intermediate,
        "num_hidden_layers": draft.num_target_layers,
        "num_attention_heads": draft.num_heads,
        "num_key_value_heads": draft.num_kv_heads,
        "head_dim": draft.head_dim,
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _write(
    directory: Path, model: type[PreTrainedModel], config: PreTrainedConfig, sizes: DraftSizes, num_layers: int
) -> tuple[Path, Path]:
    torch.manual_seed(0)
    model(config).to(torch.bfloat16).save_pretrained(directory / "target")
    layers = ["full_attention"] * num_layers
    draft = write_random_draft(directory / "draft", dialect="qwen3", layer_types=layers, sizes=sizes)
    return directory / "target", draft


def random_prompts(count: int, sizes: DraftSizes = DRAFT) -> list[list[int]]:
    """Prompts of 64 tokens, the same each time."""
    rng = random.Random(0)
    return [[rng.randrange(sizes.vocab_size - 1) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


class ForcedRunner(ModelRunner):
    """Proposes the target's own continuation up to a drawn position, and a wrong token there."""

    def __init__(
        self, session: Session, answers: dict[tuple[int, ...], list[int]], length: DraftLength, num_slots: int
    ) -> None:
        """`answers` are what plain decoding gives, by prompt."""
        super().__init__(session.target, session.drafter)
        assert session.drafter.spec.vocab_size is not None, "random drafts name their vocabulary"
        self._answers = answers
        self._vocab_size = session.drafter.spec.vocab_size
        self.decoder = Decoder(self, session.decoder(max_batch_size=num_slots).slots, length)

    def draft(
        self, slots: Sequence[int], anchors: Sequence[int], draft_length: int, draws: Sequence[Draw | None] = ()
    ) -> Callable[[], list[Proposals]]:
        """The drafter's proposals, replaced. The draw depends on request and position alone."""
        wait, requests = super().draft(slots, anchors, draft_length), [self.decoder.running[slot] for slot in slots]
        return lambda: self._forced(wait(), requests, draft_length)

    def _forced(self, proposals: list[Proposals], requests: Sequence[Request], draft_length: int) -> list[Proposals]:
        for (row, *_), request in zip(proposals, requests, strict=True):
            prompt, begin = tuple(request.prompt_ids), len(request.token_ids)
            draw = random.Random(hash((*prompt[:4], begin))).random()
            count = sum(share > draw for share in REACHED[:draft_length])
            coming = self._answers[prompt][begin : begin + count + 1]
            row[: min(count, len(coming))] = coming[:count]
            if count < min(draft_length, len(coming)):
                row[count] = (coming[count] + 1) % self._vocab_size
        return proposals


class ForcedLogits:
    """Makes a target accept a drawn number of proposals of each block, regardless of their tokens."""

    def __init__(self) -> None:
        self._num_draws = 0

    def restart(self) -> None:
        """Begins the draws anew."""
        self._num_draws = 0

    @torch.inference_mode()
    def force(self, logits: Tensor, blocks: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Changes logits [R, V] in place, for blocks [anchor, proposal, ...] whose rows begin at the number given."""
        rows: list[int] = []
        tokens: list[int] = []
        for begin, block in blocks:
            emitted = self._emitted(block, logits.shape[-1])
            rows += range(begin, begin + len(emitted))
            tokens += emitted
        if rows:
            place = torch.tensor([rows, tokens]).to(logits.device)
            logits[place[0], place[1]] = LARGE

    def _emitted(self, block: Sequence[int], vocab_size: int) -> list[int]:
        """Accepted proposals, and another token than the next one where there is a next one."""
        self._num_draws += 1
        draw, proposals = self._num_draws * GOLDEN_RATIO % 1, block[1:]
        count = sum(share > draw for share in REACHED[: len(proposals)])
        rejected = [(token + 1) % vocab_size for token in proposals[count : count + 1]]
        return [*proposals[:count], *rejected]


class Calls:
    """Counts a model's forward calls, and forces acceptance in those of blocks."""

    def __init__(self, model: PreTrainedModel, forced: ForcedLogits | None) -> None:
        self.count = 0
        self._forced = forced
        self._reads_prompt = True
        model.register_forward_hook(self._after, with_kwargs=True)

    def start(self) -> None:
        """Begins a round."""
        self.count = 0
        if self._forced is not None:
            self._forced.restart()

    def begin(self) -> None:
        """Says that the next call reads a prompt."""
        self._reads_prompt = True

    def _after(self, _model: torch.nn.Module, args: tuple[Tensor, ...], named: dict[str, Any], output: Any) -> None:
        self.count += 1
        token_ids = args[0] if args else named["input_ids"]
        if self._forced is not None and not self._reads_prompt and token_ids.shape[1] > 1:
            self._forced.force(output.logits[0], [(0, token_ids[0].tolist())])
        self._reads_prompt = False


class ForcedLogitsRunner(ModelRunner):
    """Decodes with a target whose logits of drafted blocks are forced."""

    def __init__(self, session: Session, length: DraftLength, num_slots: int) -> None:
        super().__init__(session.target, session.drafter)
        self._forced = ForcedLogits()
        self.decoder = Decoder(self, session.decoder(max_batch_size=num_slots).slots, length)

    def verify(self, segments: Sequence[Segment]) -> Tensor:
        """Runs one pass of the target and forces its logits."""
        logits = super().verify(segments)
        begins = [0, *accumulate(segment.num_logits for segment in segments)]
        self._forced.force(
            logits,
            [
                (begin, segment.token_ids)
                for begin, segment in zip(begins, segments, strict=False)
                if 1 < segment.num_logits == len(segment.token_ids)
            ],
        )
        return logits
