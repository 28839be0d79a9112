# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt capture`: loads the target, lets it answer prompts and writes the features of its answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
import torch

from dflash_trt import __version__
from dflash_trt.api.prompts import PromptLine
from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint
from dflash_trt.checkpoint.target_checkpoint import TargetCheckpoint
from dflash_trt.checkpoint.tokenizer import load_tokenizer
from dflash_trt.files.write import check_replaceable, new_file
from dflash_trt.runtime.checked_pair import check_prompt
from dflash_trt.runtime.cpu.accelerate import accelerate
from dflash_trt.runtime.measure.feature_capture import FEATURES, answer_prompts, write_features
from dflash_trt.runtime.measure.features import SCHEMA_VERSION, FeatureFacts, PromptFacts
from dflash_trt.runtime.measure.verification import tokenize
from dflash_trt.runtime.targets.huggingface import load_model, make_target, stop_token_ids

BATCH_SIZE = 8
"""Prompts answered at once."""


class CaptureOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How prompts are answered, and what of it is written."""

    target_name: str
    max_tokens: int
    chat: bool
    dtype: str
    """Of the target."""
    taps_dtype: str | None
    """None: the target's."""
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

    def check(token_ids: list[int]) -> None:
        check_prompt(token_ids, options.max_tokens, draft.spec, target.spec)

    encoded = [
        prompt.token_ids for prompt in tokenize(prompts, load_tokenizer(target.directory), check, chat=options.chat)
    ]
    taps = draft.spec.target_layer_ids
    model = load_model(target.directory, target.spec, taps, dtype=options.dtype)
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
