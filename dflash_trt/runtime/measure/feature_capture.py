# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt capture`: runs the target over prompts and writes what calibration and replay need of it.

First the answers are decoded; then each prompt with its answer runs once more, in passes as speculative decoding makes
them, and its taps go to disk. All lengths are known by then, so one sequence is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from dflash_trt import __version__
from dflash_trt.api.prompts import PromptLine
from dflash_trt.api.runtime_options import DEFAULTS
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint
from dflash_trt.checkpoint.safetensors_writer import Layout, SafetensorsWriter, aligned, metadata
from dflash_trt.checkpoint.target_checkpoint import TargetCheckpoint
from dflash_trt.checkpoint.tokenizer import load_tokenizer
from dflash_trt.errors import CheckpointError
from dflash_trt.files.write import OutputKind, check_replaceable, new_file
from dflash_trt.runtime.checked_pair import check_prompt
from dflash_trt.runtime.cpu.accelerate import accelerate
from dflash_trt.runtime.decoder import Decoder
from dflash_trt.runtime.draft_length import FixedLength
from dflash_trt.runtime.kvcache.slots import SlotPool
from dflash_trt.runtime.measure.features import (
    LM_HEAD_BIAS,
    MASK_EMBEDDING,
    METADATA_KEY,
    SCHEMA_VERSION,
    FeatureFacts,
    PromptFacts,
    tensor_shapes,
)
from dflash_trt.runtime.measure.verification import tokenize
from dflash_trt.runtime.model_runner import LocalRunner
from dflash_trt.runtime.request import Request
from dflash_trt.runtime.session import choose_device
from dflash_trt.runtime.targets.huggingface import load_model, make_target, stop_token_ids
from dflash_trt.runtime.targets.running_model import HuggingFaceTarget
from dflash_trt.runtime.targets.target import Segment, Target

FEATURES = OutputKind(
    name="features that this command captured",
    recognizes=lambda file: METADATA_KEY in metadata(file),
    form="file",
    option="-o FILE",
)

SPELLINGS = {torch.float32: "F32", torch.bfloat16: "BF16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A prompt and the target's answer."""

    token_ids: list[int]
    prompt_length: int


def answer_prompts(
    target: Target,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    stop_ids: frozenset[int],
    *,
    temperature: float = 0.0,
    seeds: Sequence[int] | None = None,
    num_slots: int = 1,
    on_answer: Callable[[], None] = lambda: None,
) -> list[Answered]:
    """Decodes every prompt, to a stop token (kept) or `max_tokens` tokens, `num_slots` at once; `seeds` by prompt."""
    asked = [
        SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
        for seed in seeds or [0] * len(prompts)
    ]
    requests = [
        Request(prompt_ids=prompt, params=params, sampler=params.sampler(), stop_ids=stop_ids)
        for prompt, params in zip(prompts, asked, strict=True)
    ]
    longest = max((request.max_length for request in requests), default=0)
    decoder = Decoder(LocalRunner(target, None), SlotPool.for_each_slot(num_slots, longest), FixedLength(0))
    for request in requests:
        request.on_progress = lambda request: on_answer() if request.finished else None
    decoder.run(requests)
    return [
        Answered(token_ids=[*request.prompt_ids, *request.token_ids], prompt_length=len(request.prompt_ids))
        for request in requests
    ]


def write_features(
    target: HuggingFaceTarget,
    answered: Sequence[Answered],
    facts: FeatureFacts,
    output: Path,
    *,
    block_size: int,
    taps_dtype: torch.dtype = torch.float32,
) -> None:
    """Runs the target over each sequence, in blocks of `block_size`, and writes the feature file (layout: features.py).

    Embeddings and lm_head take BF16 where that keeps every value, else FLOAT; the taps are of `taps_dtype`. Raises
    CheckpointError for taps that are not finite, OSError when the file cannot be written.
    """
    head = target.head()
    table = target.embed(torch.tensor(sorted({facts.mask_token_id, *_answer_tokens(answered)})))
    dtypes = {name: narrowest(tensor) for name, tensor in head.items()} | {"embeddings": narrowest(table)}
    dtypes |= {MASK_EMBEDDING: dtypes["embeddings"], "taps": taps_dtype}
    header = {METADATA_KEY: msgspec.json.encode(facts, order="deterministic").decode()}
    with SafetensorsWriter(output, _layout(answered, facts, dtypes), metadata=header) as writer:

        def write(name: str, values: torch.Tensor) -> None:
            writer.write(name, bits(values, dtypes[name.partition(".")[0]]))

        for name, tensor in head.items():
            write(name, tensor)
        write(MASK_EMBEDDING, target.embed(torch.tensor(facts.mask_token_id)))
        for i, sequence in enumerate(answered):
            tokens, begin = sequence.token_ids, sequence.prompt_length
            writer.write(f"tokens.{i}", np.array(tokens, dtype=np.int64))
            writer.write(f"prompt_length.{i}", np.array(begin, dtype=np.int64))
            write(f"taps.{i}", _read_taps(target, sequence, block_size, f"{facts.target_name}: sequence {i}"))
            write(f"embeddings.{i}", target.embed(torch.tensor(tokens[begin:])))


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


def _read_taps(target: Target, sequence: Answered, block_size: int, name: str) -> torch.Tensor:
    """Taps of all tokens but the last.

    In chunks and blocks as decoding has them: one pass would add its sums in another order.
    """
    tokens, begin = sequence.token_ids[:-1], sequence.prompt_length
    ends = [*range(0, begin, DEFAULTS.prefill_chunk), *range(begin, len(tokens), block_size), len(tokens)]
    parts = []
    for first, end in pairwise(ends):
        segment = Segment(slot=0, token_ids=tokens[first:end], num_logits=0)
        parts.append(target.verify([segment], with_taps=True).taps)
        target.rollback(0, 0)
    target.release(0)
    taps = torch.cat(parts)
    if not torch.isfinite(taps).all():
        raise CheckpointError(f"{name}: expected finite taps, found NaN or infinity")
    return taps


def narrowest(values: torch.Tensor) -> torch.dtype:
    """BF16 where it holds each of `values`, else FLOAT."""
    is_exact = torch.equal(values.to(torch.bfloat16).to(values.dtype), values)
    return torch.bfloat16 if is_exact else torch.float32


def bits(values: torch.Tensor, dtype: torch.dtype) -> NDArray[Any]:
    """`values` in `dtype`, BF16 as its bits: numpy has no such type."""
    converted = values.to(dtype).contiguous()
    array: NDArray[Any] = (converted.view(torch.int16) if dtype == torch.bfloat16 else converted).cpu().numpy()
    return array


BATCH_SIZE = 8
"""Prompts answered at once."""


class CaptureOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a capture."""

    target_name: str
    max_tokens: int
    chat: bool
    device: str
    """Device of the target: cpu, cuda or auto."""
    dtype: str
    """Type that the target is computed in."""
    taps_dtype: str | None
    """Type of the recorded taps; None: the target's."""
    temperature: float
    seed: int


def capture_features(
    draft: DraftCheckpoint,
    target: TargetCheckpoint,
    prompts: Sequence[PromptLine],
    output: Path,
    options: CaptureOptions,
    *,
    force: bool,
    progress: Callable[[int, str], AbstractContextManager[Callable[[], None]]],
) -> tuple[int, int]:
    """Writes the feature file `output`; returns the numbers of sequences and of answer tokens.

    BuildError where it cannot be written, RequestError for a prompt that cannot be answered to its last token.
    """
    check_replaceable(output, FEATURES, force=force)
    device = choose_device(options.device)

    def check(token_ids: list[int]) -> None:
        check_prompt(token_ids, options.max_tokens, draft.spec, target.spec)

    encoded = [
        prompt.token_ids for prompt in tokenize(prompts, load_tokenizer(target.directory), check, chat=options.chat)
    ]
    taps, width = draft.spec.target_layer_ids, draft.spec.tap_hidden_size
    if width not in (None, target.spec.hidden_size):
        raise CheckpointError(
            f"{options.target_name}: expected taps of {target.spec.hidden_size} values to capture, found a draft that"
            f" reads {width}, all residual streams"
        )
    model = load_model(target.directory, target.spec, taps, dtype=options.dtype, device=device)
    running = make_target(model, taps, BATCH_SIZE, accelerate)
    stop_ids = stop_token_ids(model)
    facts = FeatureFacts(
        schema_version=SCHEMA_VERSION,
        tool_version=__version__,
        target_name=options.target_name,
        target=target.spec,
        target_layer_ids=taps,
        mask_token_id=draft.spec.mask_token_id,
        max_tokens=options.max_tokens,
        stop_token_ids=tuple(sorted(stop_ids)),
        target_dtype="bfloat16" if model.dtype == torch.bfloat16 else "float32",
        prompts=tuple(PromptFacts(name=p.id, category=p.category, language=p.language) for p in prompts),
        temperature=options.temperature,
        seed=options.seed if options.temperature else 0,
    )
    with new_file(output, FEATURES, force=force) as temporary:
        with progress(len(encoded), "answering") as advance:
            answered = answer_prompts(
                running, encoded, options.max_tokens, stop_ids,
                temperature=options.temperature, seeds=[facts.sampler_seed(i) for i in range(len(encoded))],
                num_slots=BATCH_SIZE, on_answer=advance,
            )  # fmt: skip
        write_features(
            running,
            answered,
            facts,
            temporary,
            block_size=draft.spec.block_size,
            taps_dtype=model.dtype if options.taps_dtype is None else getattr(torch, options.taps_dtype),
        )
    return len(answered), sum(len(sequence.token_ids) - sequence.prompt_length for sequence in answered)
