# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt capture`: runs the target over prompts and writes what calibration needs of it.

First the answers are decoded greedily, several prompts at once; then each prompt with its answer runs once more, in one
pass, and its taps go to disk. The second pass costs little next to the first, and because all lengths are known
by then, the file is written in one go with one sequence in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from dflash_trt.checkpoint.producer import metadata
from dflash_trt.checkpoint.safetensors_writer import Layout, SafetensorsWriter, aligned
from dflash_trt.errors import CheckpointError
from dflash_trt.files.write import Kind
from dflash_trt.quantize.features import MASK_EMBEDDING, METADATA_KEY, FeatureFacts, sequence_layout
from dflash_trt.runtime.decoder import Decoder
from dflash_trt.runtime.draft_length import FixedLength
from dflash_trt.runtime.pair import LocalPair
from dflash_trt.runtime.request import Request
from dflash_trt.runtime.sampling import SamplingParams
from dflash_trt.runtime.slots import SlotPool
from dflash_trt.targets.target import Segment, Target

FEATURES = Kind(
    name="features that this command captured",
    recognizes=lambda file: METADATA_KEY in metadata(file),
    form="file",
    option="-o FILE",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A prompt and the target's greedy answer."""

    token_ids: list[int]
    prompt_length: int


def answer_prompts(
    target: Target,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    stop_ids: frozenset[int],
    *,
    num_slots: int = 1,
    on_answer: Callable[[], None] = lambda: None,
) -> list[Answered]:
    """Decodes every prompt greedily, to a stop token (kept) or `max_tokens` tokens, `num_slots` at once."""
    params = SamplingParams(max_tokens=max_tokens)
    requests = [
        Request(prompt_ids=prompt, params=params, sampler=params.sampler(), stop_ids=stop_ids) for prompt in prompts
    ]
    longest = max((request.max_length for request in requests), default=0)
    decoder = Decoder(LocalPair(target, None), SlotPool(num_slots, num_slots * longest), FixedLength(0))
    for request in requests:
        request.on_progress = lambda request: on_answer() if request.finished else None
        decoder.add(request)
    while not decoder.is_idle:
        decoder.step()
    return [
        Answered(token_ids=[*request.prompt_ids, *request.token_ids], prompt_length=len(request.prompt_ids))
        for request in requests
    ]


def write_features(target: Target, answered: Sequence[Answered], facts: FeatureFacts, output: Path) -> None:
    """Runs the target once over each sequence and writes the feature file (layout: features.py).

    Raises CheckpointError for taps that are not finite, OSError when the file cannot be written.
    """
    width, hidden_size = len(facts.target_layer_ids) * facts.target.hidden_size, facts.target.hidden_size
    layout: Layout = {MASK_EMBEDDING: ("BF16", (hidden_size,))}
    for i, sequence in enumerate(answered):
        layout |= sequence_layout(i, len(sequence.token_ids), sequence.prompt_length, width, hidden_size)
    header = {METADATA_KEY: msgspec.json.encode(facts, order="deterministic").decode()}
    with SafetensorsWriter(output, aligned(layout), metadata=header) as writer:
        writer.write(MASK_EMBEDDING, _bfloat16(target.embed(torch.tensor(facts.mask_token_id))))
        for i, sequence in enumerate(answered):
            tokens, begin = sequence.token_ids, sequence.prompt_length
            taps = target.verify([Segment(slot=0, token_ids=tokens[:-1], num_logits=0)], with_taps=True).taps
            target.release(0)
            if not torch.isfinite(taps).all():
                raise CheckpointError(
                    f"{facts.target_name}: sequence {i}: expected finite taps, found NaN or infinity in layers"
                    f" {list(facts.target_layer_ids)}"
                )
            writer.write(f"tokens.{i}", np.array(tokens, dtype=np.int64))
            writer.write(f"prompt_length.{i}", np.array(begin, dtype=np.int64))
            writer.write(f"taps.{i}", _bfloat16(taps))
            writer.write(f"embeddings.{i}", _bfloat16(target.embed(torch.tensor(tokens[begin:]))))


def _bfloat16(values: torch.Tensor) -> NDArray[np.int16]:
    """Rounded to BF16, as bits: numpy has no such type."""
    bits: NDArray[np.int16] = values.to(torch.bfloat16).contiguous().view(torch.int16).numpy()
    return bits
