# SPDX-License-Identifier: Apache-2.0
"""Measures a session's target alone: the time of a pass next to its bandwidth limit, and the rate of `capture`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import click
import torch
from transformers import PreTrainedModel

from benchmarks.ways import copy_rate, seconds_of
from dflash_trt import __version__
from dflash_trt.cli.output import print_table
from dflash_trt.runtime.measure.feature_answers import answer_prompts
from dflash_trt.runtime.measure.feature_writer import write_features
from dflash_trt.runtime.measure.features import SCHEMA_VERSION, FeatureFacts, PromptFacts
from dflash_trt.runtime.session import Session
from dflash_trt.runtime.targets.packed_target import PackedTarget
from dflash_trt.runtime.targets.target import Segment

AIM_OF_COPY, AIM_PER_LAYER = 1.5, 10
"""Bounds on a pass: a multiple of the time to read its weights at a copy's rate, and microseconds per layer."""


def print_passes(session: Session, model: PreTrainedModel, prompt: Sequence[int]) -> None:
    """Times of a decoding pass over a token and over a block after `prompt`, next to its weights at a copy's rate."""
    target, rate = session.target, copy_rate(model.device.type)
    head, embedding = (layer.weight for layer in (model.get_output_embeddings(), model.get_input_embeddings()))
    read = sum(weight.nbytes for weight in model.parameters() if weight is head or weight is not embedding)
    limit = 1e6 * read / rate
    target.verify([Segment(slot=0, token_ids=prompt, num_logits=0)], with_taps=False)
    rows = []
    for count in (1, session.manifest.draft.block_size):
        segment = Segment(slot=0, token_ids=(list(prompt) * count)[:count], num_logits=count)

        def run(segment: Segment = segment) -> None:
            target.verify([segment], with_taps=True)
            target.rollback(0, segment.num_logits)

        times = [seconds_of(run)]
        if isinstance(target, PackedTarget):
            recorded, target.recorded = target.recorded, None
            times.append(seconds_of(run))
            target.recorded = recorded
        rows.append((str(count), *(f"{1e6 * seconds:.0f}" for seconds in times)))
    target.release(0)
    aim = AIM_OF_COPY * limit + AIM_PER_LAYER * model.config.num_hidden_layers
    click.echo(
        f"target: {read / 1e9:.2f} GB of weights, {limit:.0f} us at a copy's {rate / 1e9:.0f} GB/s;"
        f" aim of a pass: {aim:.0f} us"
    )
    title = f"us of a pass behind {len(prompt)} tokens"
    print_table(title, ("rows", "as it decodes", "kernel by kernel"), rows)


def print_capture(session: Session, prompts: Sequence[Sequence[int]], tokens: int, file: Path) -> None:
    """Rate at which `capture` records the answers to `prompts`, all at once."""
    target, draft, stop_ids = session.target, session.manifest.draft, session.stop_ids
    begin = time.perf_counter()
    answered = answer_prompts(target, prompts, tokens, stop_ids, num_slots=len(prompts))
    middle = time.perf_counter()
    facts = FeatureFacts(
        schema_version=SCHEMA_VERSION, tool_version=__version__, target_name="target", target=session.manifest.target,
        target_layer_ids=draft.target_layer_ids, mask_token_id=draft.mask_token_id, max_tokens=tokens,
        stop_token_ids=tuple(sorted(stop_ids)), target_dtype="bfloat16",
        prompts=tuple(PromptFacts(name=str(index)) for index in range(len(prompts))),
    )  # fmt: skip
    write_features(
        target, answered, facts, file, block_size=draft.block_size, taps_dtype=torch.bfloat16, batch_size=len(prompts)
    )
    answering, recording = middle - begin, time.perf_counter() - middle
    count = sum(len(answer.token_ids) - answer.prompt_length for answer in answered)
    click.echo(
        f"capture of {len(prompts)} prompts at once: {count} tokens answered in {answering:.2f} s,"
        f" {count / answering:.0f} a second, their taps recorded in {recording:.2f} s"
    )
