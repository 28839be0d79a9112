# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt capture`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from dflash_trt import __version__
from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint, read_draft
from dflash_trt.checkpoint.source import checkpoint_directory, checkpoint_label, configuration_directory
from dflash_trt.checkpoint.target_checkpoint import TargetCheckpoint, check_pair, read_target
from dflash_trt.cli.dtype_option import dtype_option
from dflash_trt.errors import RequestError
from dflash_trt.files.write import check_replaceable, new_file

if TYPE_CHECKING:
    from dflash_trt.runtime.prompts import Prompt

BATCH_SIZE = 8
"""Prompts answered at once."""


@click.command(short_help="Record a target's features for calibration.")
@click.argument("draft")
@click.option("--target", required=True, help="Target checkpoint: directory or Hugging Face repository id.")
@click.option(
    "--prompts",
    "prompt_file",
    required=True,
    type=click.Path(path_type=Path),
    help='JSON Lines: {"prompt": text} or {"token_ids": [...]}, optionally with "id", "category", "language".',
)
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="safetensors file to write.")
@click.option(
    "--max-tokens", "--max-new-tokens", "max_tokens", type=click.IntRange(min=2), default=256, show_default=True
)
@click.option("--max-prompts", type=click.IntRange(min=1), help="Take only the first so many prompts.")
@click.option("--chat", is_flag=True, help="Wrap text prompts in the target's chat template.")
@dtype_option
@click.option(
    "--taps-dtype",
    type=click.Choice(["float32", "bfloat16"]),
    show_default="the target's",
    help="bfloat16 halves the file, as enough for --calibration; a replay is then near, not equal.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="Sample the answers, so that a replay is decoding at this temperature; 0 is greedy.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**64 - 1),
    default=0,
    show_default=True,
    help="For --temperature: prompt i, from 0, is sampled with this and i added.",
)
@click.option(
    "--top-logprobs",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Record the log probabilities of so many likeliest tokens at each place, for `verify --temperature`.",
)
@click.option("--force", is_flag=True, help="Replace an existing file.")
def capture(
    draft: str,
    target: str,
    prompt_file: Path,
    output: Path,
    max_tokens: int,
    max_prompts: int | None,
    chat: bool,
    dtype: str,
    taps_dtype: str | None,
    temperature: float,
    seed: int,
    top_logprobs: int,
    force: bool,
) -> None:
    """Let the target answer prompts and record the features that DRAFT is calibrated and judged on.

    Of DRAFT, a checkpoint directory or Hugging Face repository id, only the facts are used: which layers it
    taps, and its mask token. `quantize --calibration FILE` and `verify --features FILE` need the target no more.

    \b
    Example:
      dflash-trt capture z-lab/gpt-oss-120b-DFlash --target openai/gpt-oss-120b --prompts prompts.jsonl \\
          --chat -o features.safetensors
    """
    from dflash_trt.runtime.prompts import read_prompts

    draft_checkpoint = read_draft(checkpoint_directory(draft))
    target_checkpoint = read_target(configuration_directory(target))
    check_pair(draft_checkpoint.spec, target_checkpoint.spec, draft_name=draft, target_name=target)
    prompts = read_prompts(prompt_file)[:max_prompts]
    if top_logprobs > (vocab_size := target_checkpoint.spec.vocab_size):
        raise click.BadParameter(
            f"expected at most {vocab_size}, the target's tokens, found {top_logprobs}", param_hint="'--top-logprobs'"
        )

    import torch

    from dflash_trt.measure.feature_capture import FEATURES, answer_prompts, write_features
    from dflash_trt.quantize.features import GREEDY_VERSION, SAMPLED_VERSION, FeatureFacts, PromptFacts
    from dflash_trt.targets.huggingface import load_model, make_target, stop_token_ids

    check_replaceable(output, FEATURES, force=force)
    encoded = _encode(prompts, target_checkpoint, draft_checkpoint, max_tokens, chat)
    taps = draft_checkpoint.spec.target_layer_ids
    model = load_model(target_checkpoint.directory, target_checkpoint.spec, taps, dtype=dtype)
    running = make_target(model, taps, BATCH_SIZE)
    stop_ids = stop_token_ids(model)
    facts = FeatureFacts(
        schema_version=SAMPLED_VERSION if temperature or top_logprobs else GREEDY_VERSION,
        tool_version=__version__,
        target_name=checkpoint_label(target),
        target=target_checkpoint.spec,
        target_layer_ids=taps,
        mask_token_id=draft_checkpoint.spec.mask_token_id,
        max_tokens=max_tokens,
        stop_token_ids=tuple(sorted(stop_ids)),
        target_dtype="bfloat16" if model.dtype == torch.bfloat16 else "float32",
        prompts=tuple(PromptFacts(name=p.id, category=p.category, language=p.language) for p in prompts),
        top_logprobs=top_logprobs,
    )
    if temperature:
        facts = msgspec.structs.replace(facts, temperature=temperature, seed=seed)
    with new_file(output, FEATURES, force=force) as temporary:
        with _progress(len(encoded)) as advance:
            answered = answer_prompts(
                running, encoded, max_tokens, stop_ids,
                temperature=temperature, seeds=[facts.sampler_seed(i) for i in range(len(encoded))],
                num_slots=BATCH_SIZE, on_answer=advance,
            )  # fmt: skip
        write_features(
            running,
            answered,
            facts,
            temporary,
            block_size=draft_checkpoint.spec.block_size,
            taps_dtype=model.dtype if taps_dtype is None else getattr(torch, taps_dtype),
        )
    tokens = sum(len(sequence.token_ids) - sequence.prompt_length for sequence in answered)
    click.echo(f"{len(answered)} sequences, {tokens} answer tokens", err=True)
    click.echo(output)


def _encode(
    prompts: list[Prompt], target: TargetCheckpoint, draft: DraftCheckpoint, max_tokens: int, chat: bool
) -> list[list[int]]:
    """Every prompt's token ids; RequestError names the first that cannot be answered to its last token."""
    from dflash_trt.runtime.prompts import check_prompt
    from dflash_trt.targets.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(target.directory)
    encoded = []
    for prompt in prompts:
        encoded.append(prompt.encode(tokenizer, chat=chat))
        try:
            check_prompt(encoded[-1], max_tokens, draft.spec, target.spec)
        except RequestError as error:
            raise RequestError(f"{prompt.id}: {error.message}", hint=error.hint) from None
    return encoded


@contextmanager
def _progress(num_prompts: int) -> Iterator[Callable[[], None]]:
    """A progress bar on a terminal, and what moves it on by one."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("answering", total=num_prompts)
        yield lambda: progress.advance(task)
