# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt convert`."""

from __future__ import annotations

from pathlib import Path

import click

from dflash_trt.checkpoint.dialects.layouts import LAYOUTS
from dflash_trt.checkpoint.dialects.recognise import read_config
from dflash_trt.checkpoint.source import configuration_directory
from dflash_trt.cli.completion import DRAFT, TARGET
from dflash_trt.cli.options import PATH, json_option
from dflash_trt.cli.output import print_written
from dflash_trt.cli.recipes import read_checked_draft
from dflash_trt.files.command import quoted


@click.command(short_help="Write a draft checkpoint in another dialect.")
@click.argument("draft", type=DRAFT)
@click.option("-o", "--output", required=True, type=PATH, help="Checkpoint directory to write.")
@click.option("--to", "layout", required=True, type=click.Choice(list(LAYOUTS)), help="Dialect to write.")
@click.option("--target", type=TARGET, help="With --to speculators: the target, which its files name as the verifier.")
@click.option("--force", is_flag=True, help="Replace an existing output directory.")
@json_option
def convert(draft: str, output: Path, layout: str, target: str | None, force: bool, as_json: bool) -> None:
    """Write DRAFT, a checkpoint directory or Hugging Face repository id of any dialect, in another one.

    Tensors keep their bytes; weights of compressed-tensors and GGUF files become BF16. Facts
    that the other dialect cannot express are errors that name them.

    \b
    Example:
      dflash-trt convert z-lab/Qwen3-8B-DFlash-b16 -o speculators-draft --to speculators --target Qwen/Qwen3-8B
    """
    from dflash_trt.checkpoint.convert_dialect import Verifier, convert_dialect

    if (layout == "speculators") != (target is not None):
        raise click.UsageError("--to speculators needs --target, the target that its files name; no other layout does")
    verifier = None
    if target is not None:
        config = read_config(configuration_directory(target))
        verifier = Verifier(name=target, architectures=config.texts("architectures"))
    checkpoint = read_checked_draft(draft, None)
    convert_dialect(checkpoint, LAYOUTS[layout], output, verifier=verifier, force=force)
    num_tensors, source = len(checkpoint.weights), checkpoint.dialect.name
    print_written(
        "convert", output, f"{num_tensors} tensors, {source} -> {layout}",
        {"tensors": num_tensors, "from": source, "to": layout},
        next_step=f"dflash-trt inspect {quoted(output)}", as_json=as_json,
    )  # fmt: skip
