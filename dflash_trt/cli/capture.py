# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt capture`."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from dflash_trt.checkpoint.pair import read_pair
from dflash_trt.checkpoint.source import checkpoint_label
from dflash_trt.cli.completion import DRAFT
from dflash_trt.cli.options import (
    PATH,
    FiniteRange,
    chat_options,
    json_option,
    options,
    required_target_option,
    take_template,
    tp_option,
)
from dflash_trt.cli.output import print_written, resumable
from dflash_trt.cli.settings import max_tokens_option, runtime_options
from dflash_trt.files.command import quoted
from dflash_trt.files.write import sole_writer
from dflash_trt.runtime.progress_display import progress_bar


@click.command(short_help="Record a target's features for calibration.")
@click.argument("draft", type=DRAFT)
@options(
    required_target_option,
    click.option("--prompts", "prompt_file", required=True, type=PATH,
                 help='JSON Lines: {"prompt": text} or {"token_ids": [...]}, optionally with "id", "category",'
                 ' "language".'),
    click.option("-o", "--output", required=True, type=PATH, help="safetensors file to write."),
    max_tokens_option(256, 2),
    click.option("--max-batch-size", type=click.IntRange(min=1), default=8, show_default=True,
                 help="Prompts answered at once; a GPU answers 64 in hardly more time."),
    click.option("--max-prompts", type=click.IntRange(min=1), help="Use only the first prompts, up to this many."),
    chat_options,
    runtime_options("device", "dtype"),
    tp_option,
    click.option("--taps-dtype", type=click.Choice(["float32", "bfloat16"]), show_default="the target's",
                 help="Type of the recorded taps; bfloat16 halves the file: enough for --calibration, approximate for"
                 " a replay."),
    click.option("--temperature", type=FiniteRange(min=0), default=0.0, show_default=True,
                 help="Sample the answers at this temperature; 0 is greedy."),
    click.option("--seed", type=click.IntRange(0, 2**64 - 1), default=0, show_default=True,
                 help="For --temperature: prompt i (from 0) is sampled with seed + i."),
    click.option("--force", is_flag=True, help="Replace an existing file."),
    json_option,
)  # fmt: skip
def capture(
    draft: str,
    target: str,
    prompt_file: Path,
    output: Path,
    max_prompts: int | None,
    force: bool,
    as_json: bool,
    **settings: Any,
) -> None:
    """Let the target answer prompts, and record the features that DRAFT is calibrated and verified on.

    Only the configuration of DRAFT, a checkpoint directory or Hugging Face repository id, is used: which layers it
    taps, and its mask token. `quantize --calibration FILE`, `search`, `recover` and `verify --features FILE`
    then run without the target. After an interruption the same command continues.

    \b
    Example:
      dflash-trt capture z-lab/gpt-oss-120b-DFlash --target openai/gpt-oss-120b --prompts prompts.jsonl \\
          --chat -o features.safetensors
    """
    from dflash_trt.api.prompts import read_prompts
    from dflash_trt.runtime.ranks.join import join

    template = take_template(settings)
    with join(settings["num_ranks"], settings["device"]) as ranks:
        draft_checkpoint, target_checkpoint = read_pair(draft, target)
        prompts = read_prompts(prompt_file)[:max_prompts]

        from dflash_trt.runtime.measure.feature_capture import FEATURES, CaptureOptions, capture_features
        from dflash_trt.runtime.measure.journal import journal_file

        alone = sole_writer(output, FEATURES, force=force) if ranks.rank == 0 else nullcontext()
        with resumable(journal_file(output)), alone:
            sequences, tokens = capture_features(
                draft_checkpoint, target_checkpoint, prompts, output,
                CaptureOptions(target_name=checkpoint_label(target), template=template, **settings), ranks,
                force=force, progress=progress_bar,
            )  # fmt: skip
        print_written(
            "capture", output, f"{sequences} sequences, {tokens} answer tokens",
            {"sequences": sequences, "answer_tokens": tokens}, as_json=as_json,
            next_step=f"dflash-trt search {quoted(Path(draft))} --features {quoted(output)} --max-tau-loss 1%"
            " -o my.yaml",
        )  # fmt: skip
