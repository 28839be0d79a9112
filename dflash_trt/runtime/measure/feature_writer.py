# SPDX-License-Identifier: Apache-2.0
"""Writes a feature file: the target runs over each prompt and answer once more, and its taps go to disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from dflash_trt.api.runtime_options import DEFAULTS
from dflash_trt.checkpoint.safetensors_writer import Layout, SafetensorsWriter, aligned
from dflash_trt.errors import CheckpointError
from dflash_trt.runtime.measure.feature_answers import Answered
from dflash_trt.runtime.measure.features import (
    CHECKSUM,
    EMBED_TOKENS,
    LM_HEAD_BIAS,
    MASK_EMBEDDING,
    METADATA_KEY,
    FeatureFacts,
    checksum,
    tensor_shapes,
)
from dflash_trt.runtime.targets.running_model import HuggingFaceTarget
from dflash_trt.runtime.targets.target import Segment, Target

SPELLINGS = {torch.float32: "F32", torch.bfloat16: "BF16"}


def write_features(
    target: HuggingFaceTarget,
    answered: Sequence[Answered],
    facts: FeatureFacts,
    output: Path,
    *,
    block_size: int,
    taps_dtype: torch.dtype = torch.float32,
    batch_size: int = 1,
    num_written: int = 0,
    on_written: Callable[[int], None] = lambda count: None,
) -> None:
    """Runs the target over each sequence, in blocks of `block_size`, and writes the feature file (layout: features.py).

    Embeddings and lm_head take BF16 where that keeps every value, else FLOAT; the taps are of `taps_dtype`.
    `batch_size` sequences run at once. The first `num_written` are in the file, from an earlier call with the same
    arguments; `on_written` gets their number when a batch is on disk. Raises CheckpointError for taps that are not
    finite, OSError when the file cannot be written.
    """
    head = target.head()
    token_ids = sorted({facts.mask_token_id, *_answer_tokens(answered)})
    table = target.embed(torch.arange(facts.target.vocab_size) if facts.has_embedding else torch.tensor(token_ids))
    dtypes = {name: narrowest(tensor) for name, tensor in head.items()} | {"embeddings": narrowest(table)}
    dtypes |= {MASK_EMBEDDING: dtypes["embeddings"], EMBED_TOKENS: dtypes["embeddings"], "taps": taps_dtype}
    header = {METADATA_KEY: msgspec.json.encode(facts, order="deterministic").decode()}
    layout = _layout(answered, facts, dtypes)
    done = {name for name in layout if _sequence_of(name) < num_written}
    with SafetensorsWriter(output, layout, metadata=header, written=done) as writer:

        def write(name: str, values: torch.Tensor) -> None:
            stored = values.to(dtypes.get(name.partition(".")[0], values.dtype)).cpu().contiguous()
            writer.write(name, bits(stored))
            writer.write(f"{CHECKSUM}{name}", np.array(checksum(stored), dtype=np.int64))

        if not done:
            for name, tensor in head.items():
                write(name, tensor)
            if facts.has_embedding:
                write(EMBED_TOKENS, table)
            write(MASK_EMBEDDING, target.embed(torch.tensor(facts.mask_token_id)))
        for begin in range(num_written, len(answered), batch_size):
            batch = answered[begin : begin + batch_size]
            for i, (sequence, taps) in enumerate(zip(batch, _taps(target, batch, block_size), strict=True), begin):
                answer = sequence.token_ids[sequence.prompt_length :]
                write(f"tokens.{i}", torch.tensor(sequence.token_ids))
                write(f"prompt_length.{i}", torch.tensor(sequence.prompt_length))
                if not torch.isfinite(taps).all():
                    name = f"{facts.target_name}: sequence {i}"
                    raise CheckpointError(f"{name}: expected finite taps, found NaN or infinity")
                write(f"taps.{i}", taps)
                write(f"embeddings.{i}", target.embed(torch.tensor(answer)))
            writer.flush()
            on_written(begin + len(batch))


def _sequence_of(name: str) -> int:
    """The number of the sequence that a tensor belongs to; 0 for what the file has once."""
    number = name.rpartition(".")[2]
    return int(number) if number.isdigit() else 0


def _answer_tokens(answered: Sequence[Answered]) -> set[int]:
    return {token for sequence in answered for token in sequence.token_ids[sequence.prompt_length :]}


def _layout(answered: Sequence[Answered], facts: FeatureFacts, dtypes: Mapping[str, torch.dtype]) -> Layout:
    """dtype and shape of every tensor; `dtypes` are those of the floats, by the name before the number."""
    lengths = [(len(sequence.token_ids), sequence.prompt_length) for sequence in answered]
    shapes = tensor_shapes(facts, lengths, has_bias=LM_HEAD_BIAS in dtypes)

    def spelling(name: str, allowed: tuple[str, ...]) -> str:
        dtype = dtypes.get(name.partition(".")[0])
        return allowed[0] if dtype is None else SPELLINGS[dtype]

    return aligned({name: (spelling(name, allowed), shape) for name, (allowed, shape) in shapes.items()})


def _taps(target: Target, batch: Sequence[Answered], block_size: int) -> list[torch.Tensor]:
    """Taps of all tokens but the last of each sequence, on the CPU.

    In chunks and blocks as decoding has them: one pass would add its sums in another order. Prompts run one by one,
    then the blocks of all at once.
    """
    parts: list[list[torch.Tensor]] = [[] for _ in batch]

    def run(pieces: Mapping[int, list[int]]) -> None:
        segments = [Segment(slot=slot, token_ids=piece, num_logits=0) for slot, piece in pieces.items()]
        taps = target.verify(segments, with_taps=True).taps.cpu()
        for slot, rows in zip(pieces, torch.split(taps, [len(piece) for piece in pieces.values()]), strict=True):
            parts[slot].append(rows)
            target.rollback(slot, 0)

    for slot, sequence in enumerate(batch):
        for piece in _pieces(sequence.token_ids[: sequence.prompt_length], DEFAULTS.prefill_chunk):
            run({slot: piece})
    blocks = [_pieces(sequence.token_ids[sequence.prompt_length : -1], block_size) for sequence in batch]
    for number in range(max(map(len, blocks))):
        run({slot: pieces[number] for slot, pieces in enumerate(blocks) if number < len(pieces)})
    for slot in range(len(batch)):
        target.release(slot)
    return [torch.cat(rows) for rows in parts]


def _pieces(tokens: list[int], size: int) -> list[list[int]]:
    return [tokens[begin : begin + size] for begin in range(0, len(tokens), size)]


def narrowest(values: torch.Tensor) -> torch.dtype:
    """BF16 where it holds each of `values`, else FLOAT."""
    is_exact = torch.equal(values.to(torch.bfloat16).to(values.dtype), values)
    return torch.bfloat16 if is_exact else torch.float32


def bits(values: torch.Tensor) -> NDArray[Any]:
    """The array of a tensor on the CPU, BF16 as its bits: numpy has no such type."""
    array: NDArray[Any] = (values.view(torch.int16) if values.dtype == torch.bfloat16 else values).numpy()
    return array
